// sign_top_p_select in one launch, last part: scores of the bin of the cut are counted code by code, and each block
// writes the tokens that it selects behind those of the segments before.
#pragma once

#include "sparse_item_cut.cuh"

namespace kvq {
namespace cuda {

// Clears what the blocks of items add to. The kernel after it may read what those ahead of this one wrote before its own
// wait, as this one lets it begin when they have ended; but not what this one writes.
__global__ void __launch_bounds__(ITEM_THREADS) clear_items(uint4 *to, int units) {
  wait_for_kernels_ahead(), let_next_kernel_begin();
  for (int i = blockIdx.x * ITEM_THREADS + threadIdx.x; i < units; i += (int)gridDim.x * ITEM_THREADS)
    to[i] = make_uint4(0, 0, 0, 0);
}

// Eight scores of a row.
__device__ __forceinline__ Piece<__half> piece_of(const ItemMemory &m, int r, int unit) {
  __align__(16) Piece<__half> piece;
  *(uint4 *)piece.x = *(const uint4 *)(m.scores + r * m.pitch + unit * PIECE);
  return piece;
}

// Scores from notes->least[r] on are kept: of the bin of the cut, as many as are needed in the whole item.
__device__ __forceinline__ void settle(const ItemPlan &plan, const ItemMemory &m, int rows, int meetings) {
  ItemPlace at(plan);
  int warp = warp_id();
  uint32_t *counts = plan.counts + at.item * SCAN_ROWS * CODES;
  for (int i = threadIdx.x; i < rows * CODES; i += ITEM_THREADS) m.cells[i] = 0;
  __syncthreads();
  for (int r = 0; r < rows; r++) {
    const RowCut cut = m.notes->cuts[r];
    for (int unit = threadIdx.x; unit < at.parts * (PART / PIECE); unit += ITEM_THREADS) {
      uint32_t doubt = PieceMarks(piece_of(m, r, unit), cut.sure, cut.edge, PIECE).doubt;
      for (; doubt; doubt &= doubt - 1) {
        float x = __half2float(m.scores[r * m.pitch + unit * PIECE + __ffs((int)doubt) - 1]);
        atomicAdd(&m.cells[r * CODES + code_in_bin(x)], 1u);
      }
    }
  }
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
  for (int unit = threadIdx.x; unit < parts * (PART / PIECE); unit += ITEM_THREADS) {
    uint32_t kept = 0;
    for (int r = 0; r < rows; r++) kept |= PieceMarks(piece_of(m, r, unit), m.notes->least[r], INFINITY, PIECE).keep;
    bytes[unit] = (uint8_t)kept;
  }
  __syncthreads();
  return (int)threadIdx.x < parts * (PART / 32) ? m.cells[threadIdx.x] : 0;
}

// For `cap`, where a selection has no room: the words, scores and cuts of this block's segment.
__device__ inline void save_segment(const TopP &p, const ItemPlan &plan, const ItemMemory &m, const Marks &marks,
                                          RowCut *cuts, uint32_t word, int rows) {
  ItemPlace at(plan);
  int w = at.first / 32 + (int)threadIdx.x, count = min(at.parts * PART, (int)p.columns - at.first);
  if ((int)threadIdx.x < at.parts * (PART / 32) && w < marks.words) marks.kept[(int64_t)at.item * marks.words + w] = word;
  for (int r = 0; r < rows; r++) {
    RowPlace row = row_of_item(p, at.item, r);
    __half *to = (__half *)ScoreRow(p, row).scores + at.first;
    for (int i = threadIdx.x; i < count; i += ITEM_THREADS) to[i] = m.scores[r * m.pitch + i];
    if (at.segment == 0 && threadIdx.x == 0) cuts[row.flat(p)] = m.notes->cuts[r];
  }
}

__global__ void __launch_bounds__(ITEM_THREADS, ITEM_CTAS)
    scan_select(const __grid_constant__ SignScan s, const __grid_constant__ TopP p,
                const __grid_constant__ ItemPlan plan, RowCut *cuts, const __grid_constant__ Marks marks) {
  extern __shared__ uint4 memory[];
  ItemMemory m(memory, plan);
  int t = threadIdx.x, rows = (int)(s.group * s.queries);
  let_next_kernel_begin();
  for (int i = t; i < SCAN_ROWS * SMALL_BINS; i += ITEM_THREADS) m.cells[i] = 0;
  if (t < SCAN_ROWS) m.notes->large[t] = 0;
  __syncthreads();
  scan_segment(s, plan, m);
  wait_for_kernels_ahead();  // only now, see clear_items
  __syncthreads();
  int meetings = find_cuts(p, plan, m, rows);
  settle(plan, m, rows, meetings);
  ItemPlace at(plan);
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
