// The host twin of csrc/cuda/tiles_asm.cuh; most of it is part of mma.cuh.
#pragma once

#include "mma.cuh"

namespace kvq {
namespace cuda {

// Copies that land when they are waited for do so together, or earlier ones first.
inline void close_copies() { emulated::close_copies(); }
template <int PENDING>
inline void wait_copy_groups() {
  emulated::wait_copy_groups(PENDING);
}

// Waits for all pairs.
inline void sync_pair(int) { __syncthreads(); }

}  // namespace cuda
}  // namespace kvq
