// Copies into and out of shared memory that CUDA C++ has no name for.
#pragma once

#include "mma.cuh"

namespace kvq {
namespace cuda {

// Four 8x8 matrices of 16-bit elements: lane 8 i + r gives the address of row r of matrix i.
__device__ __forceinline__ void load_straight(uint32_t (&r)[4], const void *shared) {
  uint32_t address = (uint32_t)__cvta_generic_to_shared(shared);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Starts a copy of 4 or 16 bytes, both addresses aligned to as many.
template <int BYTES>
__device__ __forceinline__ void copy_async(void *shared, const void *global) {
  static_assert(BYTES == 4 || BYTES == 16, "sizes of cp.async");
  uint32_t address = (uint32_t)__cvta_generic_to_shared(shared);
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(global) : "memory");
}
// Waits for the copies of this thread.
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// (x & mask) | bits, in one instruction.
__device__ __forceinline__ uint32_t and_or(uint32_t x, uint32_t mask, uint32_t bits) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(x), "r"(mask), "r"(bits));
  return r;
}

// Ends a group of copies that this thread started since the last one.
__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most PENDING groups of this thread are under way.
template <int PENDING>
__device__ __forceinline__ void wait_copy_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Waits for the other warp of pair 0 or 1; each pair of a block of threads comes here as often. Barriers are named by
// constants, as a block of threads takes them all otherwise.
__device__ __forceinline__ void sync_pair(int pair) {
  if (pair)
    asm volatile("bar.sync 2, 64;" ::: "memory");
  else
    asm volatile("bar.sync 1, 64;" ::: "memory");
}

// x, as a value the compiler knows nothing of: what depends on it is computed where it is used, not kept in registers
// across a loop.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
// Has an address computed by this point, not where it is used.
template <class X>
__device__ __forceinline__ void hold(X *&address) {
  asm volatile("" : "+l"(address));
}

}  // namespace cuda
}  // namespace kvq
