// sign_top_p_select in one launch, last part: scores of the bin of the cut are counted code by code, and each block
// writes the tokens that it selects behind those of the segments before.
#pragma once

#include "sparse_item_cut.cuh"

namespace kvq {
namespace cuda {

// Clears what the blocks of items add to. The kernel after it may read what those ahead of this one wrote before its
// own wait, as this one lets it begin when they have ended; but not what this one writes. The same holds of
// sparse_near.
__global__ void __launch_bounds__(ITEM_THREADS) clear_items(uint4 *to, int units) {
  wait_for_kernels_ahead(), let_next_kernel_begin();
  for (int i = blockIdx.x * ITEM_THREADS + threadIdx.x; i < units; i += (int)gridDim.x * ITEM_THREADS)
    to[i] = make_uint4(0, 0, 0, 0);
}

// Eight scores of a row.
__device__ __forceinline__ uint4 scores_of(const ItemMemory &m, int r, int unit) {
  return *(const uint4 *)(m.scores + r * m.pitch + unit * PIECE);
}

// Counts the codes of row r that lie in the bin of the cut: few, so that a thread looks for all of its own first.
__device__ __forceinline__ void count_codes(const ItemMemory &m, int parts, int r) {
  constexpr int STEPS = (MAX_PARTS * PART / PIECE + ITEM_THREADS - 1) / ITEM_THREADS;
  static_assert(STEPS * PIECE <= 32, "a bit each");
  const RowCut cut = m.notes->cuts[r];
  int bin = cut.edge < cut.sure ? bin_of(cut.edge) : NUM_BINS - 1;  // the last has no numbers
  uint32_t code = (uint32_t)bin << BIN_SHIFT, same = code & 0x8000 ? code ^ 0x8000 : ~code & 0xffc0,
           turn = code & 0x8000 ? 0 : CODES - 1,  // negative scores are in the opposite order
      pair_of_bins = same * 0x10001u, *cells = m.cells + r * CODES, found = 0;
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    int unit = threadIdx.x + step * ITEM_THREADS;
    if (unit >= parts * (PART / PIECE)) break;
    uint4 scores = scores_of(m, r, unit);
    const uint32_t pairs[PIECE / 2] = {scores.x, scores.y, scores.z, scores.w};
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < PIECE / 2; i++) {
      uint32_t bins = pairs[i] & ~REST_OF_BIN;
      bits |= __heq2_mask(*(const __half2 *)&bins, *(const __half2 *)&pair_of_bins) & 0x20001u << (2 * i);
    }
    found |= ((bits | bits >> 16) & 0xff) << (step * PIECE);
  }
  for (; found; found &= found - 1) {
    int i = __ffs((int)found) - 1, unit = threadIdx.x + i / PIECE * ITEM_THREADS;
    uint32_t at = __half_as_ushort(m.scores[r * m.pitch + unit * PIECE + i % PIECE]) ^ same ^ turn;
    if (at < CODES) atomicAdd(&cells[at], 1u);  // not if it is a small number of the other sign
  }
}

// Scores from notes->least[r] on are kept: of the bin of the cut, as many as are needed in the whole item.
__device__ __forceinline__ void settle(const ItemPlan &plan, const ItemMemory &m, int rows, int meetings) {
  SegmentPlace at(plan);
  int warp = warp_id();
  uint32_t *counts = plan.counts + at.item * SCAN_ROWS * CODES;
  for (int r = 0; r < rows; r++) count_codes(m, at.parts, r);
  __syncthreads();
  add_cells(counts, m.cells, rows * CODES);
  meet_blocks(&plan.arrived[at.item], (uint32_t)((meetings + 1) * plan.segments));
  if (warp < rows) {
    RowCut cut = m.notes->cuts[warp];
    float least = cut.sure;
    if (cut.edge < cut.sure) least = least_kept(cut, [&](int code) { return fresh(&counts[warp * CODES + code]); });
    if (lane_id() == 0) m.notes->least[warp] = least;
  }
  __syncthreads();
}

