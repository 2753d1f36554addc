// top_p_select, last part: scores in doubt of which all codes are counted are settled, a selection that is too large loses
// its smallest shares, and bit masks become indices.
#pragma once

#include "sparse_marks.cuh"

namespace kvq {
namespace cuda {

constexpr int SETTLE_THREADS = 1024, COMPACT_THREADS = 256, ROWS_AT_ONCE = 4;

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

// A row of which some scores are in doubt: those from `least` on are kept.
struct DoubtfulRow {
  const __half *scores;
  const uint32_t *doubt;
  float least;

  // By a warp.
  __device__ __forceinline__ DoubtfulRow(const TopP &p, const RowPlace &row, const RowCut *cuts, const Marks &marks) {
    int64_t flat = row.flat(p);
    RowCut cut = cuts[flat];
    scores = (const __half *)ScoreRow(p, row).scores, doubt = marks.doubt + flat * marks.words, least = INFINITY;
    if (!(cut.edge < cut.sure)) return;  // no bin is cut
    const uint32_t *counts = marks.counts + flat * CODES;
    int lane = lane_id(), bin = bin_of(cut.edge), upper = CODES - 1 - 2 * lane;
    auto mass_of = [&](int code) {  // 0 for those above cut.base, of which there are none
      return counts[code] ? (float)counts[code] * expf(score_of(bin, code) - cut.base) : 0;
    };
    float above = mass_of(upper), sum = above + mass_of(upper - 1), until = sum;
    for (int step = 1; step < WARP; step *= 2) {
      float other = __shfl_up_sync(ALL_LANES, until, step);
      if (lane >= step) until += other;
    }
    uint32_t behind = __ballot_sync(ALL_LANES, until >= cut.need);
    int found = behind ? __ffs((int)behind) - 1 : WARP - 1;
    bool first = until - sum + above >= cut.need;
    least = score_of(bin, __shfl_sync(ALL_LANES, first ? upper : upper - 1, found));
  }
  static __device__ __forceinline__ float score_of(int bin, int code) {
    uint32_t all = (uint32_t)bin << BIN_SHIFT | (uint32_t)code, bits = all & 0x8000 ? all ^ 0x8000 : ~all & 0xffff;
    return __half2float(__ushort_as_half((unsigned short)bits));
  }
};

// Adds to the kept columns of word w those of up to WARP rows that were in doubt, some loads at a time.
__device__ __forceinline__ uint32_t settled_word(uint32_t kept, const DoubtfulRow *rows, int num_rows, int w) {
  for (int first = 0; first < num_rows; first += ROWS_AT_ONCE) {
    uint32_t doubt[ROWS_AT_ONCE], any = 0;
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; i++) any |= doubt[i] = first + i < num_rows ? rows[first + i].doubt[w] & ~kept : 0;
    for (; any; any = doubt[0] | doubt[1] | doubt[2] | doubt[3]) {
      __half x[ROWS_AT_ONCE];
#pragma unroll
      for (int i = 0; i < ROWS_AT_ONCE; i++)
        if (doubt[i]) x[i] = rows[first + i].scores[w * 32 + __ffs((int)doubt[i]) - 1];
#pragma unroll
      for (int i = 0; i < ROWS_AT_ONCE; i++)
        if (doubt[i]) {
          if (__half2float(x[i]) >= rows[first + i].least) kept |= doubt[i] & -doubt[i];
          doubt[i] &= doubt[i] - 1;
        }
    }
  }
  return kept;
}

// Leaves the `room` largest shares of a selection, of equal ones the first. Rare, so that one block of threads does it.
__device__ inline void cut_to_capacity(const TopP &p, const SelectionRows &selection, const RowCut *cuts, uint32_t *kept,
                                       int first, int last, int room) {
  constexpr int DIGIT = 8, CELLS = 1 << DIGIT;
  __shared__ int cells[CELLS], sums[SETTLE_THREADS / WARP];
  int t = threadIdx.x;
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
  int rank = running_sum<SETTLE_THREADS>(ties, sums) - ties;
  each_kept([&](int w, uint32_t bit, uint32_t share) {
    if (share < prefix || (share == prefix && rank++ >= room)) kept[w] &= ~bit;
  });
}

// A block of threads has a selection, a thread words side by side.
template <bool CODES_COUNTED>
__global__ void __launch_bounds__(SETTLE_THREADS, 1)
    settle(const __grid_constant__ TopP p, const RowCut *cuts, const __grid_constant__ Marks marks) {
  __shared__ uint4 memory[WARP * sizeof(DoubtfulRow) / sizeof(uint4) + 1];
  __shared__ int sums[SETTLE_THREADS / WARP];
  int t = threadIdx.x, warp = warp_id(), each = (int)ceil_div(marks.words, SETTLE_THREADS),
      first = min(t * each, marks.words), last = min(first + each, marks.words);
  SelectionRows selection(p, blockIdx.x);
  uint32_t *kept = marks.kept + (int64_t)blockIdx.x * marks.words;
  DoubtfulRow *rows = (DoubtfulRow *)memory;
  wait_for_kernels_ahead();
  if (CODES_COUNTED)
    for (int from = 0; from < selection.count(); from += WARP) {
      int num_rows = min(selection.count() - from, WARP);
      __syncthreads();
      if (warp < num_rows) {
        DoubtfulRow row(p, selection.row(from + warp), cuts, marks);
        if (lane_id() == 0) rows[warp] = row;
      }
      __syncthreads();
      for (int w = first; w < last; w++) kept[w] = settled_word(kept[w], rows, num_rows, w);
    }
  int own = 0, room = (int)min(p.selection.capacity, (int64_t)INT32_MAX);
  if (p.selection.capacity >= p.columns) return;
  for (int w = first; w < last; w++) own += __popc(kept[w]);
  if (block_sum<SETTLE_THREADS>(own, sums) > room) cut_to_capacity(p, selection, cuts, kept, first, last, room);
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
