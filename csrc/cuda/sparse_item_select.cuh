// sign_top_p_select in one launch, last part: scores are looked at once, for those that are surely kept and those in
// the bin of the cut, which are counted code by code; and each block writes the tokens that it selects behind those of
// the segments before. Counts and numbers of tokens are told by words that are not 0 once they are there, which takes
// half as long as a meeting.
#pragma once

#include "sparse_item_cut.cuh"

namespace kvq {
namespace cuda {

constexpr int CLEAR_THREADS = 256;

// Clears what the blocks of items add to. The kernel after it may read what those ahead of this one wrote before its
// own wait, as this one lets it begin when they have ended; but not what this one writes. The same holds of
// sparse_near.
__global__ void __launch_bounds__(CLEAR_THREADS) clear_items(uint4 *to, int units) {
  wait_for_kernels_ahead(), let_next_kernel_begin();
  for (int i = blockIdx.x * CLEAR_THREADS + threadIdx.x; i < units; i += (int)gridDim.x * CLEAR_THREADS)
    to[i] = make_uint4(0, 0, 0, 0);
}

// Units of eight tokens of a thread, and words of 32.
constexpr int UNIT_STEPS = (MAX_PARTS * PART / PIECE + ITEM_THREADS - 1) / ITEM_THREADS,
              ITEM_WORDS = (MAX_PARTS * PART / 32 + ITEM_THREADS - 1) / ITEM_THREADS;

__device__ __forceinline__ uint32_t code_of(__half score) {
  int bits = (short)__half_as_ushort(score);  // never -0
  return (uint32_t)(bits ^ bits >> 15) % CODES;
}

// What a thread knows of its units.
struct UnitMarks {
  uint32_t of[UNIT_STEPS];  // a byte a row: scores in doubt, those of the bin of the cut of tokens that may not be kept

  // Uses every unit of this thread; lanes go on together.
  template <class Use>
  static __device__ __forceinline__ void each_unit(int parts, Use use) {
#pragma unroll
    for (int step = 0; step < UNIT_STEPS; step++) {
      int unit = threadIdx.x + step * ITEM_THREADS;
      if (unit < parts * (PART / PIECE)) use(unit, step);
      __syncwarp();
    }
  }
  // Uses row, token and score of every score in doubt.
  template <class Use>
  static __device__ __forceinline__ void each(const ItemMemory &m, uint32_t doubt, int unit, Use use) {
    for (; doubt; doubt &= doubt - 1) {
      int i = __ffs((int)doubt) - 1, r = i / PIECE, token = i % PIECE;
      use(r, token, m.unit_at(r, unit)[token]);
    }
  }
  // Keeps what needs no counting, and counts the codes of scores in doubt.
  __device__ __forceinline__ UnitMarks(const ItemMemory &m, int parts, int rows) {
    float sure[SCAN_ROWS], edge[SCAN_ROWS];
#pragma unroll
    for (int r = 0; r < SCAN_ROWS; r++) {
      bool used = r < rows;
      sure[r] = used ? m.notes->cuts[r].sure : INFINITY, edge[r] = used ? m.notes->cuts[r].edge : INFINITY;
    }
    uint32_t keep[UNIT_STEPS];
#pragma unroll
    for (int step = 0; step < UNIT_STEPS; step++) of[step] = keep[step] = 0;
    each_unit(parts, [&](int unit, int step) {
#pragma unroll
      for (int r = 0; r < SCAN_ROWS; r++) {
        if (r >= rows) break;
        __align__(16) Piece<__half> piece;
        piece.template load_units<uint4>(m.unit_at(r, unit));
        PieceMarks marks(piece, sure[r], edge[r], PIECE);
        keep[step] |= marks.keep, of[step] |= marks.doubt << (PIECE * r);
      }
    });
    each_unit(parts, [&](int unit, int step) {
      m.kept()[unit] = (uint8_t)keep[step];
      each(m, of[step], unit, [&](int r, int, __half x) { atomicAdd(&m.counts()[r * CODES + code_of(x)], 1u); });
      of[step] &= ~(keep[step] * 0x01010101u);
    });
  }
  // Keeps those from notes->least on.
  __device__ __forceinline__ void settle(const ItemMemory &m, int parts) const {
    each_unit(parts, [&](int unit, int step) {
      uint32_t keep = 0;
      each(m, of[step], unit,
           [&](int r, int token, __half x) { keep |= (uint32_t)(__half2float(x) >= m.notes->least[r]) << token; });
      if (keep) m.kept()[unit] |= (uint8_t)keep;
    });
  }
};

// By a warp: how many scores of a row have each code of the bin of the cut, in the whole item. Lane i has the codes
// that are 2 i and 2 i + 1 below the last. A word of both says that it is there by not being 0, so that nothing else is
// to be waited for.
struct CodeCounts {
  static constexpr int AT_A_TIME = 8;
  static constexpr uint32_t ONES = 0x10001;
  static_assert(MAX_PARTS * PART < 0xffff, "two counts a word");
  uint32_t lower, upper;

