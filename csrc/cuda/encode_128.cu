#include "encode_kernel.cuh"

namespace kvq {
namespace cuda {

void launch_encode_128(const Coding *keys, const Coding *values, int num_multiprocessors, cudaStream_t stream) {
  halves::launch<128>(keys, values, num_multiprocessors, stream);
}

}  // namespace cuda
}  // namespace kvq
