// Launches that begin before what is ahead of them has ended, so that a multiprocessor with room prepares what it needs
// meanwhile: parameters, addresses, what no kernel in flight writes.
#pragma once

#include <cuda_runtime.h>

#include <mutex>

namespace kvq {
namespace cuda {

// Nothing that a kernel ahead may write or read is touched before this wait. What such a kernel has written is not to
// be read by __ldg either, which the compiler may move ahead of it.
__device__ __forceinline__ void wait_for_kernels_ahead() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next kernel begin, once this one's wait is over.
__device__ __forceinline__ void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Held from where a kernel's limit of shared memory is set until it is launched: threads with other sizes change it.
template <class... Parameters>
std::mutex &mutex_of(void (*)(Parameters...)) {
  static std::mutex mutex;
  return mutex;
}

// Launches a kernel that calls wait_for_kernels_ahead, in clusters of `cluster` CTAs, more than one of them from sm_90
// on.
template <class... Parameters, class... Arguments>
void launch_clusters_behind(void (*kernel)(Parameters...), dim3 grid, dim3 cluster, int threads, int shared_bytes,
                            cudaStream_t stream, const Arguments &...arguments) {
  constexpr int MANY_BYTES = 32 << 10;  // with what a kernel has beside them, more are to be asked for
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = dim3((unsigned)threads);
  config.dynamicSmemBytes = (size_t)shared_bytes, config.stream = stream;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster.x, attributes[1].val.clusterDim.y = cluster.y;
  attributes[1].val.clusterDim.z = cluster.z;
  config.attrs = attributes, config.numAttrs = cluster.x * cluster.y * cluster.z > 1 ? 2 : 1;
  std::unique_lock<std::mutex> lock(mutex_of(kernel), std::defer_lock);
  if (shared_bytes > MANY_BYTES) {
    lock.lock();
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  }
  cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

// The same without clusters.
template <class... Parameters, class... Arguments>
void launch_behind(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes, cudaStream_t stream,
                   const Arguments &...arguments) {
  launch_clusters_behind(kernel, grid, dim3(1), threads, shared_bytes, stream, arguments...);
}

}  // namespace cuda
}  // namespace kvq
