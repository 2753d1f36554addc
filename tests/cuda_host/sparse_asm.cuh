// The host twin of csrc/cuda/sparse_asm.cuh.
#pragma once

#include "launches.cuh"
#include "tiles_asm.cuh"

namespace kvq {
namespace cuda {

template <class T>
T fresh(const T *x) {
  return *x;
}

inline void copy_once(void *shared, const void *global) { copy_async<16>(shared, global); }
inline unsigned long long fresh_once(const void *x) { return *(const unsigned long long *)x; }

template <class T>
void add_to(T *to, T x) {
  atomicAdd(to, x);
}

inline void meet_blocks(uint32_t *arrived, uint32_t all) {
  __syncthreads();
  if (threadIdx.x == 0) {
    atomicAdd(arrived, 1u);
    while (*arrived < all) emulated::let_others_run();
  }
  __syncthreads();
}

inline uint32_t awaited(const uint32_t *x) {
  while (!*x) emulated::let_others_run();
  return *x;
}

template <int N>
void await_words(uint32_t (&words)[N], const uint32_t *from, int stride, int count) {
  for (int i = 0; i < count; i++) words[i] = awaited(from + i * stride);
}

inline void mma_bits(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t b, const int (&c)[4]) {
  struct Operand {
    uint32_t a[2], b;
    int sums[4], *d;
  } operand{{a0, a1}, b, {c[0], c[1], c[2], c[3]}, d};
  emulated::meet_warp("mma.m16n8k128.b1", &operand, [] {
    for (int lane = 0; lane < 32; lane++) {
      Operand *own = (Operand *)emulated::operand_of(lane);
      for (int r = 0; r < 4; r++) {
        for (int k = 0; k < 4; k++) {
          const Operand *row = (const Operand *)emulated::operand_of(lane / 4 * 4 + k);
          const Operand *column = (const Operand *)emulated::operand_of(4 * (lane % 4 * 2 + r % 2) + k);
          own->sums[r] += __popc(row->a[r / 2] & column->b);
        }
        own->d[r] = own->sums[r];
      }
    }
  });
}

// As if a cluster may be of any blocks.
template <class Kernel>
int count_item_clusters(Kernel, int size, int, int) {
  return emulated::has_clusters() ? emulated::num_multiprocessors() / size : 0;
}

}  // namespace cuda
}  // namespace kvq