  static __device__ __forceinline__ const uint32_t *own(const ItemMemory &m, int r) {
    return m.counts() + (r + 1) * CODES - 2 - 2 * lane_id();
  }
  // Of a cluster of so many blocks.
  __device__ __forceinline__ CodeCounts(const ItemMemory &m, int r, int blocks) : lower(0), upper(0) {
#pragma unroll 2
    for (int rank = 0; rank < blocks; rank++) {
      uint32_t two[2];
      words_of(two, own(m, r), rank);
      lower += two[0], upper += two[1];
    }
  }
  // By way of memory.
  __device__ __forceinline__ CodeCounts(const ItemPlan &plan, const SegmentPlace &at, const ItemMemory &m, int r) {
    int lane = lane_id();
    uint2 two = *(const uint2 *)own(m, r);
    lower = two.x, upper = two.y;
    uint32_t *counts = plan.counts + ((int64_t)at.item * plan.segments * SCAN_ROWS + r) * WARP + lane;
    add_to(&counts[at.segment * SCAN_ROWS * WARP], (lower | upper << 16) + ONES);
    lower = upper = 0;
    for (int first = 0; first < plan.segments; first += AT_A_TIME) {
      uint32_t words[AT_A_TIME];
      int count = min(plan.segments - first, AT_A_TIME);
      await_words(words, counts + first * SCAN_ROWS * WARP, SCAN_ROWS * WARP, count);
#pragma unroll
      for (int i = 0; i < AT_A_TIME; i++) {
        if (i >= count) break;
        lower += (words[i] - ONES) & 0xffff, upper += (words[i] - ONES) >> 16;
      }
    }
  }
};

// Scores from notes->least[r] on are kept: of the bin of the cut, as many as are needed in the whole item.
template <bool CLUSTER>
__device__ __forceinline__ void find_least(const ItemPlan &plan, const ItemMemory &m, int rows) {
  int warp = warp_id();
  if (CLUSTER)
    meet_cluster();
  else
    __syncthreads();  // all codes of this block are counted
  if (warp < rows) {
    RowCut cut = m.notes->cuts[warp];
    float least = cut.sure;
    if (cut.edge < cut.sure) {
      CodeCounts counts = CLUSTER ? CodeCounts(m, warp, plan.segments) : CodeCounts(plan, SegmentPlace(plan), m, warp);
      least = least_kept(cut, [&](int code) { return code % 2 ? counts.upper : counts.lower; });
    }
    if (lane_id() == 0) m.notes->least[warp] = least;
  }
  __syncthreads();
}

// What this thread has of a segment's selection, words that follow each other, and how many tokens are before them.
struct SelectedWords {
  uint32_t words[ITEM_WORDS];
  int before, all;  // within the segment; of the segment

  static __device__ __forceinline__ int first() { return (int)threadIdx.x * ITEM_WORDS; }
  __device__ __forceinline__ SelectedWords(const ItemMemory &m, int parts) {
    const uint32_t *kept = (const uint32_t *)m.kept();
    int lane = lane_id(), warp = warp_id(), own = 0;
#pragma unroll
    for (int i = 0; i < ITEM_WORDS; i++) {
      words[i] = first() + i < parts * (PART / 32) ? kept[first() + i] : 0;
      own += __popc(words[i]);
    }
    int until = own;
    for (int step = 1; step < WARP; step *= 2) {
      int other = __shfl_up_sync(ALL_LANES, until, step);
      if (lane >= step) until += other;
    }
    if (lane == WARP - 1) m.notes->sums[warp] = until;
    __syncthreads();
    int sum = lane < ITEM_WARPS ? m.notes->sums[lane] : 0;
    before = until - own + __reduce_add_sync(ALL_LANES, lane < warp ? sum : 0);
    all = __reduce_add_sync(ALL_LANES, sum);
  }
};

// A segment's selected tokens in shared memory, so that neighbours write neighbours.
__device__ __forceinline__ void gather_tokens(const ItemMemory &m, const SelectedWords &selected) {
  uint16_t *tokens = m.tokens() + selected.before;
#pragma unroll
  for (int i = 0; i < ITEM_WORDS; i++)
    for (uint32_t word = selected.words[i]; word; word &= word - 1)
      *tokens++ = (uint16_t)((selected.first() + i) * 32 + __ffs((int)word) - 1);
  __syncthreads();
}

// Writes them behind `before` others, as far as there is room.
__device__ __forceinline__ void write_tokens(const TopP &p, const SegmentPlace &at, const ItemMemory &m, int count,
                                             int before) {
  int32_t *to = p.selection.indices + at.b * p.selection.index_stride[0] + at.h * p.selection.index_stride[1] + before;
  count = (int)min((int64_t)count, p.selection.capacity - before);
  for (int i = threadIdx.x; i < count; i += ITEM_THREADS) to[i] = at.first + m.tokens()[i];
}

// How many tokens the segments of an item have selected.
template <bool CLUSTER>
struct SelectedCounts {
  uint32_t *ready;      // by way of memory
  const int *selected;  // of a cluster, in each of its blocks

