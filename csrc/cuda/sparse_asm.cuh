// What the kernels of sparse attention need and CUDA C++ has no name for.
#pragma once

#include <utility>

#include "tiles_asm.cuh"

namespace kvq {
namespace cuda {

// d = c + popcount of a & b, of 16 x 128 and 128 x 8 bits. With lane = 4 g + c: a0, a1 are bits 32 c .. of rows g, g +
// 8; b is bits 32 c .. of column g; d is rows g, g, g + 8, g + 8, columns 2 c, 2 c + 1.
__device__ __forceinline__ void mma_bits(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t b, const int (&c)[4]) {
  asm("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%9,%10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(b), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

// Ends a group of copies that this thread started since the last one.
__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most PENDING groups of this thread are under way.
template <int PENDING>
__device__ __forceinline__ void wait_copy_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// A kernel that launch_behind starts may begin before the kernels ahead of it have ended: nothing of the device's
// memory is read or written before this wait. It then lets the next one begin.
__device__ __forceinline__ void wait_for_kernels_ahead() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Launches a kernel that calls wait_for_kernels_ahead.
template <class... Parameters, class... Arguments>
void launch_behind(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes, cudaStream_t stream,
                   Arguments &&...arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = dim3(threads), config.dynamicSmemBytes = shared_bytes,
  config.stream = stream;
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early, config.numAttrs = 1;
  cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

}  // namespace cuda
}  // namespace kvq
