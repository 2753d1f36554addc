// The host twin of csrc/cuda/sparse_asm.cuh.
#pragma once

#include "mma.cuh"

namespace kvq {
namespace cuda {

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

// Copies that land when they are waited for do so together, or earlier ones first.
inline void close_copies() { emulated::close_copies(); }
template <int PENDING>
inline void wait_copy_groups() {
  emulated::wait_copy_groups(PENDING);
}

inline void wait_for_kernels_ahead() {}

template <class... Parameters, class... Arguments>
void launch_behind(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes, cudaStream_t, Arguments &&...arguments) {
  emulated::run_grid(grid, dim3(threads), shared_bytes, [&] { kernel(arguments...); });
}

}  // namespace cuda
}  // namespace kvq
