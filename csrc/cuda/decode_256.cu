#include "decode_launch.cuh"

namespace kvq {
namespace cuda {

int64_t decode_256(Action action, const Attention &a, void *scratch, cudaStream_t stream) {
  return with_dims<256, 256>(action, a, scratch, stream);
}

}  // namespace cuda
}  // namespace kvq
