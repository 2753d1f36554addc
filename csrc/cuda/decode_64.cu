#include "decode_launch.cuh"

namespace kvq {
namespace cuda {

int64_t decode_64(Action action, const Attention &a, void *scratch, cudaStream_t stream) {
  return with_dims<64, 64>(action, a, scratch, stream);
}

}  // namespace cuda
}  // namespace kvq
