// Launches that begin before what is ahead of them has ended, so that a multiprocessor with room prepares what it needs
// meanwhile: parameters, addresses, what no kernel in flight writes.
#pragma once

#include <cuda_runtime.h>

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

// Launches a kernel that calls wait_for_kernels_ahead.
template <class... Parameters, class... Arguments>
void launch_behind(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes, cudaStream_t stream,
                   const Arguments &...arguments) {
  constexpr int MANY_BYTES = 32 << 10;  // with what a kernel has beside them, more are to be asked for
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = dim3((unsigned)threads);
  config.dynamicSmemBytes = (size_t)shared_bytes, config.stream = stream;
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early, config.numAttrs = 1;
  if (shared_bytes > MANY_BYTES)
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

}  // namespace cuda
}  // namespace kvq
