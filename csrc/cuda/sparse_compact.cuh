// top_p_select, last part: scores in doubt of which all codes are counted are settled, bit masks become indices, and a
// selection that is too large loses its smallest shares.
#pragma once

#include "sparse_marks.cuh"

namespace kvq {
namespace cuda {

constexpr int CAP_THREADS = 1024, ROWS_AT_ONCE = 4;

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

// By a warp, which scores of the bin that is cut are kept: those from the value returned on. count_of(code) of them
// have each code.
template <class CountOf>
__device__ __forceinline__ float least_kept(const RowCut &cut, CountOf count_of) {
  int lane = lane_id(), bin = bin_of(cut.edge), upper = CODES - 1 - 2 * lane;
  auto score_of = [bin](int code) {
    uint32_t all = (uint32_t)bin << BIN_SHIFT | (uint32_t)code, bits = all & 0x8000 ? all ^ 0x8000 : ~all & 0xffff;
    return __half2float(__ushort_as_half((unsigned short)bits));
  };
  auto mass_of = [&](int code) {  // 0 for those above cut.base, of which there are none
    uint32_t count = count_of(code);
    return count ? (float)count * expf(score_of(code) - cut.base) : 0;
  };
  float above = mass_of(upper), sum = above + mass_of(upper - 1), until = sum;
  for (int step = 1; step < WARP; step *= 2) {
    float other = __shfl_up_sync(ALL_LANES, until, step);
    if (lane >= step) until += other;
  }
  uint32_t behind = __ballot_sync(ALL_LANES, until >= cut.need);
  int found = behind ? __ffs((int)behind) - 1 : WARP - 1;
  bool first = until - sum + above >= cut.need;
  return score_of(__shfl_sync(ALL_LANES, first ? upper : upper - 1, found));
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
    least = least_kept(cut, [counts = marks.counts + flat * CODES](int code) { return counts[code]; });
  }
};

// Adds to the kept columns of word w those of up to WARP rows that were in doubt, some loads at a time.
__device__ __forceinline__ uint32_t settled_word(uint32_t kept, const DoubtfulRow *rows, int num_rows, int w) {
  for (int first = 0; first < num_rows; first += ROWS_AT_ONCE) {
    uint32_t doubt[ROWS_AT_ONCE], any = 0;
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; i++)
      any |= doubt[i] = first + i < num_rows ? rows[first + i].doubt[w] & ~kept : 0;
    for (; any; any = doubt[0] | doubt[1] | doubt[2] | doubt[3]) {
      __half low[ROWS_AT_ONCE], high[ROWS_AT_ONCE];  // scores of the first and the last column in doubt
#pragma unroll
      for (int i = 0; i < ROWS_AT_ONCE; i++)
        if (doubt[i]) {
          const __half *scores = rows[first + i].scores + w * 32;
          low[i] = scores[__ffs((int)doubt[i]) - 1], high[i] = scores[31 - __clz((int)doubt[i])];
        }
#pragma unroll
      for (int i = 0; i < ROWS_AT_ONCE; i++)
        if (doubt[i]) {
          uint32_t first_bit = doubt[i] & -doubt[i], last_bit = 0x80000000u >> __clz((int)doubt[i]);
          float least = rows[first + i].least;
          if (__half2float(low[i]) >= least) kept |= first_bit;
          if (__half2float(high[i]) >= least) kept |= last_bit;
          doubt[i] &= ~(first_bit | last_bit);
        }
    }
  }
  return kept;
}

// Leaves the `room` largest shares of a selection, of equal ones the first. Rare, so that one block of threads does it.
__device__ inline void cut_to_capacity(const TopP &p, const SelectionRows &selection, const RowCut *cuts,
                                       uint32_t *kept, int first, int last, int room) {
  constexpr int DIGIT = 8, CELLS = 1 << DIGIT;
  __shared__ int cells[CELLS], sums[CAP_THREADS / WARP];
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
  int rank = running_sum<CAP_THREADS>(ties, sums) - ties;
  each_kept([&](int w, uint32_t bit, uint32_t share) {
    if (share < prefix || (share == prefix && rank++ >= room)) kept[w] &= ~bit;
  });
}

