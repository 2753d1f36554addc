// What the kernels of sparse attention need and CUDA C++ has no name for.
#pragma once

#include "decode_asm.cuh"
#include "launches.cuh"
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

// What is in memory, not in a cache of this multiprocessor, and not read earlier than here.
template <class T>
__device__ __forceinline__ T fresh(const T *x) {
  return *(const volatile T *)x;
}

// copy_async and fresh of 16 and 8 bytes that are read once a launch and so are to leave the L2 cache first: what is
// read again, code too, stays there.
__device__ __forceinline__ unsigned long long read_once() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void copy_once(void *shared, const void *global) {
  uint32_t address = (uint32_t)__cvta_generic_to_shared(shared);
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(address), "l"(global),
               "l"(read_once())
               : "memory");
}
__device__ __forceinline__ unsigned long long fresh_once(const void *x) {
  unsigned long long there;
  asm volatile("ld.relaxed.gpu.global.L2::cache_hint.b64 %0, [%1], %2;"
               : "=l"(there)
               : "l"(x), "l"(read_once())
               : "memory");
  return there;
}

// Adds to what is in memory; unlike atomicAdd it surely has nothing come back.
__device__ __forceinline__ void add_to(uint32_t *to, uint32_t x) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
__device__ __forceinline__ void add_to(unsigned long long *to, unsigned long long x) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(to), "l"(x) : "memory");
}

// Waits for other blocks of threads: those of which each has called this with the same counter, `all` times together.
// What any of them wrote before, each may then read by `fresh`.
__device__ __forceinline__ void meet_blocks(uint32_t *arrived, uint32_t all) {
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrived) : "memory");
    uint32_t there;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(arrived) : "memory");
    } while (there < all);
  }
  __syncthreads();
}

// Waits until another block of threads has written something other than 0, by an atomic operation.
__device__ __forceinline__ uint32_t awaited(const uint32_t *x) {
  uint32_t there;
  while (!(there = fresh(x))) {
  }
  return there;
}

// The same of `count` words, N at most, that are `stride` apart.
template <int N>
__device__ __forceinline__ void await_words(uint32_t (&words)[N], const uint32_t *from, int stride, int count) {
  bool all;
  do {
    all = true;
#pragma unroll
    for (int i = 0; i < N; i++)
      if (i < count) words[i] = fresh(from + i * stride), all = all && words[i];
  } while (!all);
}

// Clusters of so many CTAs of scan_select, one beside the other, that run at the same time.
template <class Kernel>
int count_item_clusters(Kernel kernel, int size, int threads, int bytes) {
  return count_clusters_at_once(kernel, size, threads, bytes);
}

}  // namespace cuda
}  // namespace kvq
