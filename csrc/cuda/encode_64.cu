#include "encode_kernel.cuh"

namespace kvq {
namespace cuda {

void launch_encode_64(const Coding &c, int num_multiprocessors, cudaStream_t stream) {
  halves::launch<64>(c, num_multiprocessors, stream);
}

}  // namespace cuda
}  // namespace kvq
