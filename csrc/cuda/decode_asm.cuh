// Instructions of the decode kernels that CUDA C++ has no name for, and what their launches need.
//   m16n8k32 int8   A: row g | g+8, k = 4c .. 4c+3 | 16+4c ..   B: column g, same k    C: row g | g+8, columns 2c, 2c+1
#pragma once

#include "launches.cuh"
#include "tiles_asm.cuh"

namespace kvq {
namespace cuda {

// d = a . b + c of signed bytes; with UNSIGNED, b holds unsigned ones.
template <bool UNSIGNED>
__device__ __forceinline__ void mma_int8(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1, const int (&c)[4]) {
  if constexpr (UNSIGNED)
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
  else
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

// (x & mask) | (y & ~mask) in one instruction.
__device__ __forceinline__ uint32_t select_bits(uint32_t x, uint32_t y, uint32_t mask) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(r) : "r"(x), "r"(y), "r"(mask));
  return r;
}

__device__ __forceinline__ uint64_t wide_product(uint32_t x, uint32_t y) {
  uint64_t r;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(r) : "r"(x), "r"(y));
  return r;
}

// Copies of 16 bytes from global to shared memory that do not wait; a lane waits for its own with wait_copy_groups,
// others' need __syncwarp after that.
__device__ __forceinline__ void start_copy(uint32_t to, const void *from) {  // an address in shared memory
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void start_copy_of_8(uint32_t to, const void *from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void start_copy(void *to, const void *from) { start_copy(shared_address(to), from); }
__device__ __forceinline__ void start_copy(void *to, const void *from, bool valid) {  // zeros if not
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}

// p + x * y in one instruction.
__device__ __forceinline__ const char *advanced(const char *p, uint32_t x, uint32_t y) {
  const char *r;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(r) : "r"(x), "r"(y), "l"(p));
  return r;
}

// Has an address computed by this point, not where it is used.
template <class X>
__device__ __forceinline__ void hold(X *&address) {
  asm volatile("" : "+l"(address));
}
// The same of an index, and not a second time.
__device__ __forceinline__ void hold(int &index) { asm volatile("" : "+r"(index)); }
__device__ __forceinline__ void hold(uint32_t &index) { asm volatile("" : "+r"(index)); }

// Brings the parameters of a launch, which are cold, one word of every 64 bytes.
template <class Parameters>
__device__ __forceinline__ void fetch_parameters(const Parameters &parameters) {
  const int *word = (const int *)&parameters;
#pragma unroll
  for (int i = 0; i < (int)sizeof(Parameters) / 4; i += 16) asm volatile("" ::"r"(word[i]));
}

// CTAs of a kernel that run at the same time on the card; 0 where it has too little shared memory for one.
template <class Kernel>
int count_at_once(Kernel kernel, int threads, int bytes) {
  int device = 0, processors = 1, each = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) != cudaSuccess) {
    cudaGetLastError();  // the answer, not an error of the launches to come
    return 0;
  }
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, bytes);
  return processors * each;
}

}  // namespace cuda
}  // namespace kvq