// The word of the selection that is this thread's, of 32 tokens of the segment.
__device__ __forceinline__ uint32_t selected_word(const ItemMemory &m, int parts, int rows) {
  uint8_t *bytes = (uint8_t *)m.cells;
  __half2 least[SCAN_ROWS];
#pragma unroll
  for (int r = 0; r < SCAN_ROWS; r++)
    least[r] = __float2half2_rn(r < rows ? fmaxf(m.notes->least[r], -65504) : INFINITY);
  for (int unit = threadIdx.x; unit < parts * (PART / PIECE); unit += ITEM_THREADS) {
    uint32_t kept[PIECE / 2] = {};
#pragma unroll
    for (int r = 0; r < SCAN_ROWS; r++) {
      if (r >= rows) break;
      uint4 scores = scores_of(m, r, unit);
      const uint32_t pairs[PIECE / 2] = {scores.x, scores.y, scores.z, scores.w};
#pragma unroll
      for (int i = 0; i < PIECE / 2; i++) kept[i] |= __hgeu2_mask(*(const __half2 *)&pairs[i], least[r]);
    }
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < PIECE / 2; i++) bits |= kept[i] & 0x20001u << (2 * i);
    bytes[unit] = (uint8_t)(bits | bits >> 16);
  }
  __syncthreads();
  return (int)threadIdx.x < parts * (PART / 32) ? m.cells[threadIdx.x] : 0;
}

// For `cap`, where a selection has no room: the words, scores and cuts of this block's segment.
__device__ inline void save_segment(const TopP &p, const ItemPlan &plan, const ItemMemory &m, const Marks &marks,
                                    RowCut *cuts, uint32_t word, int rows) {
  SegmentPlace at(plan);
  int w = at.first / 32 + (int)threadIdx.x, count = min(at.parts * PART, (int)p.columns - at.first);
  if ((int)threadIdx.x < at.parts * (PART / 32) && w < marks.words)
    marks.kept[(int64_t)at.item * marks.words + w] = word;
  for (int r = 0; r < rows; r++) {
    RowPlace row = row_of_item(p, at.item, r);
    __half *to = (__half *)ScoreRow(p, row).scores + at.first;
    for (int i = threadIdx.x; i < count; i += ITEM_THREADS) to[i] = m.scores[r * m.pitch + i];
    if (at.segment == 0 && threadIdx.x == 0) cuts[row.flat(p)] = m.notes->cuts[r];
  }
}

// The next kernel begins where blocks of this one have ended; it takes care that its own are spread evenly.
__global__ void __launch_bounds__(ITEM_THREADS, ITEM_CTAS)
    scan_select(const __grid_constant__ SignScan s, const __grid_constant__ TopP p,
                const __grid_constant__ ItemPlan plan, RowCut *cuts, const __grid_constant__ Marks marks) {
  extern __shared__ uint4 memory[];
  ItemMemory m(memory, plan);
  int t = threadIdx.x, rows = (int)(s.group * s.queries);
  for (int i = t; i < SCAN_ROWS * SMALL_BINS / 4; i += ITEM_THREADS) ((uint4 *)m.cells)[i] = make_uint4(0, 0, 0, 0);
  if (t < SCAN_ROWS) m.notes->large[t] = 0;
  __syncthreads();
  scan_segment(s, plan, m);
  wait_for_kernels_ahead(), let_next_kernel_begin();  // only now, see clear_items
  __syncthreads();
  int meetings = find_cuts(p, plan, m, rows);
  settle(plan, m, rows, meetings);
  SegmentPlace at(plan);
  uint32_t word = selected_word(m, at.parts, rows), *ready = plan.ready + (int64_t)at.item * plan.segments;
  int until = running_sum<ITEM_THREADS>(__popc(word), m.notes->sums), before = 0;
  if (t == ITEM_THREADS - 1) atomicAdd(&ready[at.segment], (uint32_t)until + 1);
  if (t < at.segment) before = (int)awaited(&ready[t]) - 1;
  until += block_sum<ITEM_THREADS>(before, m.notes->sums);
  write_columns(p, at.item, word, at.first / 32 + t, until - __popc(word));
  if (at.segment == plan.segments - 1 && t == ITEM_THREADS - 1) count_of(p, at.item) = until;
  if (p.selection.capacity >= p.columns) return;
  int all = t < plan.segments ? (int)awaited(&ready[t]) - 1 : 0;
  if (block_sum<ITEM_THREADS>(all, m.notes->sums) > p.selection.capacity)
    save_segment(p, plan, m, marks, cuts, word, rows);
}

}  // namespace cuda
}  // namespace kvq