// Writes the columns of a word, whose first one is the selection's number `at`.
__device__ __forceinline__ void write_columns(const TopP &p, int head, uint32_t word, int w, int at) {
  int64_t b = head / p.selection.selections, k = head % p.selection.selections;
  const int32_t *names = p.candidates ? p.candidates + b * p.candidate_stride[0] + k * p.candidate_stride[1] : nullptr;
  int32_t *out = p.selection.indices + b * p.selection.index_stride[0] + k * p.selection.index_stride[1];
  for (; word; word &= word - 1, at++) {
    int column = w * 32 + __ffs((int)word) - 1;
    if (at < p.selection.capacity) out[at] = names ? names[column] : column;
  }
}
__device__ __forceinline__ int32_t &count_of(const TopP &p, int head) {
  return p.selection.count[head / p.selection.selections * p.selection.count_stride + head % p.selection.selections];
}

// A block of threads settles its words, a word a thread, says how many columns they hold, and writes these behind those
// of the blocks before, which have started earlier and wait for none after them.
template <bool CODES_COUNTED>
__global__ void __launch_bounds__(COMPACT_THREADS, 8)
    compact(const __grid_constant__ TopP p, const RowCut *cuts, const __grid_constant__ Marks marks) {
  __shared__ uint4 memory[WARP * sizeof(DoubtfulRow) / sizeof(uint4)];
  __shared__ int shared[COMPACT_THREADS / WARP];
  DoubtfulRow *rows = (DoubtfulRow *)memory;
  int t = threadIdx.x, head = blockIdx.y, w = blockIdx.x * COMPACT_THREADS + t;
  SelectionRows selection(p, head);
  uint32_t *kept = marks.kept + (int64_t)head * marks.words, *ready = marks.ready + (int64_t)head * gridDim.x;
  wait_for_kernels_ahead(), let_next_kernel_begin();
  uint32_t word = w < marks.words ? kept[w] : 0;
  if (CODES_COUNTED) {
    for (int from = 0; from < selection.count(); from += WARP) {
      int num_rows = min(selection.count() - from, WARP);
      for (int i = warp_id(); i < num_rows; i += COMPACT_THREADS / WARP) {
        DoubtfulRow row(p, selection.row(from + i), cuts, marks);
        if (lane_id() == 0) rows[i] = row;
      }
      __syncthreads();
      if (w < marks.words) word = settled_word(word, rows, num_rows, w);
      __syncthreads();
    }
    if (w < marks.words) kept[w] = word;
  }
  int until = running_sum<COMPACT_THREADS>(__popc(word), shared), before = 0;
  if (t == COMPACT_THREADS - 1) atomicAdd(&ready[blockIdx.x], (uint32_t)until + 1);
  for (int i = t; i < (int)blockIdx.x; i += COMPACT_THREADS) before += (int)awaited(&ready[i]) - 1;
  until += block_sum<COMPACT_THREADS>(before, shared);
  write_columns(p, head, word, w, until - __popc(word));
  if (blockIdx.x == gridDim.x - 1 && t == COMPACT_THREADS - 1) count_of(p, head) = until;
}

// Selections of more than their capacity, anew.
__global__ void __launch_bounds__(CAP_THREADS, 1)
    cap(const __grid_constant__ TopP p, const RowCut *cuts, const __grid_constant__ Marks marks) {
  __shared__ int shared[CAP_THREADS / WARP];
  wait_for_kernels_ahead(), let_next_kernel_begin();
  int head = blockIdx.x, room = (int)min(p.selection.capacity, (int64_t)INT32_MAX);
  int each = (int)ceil_div(marks.words, CAP_THREADS), first = min((int)threadIdx.x * each, marks.words),
      last = min(first + each, marks.words);
  if (count_of(p, head) <= room) return;
  uint32_t *kept = marks.kept + (int64_t)head * marks.words;
  cut_to_capacity(p, SelectionRows(p, head), cuts, kept, first, last, room);
  int own = 0;
  for (int w = first; w < last; w++) own += __popc(kept[w]);
  int at = running_sum<CAP_THREADS>(own, shared) - own;
  for (int w = first; w < last; w++) write_columns(p, head, kept[w], w, at), at += __popc(kept[w]);
  if (threadIdx.x == CAP_THREADS - 1) count_of(p, head) = at;
}

}  // namespace cuda
}  // namespace kvq