  // Tells those of this block, by all of its threads.
  __device__ __forceinline__ SelectedCounts(const ItemPlan &plan, const SegmentPlace &at, const ItemMemory &m, int all)
      : ready(plan.ready + (int64_t)at.item * plan.segments), selected(m.notes->selected) {
    int t = threadIdx.x;
    if (!CLUSTER && t == 0) add_to(&ready[at.segment], (uint32_t)all + 1);
    if (CLUSTER && t < plan.segments)
      store_in_cluster(address_in_cluster(shared_address(&selected[at.segment]), t), all);
    if (CLUSTER) meet_cluster();
  }
  // By a warp: of the first `count` segments, once they are known.
  __device__ __forceinline__ int of_first(int count) const {
    int sum = 0;
    for (int i = lane_id(); i < count; i += WARP) sum += CLUSTER ? selected[i] : (int)awaited(&ready[i]) - 1;
    return __reduce_add_sync(ALL_LANES, sum);
  }
};

// For `cap`, where a selection has no room: the words, scores and cuts of this block's segment.
__device__ inline void save_segment(const TopP &p, const ItemPlan &plan, const ItemMemory &m, const Marks &marks,
                                    RowCut *cuts, const SelectedWords &selected, int rows) {
  SegmentPlace at(plan);
  int count = min(at.parts * PART, (int)p.columns - at.first), first = at.first / 32 + selected.first(),
      last = min(at.first / 32 + at.parts * (PART / 32), marks.words);
#pragma unroll
  for (int i = 0; i < ITEM_WORDS; i++)
    if (first + i < last) marks.kept[(int64_t)at.item * marks.words + first + i] = selected.words[i];
  for (int r = 0; r < rows; r++) {
    RowPlace row = row_of_item(p, at.item, r);
    __half *to = (__half *)ScoreRow(p, row).scores + at.first;
    for (int i = threadIdx.x; i < count; i += ITEM_THREADS) to[i] = m.scores[r * m.pitch + i];
    if (at.segment == 0 && threadIdx.x == 0) cuts[row.flat(p)] = m.notes->cuts[r];
  }
}

// The next kernel begins where blocks of this one have ended; it takes care that its own are spread evenly.
template <bool CLUSTER>
__global__ void __launch_bounds__(ITEM_THREADS, ITEM_CTAS)
    scan_select(const __grid_constant__ SignScan s, const __grid_constant__ TopP p,
                const __grid_constant__ ItemPlan plan, RowCut *cuts, const __grid_constant__ Marks marks) {
  extern __shared__ uint4 memory[];
  fetch_parameters(s), fetch_parameters(p), fetch_parameters(plan);
  ItemMemory m(memory, plan);
  int rows = (int)(s.group * s.queries);
  scan_segment(s, p, plan, m);
  wait_for_kernels_ahead(), let_next_kernel_begin();  // only now, see clear_items
  __syncthreads();
  find_cuts<CLUSTER>(p, plan, m, rows);
  UnitMarks unit_marks(m, SegmentPlace(plan).parts, rows);
  find_least<CLUSTER>(plan, m, rows);
  unit_marks.settle(m, SegmentPlace(plan).parts);
  __syncthreads();
  SegmentPlace at(plan);
  SelectedWords selected(m, at.parts);
  SelectedCounts<CLUSTER> counts(plan, at, m, selected.all);  // from here on no other block of a cluster is read
  gather_tokens(m, selected);
  int before = counts.of_first(at.segment), all = counts.of_first(p.selection.capacity < p.columns ? plan.segments : 0);
  write_tokens(p, at, m, selected.all, before);
  if (at.segment == plan.segments - 1 && threadIdx.x == 0)
    p.selection.count[at.b * p.selection.count_stride + at.h] = before + selected.all;
  if (all > p.selection.capacity) save_segment(p, plan, m, marks, cuts, selected, rows);
}

}  // namespace cuda
}  // namespace kvq
