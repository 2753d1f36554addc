// top_p_select, last part: a selection that is too large loses its smallest shares, and bit masks become indices.
#pragma once

#include "sparse_marks.cuh"

namespace kvq {
namespace cuda {

constexpr int CAP_THREADS = 1024, COMPACT_THREADS = 256;

template <int THREADS>
__device__ __forceinline__ int block_sum(int x, int *shared) {
  int warp = warp_id();
  for (int step = WARP / 2; step; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
  if (lane_id() == 0) shared[warp] = x;
  __syncthreads();
  x = 0;
  for (int i = 0; i < THREADS / WARP; i++) x += shared[i];
  __syncthreads();
  return x;
}

// The largest logarithm of a share in any row, as ordered bits.
__device__ __forceinline__ uint32_t share_of(const TopP &p, const SelectionRows &selection, const RowCut *cuts,
                                             int column) {
  float most = -INFINITY;
  selection.each([&](const RowPlace &row) {
    float x = ScoreRow(p, row)[column];
    most = fmaxf(most, is_unknown(x) ? INFINITY : x > -INFINITY ? x - cuts[row.flat(p)].log_total : -INFINITY);
  });
  return ordered_bits(most + 0.0f);
}

// Leaves the `capacity` largest shares of a selection, of equal ones the first. Rare, so that one block of threads does
// it.
__global__ void __launch_bounds__(CAP_THREADS, 1)
    cap(const __grid_constant__ TopP p, const RowCut *cuts, const __grid_constant__ Marks marks) {
  constexpr int DIGIT = 8, CELLS = 1 << DIGIT;
  __shared__ int cells[CELLS], shared[CAP_THREADS / WARP];
  wait_for_kernels_ahead();
  SelectionRows selection(p, blockIdx.x);
  uint32_t *kept = marks.kept + (int64_t)blockIdx.x * marks.words;
  int t = threadIdx.x, each = (int)ceil_div(marks.words, CAP_THREADS), first = min(t * each, marks.words),
      last = min(first + each, marks.words);
  int own = 0, room = (int)min(p.selection.capacity, (int64_t)INT32_MAX);
  for (int w = first; w < last; w++) own += __popc(kept[w]);
  if (block_sum<CAP_THREADS>(own, shared) <= room) return;
  auto each_kept = [&](auto use) {
    for (int w = first; w < last; w++)
      for (uint32_t word = kept[w]; word; word &= word - 1)
        use(w, word & -word, share_of(p, selection, cuts, w * 32 + __ffs(word) - 1));
  };
  uint32_t prefix = 0;  // of the least share that stays, and `room` for those with this prefix
  for (int shift = 32 - DIGIT; shift >= 0; shift -= DIGIT) {
    if (t < CELLS) cells[t] = 0;
    __syncthreads();
    each_kept([&](int, uint32_t, uint32_t share) {
      if (shift == 32 - DIGIT || share >> (shift + DIGIT) == prefix >> (shift + DIGIT))
        atomicAdd(&cells[share >> shift & (CELLS - 1)], 1);
    });
    __syncthreads();
    int digit = CELLS - 1;
    while (digit > 0 && cells[digit] < room) room -= cells[digit--];
    prefix |= (uint32_t)digit << shift;
    __syncthreads();
  }
  int ties = 0;
  each_kept([&](int, uint32_t, uint32_t share) { ties += share == prefix; });
  int rank = running_sum<CAP_THREADS>(ties, shared) - ties;
  each_kept([&](int w, uint32_t bit, uint32_t share) {
    if (share < prefix || (share == prefix && rank++ >= room)) kept[w] &= ~bit;
  });
}

// A block of threads writes the indices of its words, a word a thread, behind those of all words before.
__global__ void __launch_bounds__(COMPACT_THREADS)
    compact(const __grid_constant__ TopP p, const __grid_constant__ Marks marks) {
  __shared__ int shared[COMPACT_THREADS / WARP];
  wait_for_kernels_ahead();
  int64_t b = blockIdx.y / p.selection.selections, k = blockIdx.y % p.selection.selections;
  const uint32_t *kept = marks.kept + (int64_t)blockIdx.y * marks.words;
  int first = blockIdx.x * COMPACT_THREADS, w = first + threadIdx.x, before = 0;
  for (int i = threadIdx.x; i < first; i += COMPACT_THREADS) before += __popc(kept[i]);
  before = block_sum<COMPACT_THREADS>(before, shared);
  uint32_t word = w < marks.words ? kept[w] : 0;
  int until = before + running_sum<COMPACT_THREADS>(__popc(word), shared);
  const int32_t *names = p.candidates ? p.candidates + b * p.candidate_stride[0] + k * p.candidate_stride[1] : nullptr;
  int32_t *out = p.selection.indices + b * p.selection.index_stride[0] + k * p.selection.index_stride[1];
  for (int at = until - __popc(word); word; word &= word - 1, at++) {
    int column = w * 32 + __ffs(word) - 1;
    if (at < p.selection.capacity) out[at] = names ? names[column] : column;
  }
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x == COMPACT_THREADS - 1)
    p.selection.count[b * p.selection.count_stride + k] = until;
}

}  // namespace cuda
}  // namespace kvq
