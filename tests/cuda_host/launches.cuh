// The host twin of csrc/cuda/launches.cuh: kernels run one after the other.
#pragma once

#include "emulator.h"

namespace kvq {
namespace cuda {

inline void wait_for_kernels_ahead() {}
inline void let_next_kernel_begin() {}

template <class... Parameters, class... Arguments>
void launch_clusters_behind(void (*kernel)(Parameters...), dim3 grid, dim3 cluster, int threads, int shared_bytes,
                            cudaStream_t, const Arguments &...arguments) {
  if (cluster.x * cluster.y * cluster.z > 1 && !emulated::has_clusters()) emulated::fail("the card has no clusters");
  emulated::run_grid(grid, dim3((unsigned)threads), shared_bytes, [&] { kernel(arguments...); }, cluster);
}
template <class... Parameters, class... Arguments>
void launch_behind(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes, cudaStream_t stream,
                   const Arguments &...arguments) {
  launch_clusters_behind(kernel, grid, dim3(1), threads, shared_bytes, stream, arguments...);
}

}  // namespace cuda
}  // namespace kvq
