// sign_top_p_select in one launch, second part: from the masses of all blocks of an item to the cuts of its rows, which
// every block finds by itself.
#pragma once

#include "sparse_item_share.cuh"

namespace kvq {
namespace cuda {

// Adds what is not 0 of `count` cells of this block to those of the item, neighbours by neighbouring lanes.
template <class To>
__device__ __forceinline__ void add_cells(To *to, const uint32_t *cells, int count) {
  for (int i = threadIdx.x; i < count; i += ITEM_THREADS) {
    uint32_t cell = cells[i];
    if (cell) add_to(&to[i], (To)cell);
  }
}

// Scores of row r that are neither hidden nor unknown.
template <class Use>
__device__ __forceinline__ void each_known(const ItemMemory &m, int r, int parts, Use use) {
  for (int i = threadIdx.x; i < parts * PART; i += ITEM_THREADS) {
    float x = __half2float(m.scores[r * m.pitch + i]) + 0.0f;
    if (x < INFINITY && x > -INFINITY) use(x);
  }
}

// What rows have in common: `each` bins a lane from `first` on, masses relative to exp(base).
struct RowBins {
  int first, each;
  float base, top;
  __device__ __forceinline__ RowBins(const ItemMemory &m, int r, bool large) {
    first = large ? 0 : FIRST_SMALL, each = (large ? NUM_BINS : SMALL_BINS) / WARP;
    top = large ? score_of_bits(m.notes->tops[r]) : 0;
    float exact = m.notes->exact[r];
    base = top > exact ? top : exact;
  }
};

__device__ __forceinline__ float mass_of(Mass sum, float peak, float base, float unit) {
  return sum ? (float)sum * (1 / unit) * fast_exp2((peak - base) * LOG2_E) : 0;
}

// The largest scores of such rows, in notes->tops. A meeting, the second one by way of memory.
template <bool CLUSTER>
__device__ inline void find_tops(const ItemPlan &plan, const ItemMemory &m, uint32_t large) {
  SegmentPlace at(plan);
  int t = threadIdx.x;
  uint32_t *tops = plan.tops + at.item * SCAN_ROWS;
  for (int r = 0; r < SCAN_ROWS; r++) {
    if (!(large >> r & 1)) continue;
    float top = -INFINITY;
    each_known(m, r, at.parts, [&](float x) { top = fmaxf(top, x); });
    top = warp_max(top);
    if (lane_id() == 0) atomicMax(CLUSTER ? &m.notes->own_tops[r] : &tops[r], ordered_bits(top));
    if (!CLUSTER && at.segment == 0)
      for (int i = t; i < NUM_BINS; i += ITEM_THREADS)
        plan.large_masses[((int64_t)at.item * SCAN_ROWS + r) * NUM_BINS + i] = 0;
  }
  if (CLUSTER)
    meet_cluster();
  else
    meet_blocks(&plan.arrived[at.item], 2 * plan.segments);
  if (t < SCAN_ROWS) {
    uint32_t top = 0;
    if (CLUSTER)
      each_word(&m.notes->own_tops[t], plan.segments, [&](uint32_t x) { top = max(top, x); });
    else
      top = fresh(&tops[t]);
    m.notes->tops[t] = top;
  }
  __syncthreads();
}

// Masses of the rows that have scores too large for peaks of bins, relative to their largest score at most: those of a
// cluster go to m.masses, others by way of memory, two more meetings.
template <bool CLUSTER>
__device__ inline void add_large(const ItemPlan &plan, const ItemMemory &m, uint32_t large) {
  SegmentPlace at(plan);
  int t = threadIdx.x;
  Mass *masses = plan.large_masses + (int64_t)at.item * SCAN_ROWS * NUM_BINS;
  find_tops<CLUSTER>(plan, m, large);
  for (int r = 0; r < SCAN_ROWS; r++) {
    if (!(large >> r & 1)) continue;
    for (int i = t; i < NUM_BINS; i += ITEM_THREADS) m.cells[i] = 0;
    __syncthreads();
    float top = score_of_bits(m.notes->tops[r]), unit = plan.unit();
    each_known(m, r, at.parts, [&](float x) {
      int bin = bin_of(x);
      float relative = fast_exp2((x - fminf(edge_of(bin + 1), top)) * LOG2_E);
      atomicAdd(&m.cells[bin], (uint32_t)__float2int_rn(relative * unit));
    });
    if (!CLUSTER) {
      __syncthreads();
      add_cells(masses + r * NUM_BINS, m.cells, NUM_BINS);
      __syncthreads();
      continue;
    }
    meet_cluster();
    RowBins bins(m, r, true);
    for (int i = t; i < NUM_BINS; i += ITEM_THREADS) {
      Mass sum = 0;
      each_word(m.cells + i, plan.segments, [&](uint32_t x) { sum += x; });
      m.masses[r * NUM_BINS + i] = mass_of(sum, fminf(edge_of(i + 1), top), bins.base, unit);
    }
    meet_cluster();  // before the cells of another row
  }
  if (!CLUSTER) meet_blocks(&plan.arrived[at.item], 3 * plan.segments);
}

// The masses of the item's rows, on their way to shared memory; a row is that of some warps.
struct MassLoads {
  static constexpr int THREADS = ITEM_THREADS / SCAN_ROWS, STEPS = (SMALL_BINS + THREADS - 1) / THREADS;
  static_assert(ITEM_WARPS % SCAN_ROWS == 0, "whole warps a row");
  Mass sums[STEPS];  // of small scores

  // By way of memory.
  __device__ __forceinline__ MassLoads(const ItemPlan &plan, int item) {
    int r = threadIdx.x / THREADS, t = threadIdx.x % THREADS;
    const Mass *from = plan.masses + (int64_t)(item * SCAN_ROWS + r) * SMALL_BINS + t;
#pragma unroll
    for (int i = 0; i < STEPS; i++) sums[i] = t + i * THREADS < SMALL_BINS ? fresh(from + i * THREADS) : 0;
  }
  // Of a cluster of so many blocks.
  __device__ __forceinline__ MassLoads(const ItemMemory &m, int blocks) {
    int r = threadIdx.x / THREADS, t = threadIdx.x % THREADS;
    const uint32_t *from = m.cells + r * SMALL_BINS + t;
#pragma unroll
    for (int i = 0; i < STEPS; i++) sums[i] = 0;
#pragma unroll 2
    for (int rank = 0; rank < blocks; rank++) {
      uint32_t cells[STEPS][1] = {};
#pragma unroll
      for (int i = 0; i < STEPS; i++)
        if (t + i * THREADS < SMALL_BINS) words_of(cells[i], from + i * THREADS, rank);
#pragma unroll
      for (int i = 0; i < STEPS; i++) sums[i] += cells[i][0];
    }
  }
  // Large ones come from memory, unless they are there (`cluster`).
  __device__ __forceinline__ void store(const ItemPlan &plan, const ItemMemory &m, int item, int rows, uint32_t large,
                                        bool cluster) const {
    int r = threadIdx.x / THREADS, t = threadIdx.x % THREADS;
    if (r >= rows) return;
    bool is_large = large >> r & 1;
    if (is_large && cluster) return;
    RowBins bins(m, r, is_large);
    float unit = plan.unit(), *to = m.masses + r * NUM_BINS;
    if (is_large) {
      const Mass *from = plan.large_masses + (int64_t)(item * SCAN_ROWS + r) * NUM_BINS;
      for (int i = t; i < NUM_BINS; i += THREADS)
        to[i] = mass_of(fresh(from + i), fminf(edge_of(i + 1), bins.top), bins.base, unit);
      return;
    }
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      int bin = t + i * THREADS;
      if (bin < SMALL_BINS) to[bin] = mass_of(sums[i], peak_of(FIRST_SMALL + bin), bins.base, unit);
    }
  }
};

__device__ __forceinline__ float sum_until(float x) {
  for (int step = 1; step < WARP; step *= 2) {
    float other = __shfl_up_sync(ALL_LANES, x, step);
    if (lane_id() >= step) x += other;
  }
  return x;
}

// By a warp: the cut of a row. Lane i has the bins that are `each` i and more below the top one.
__device__ __forceinline__ RowCut cut_of(const float *masses, const RowBins &bins, float exact, float top_p) {
  int lane = lane_id(), last = (WARP - lane) * bins.each - 1;
  float own = 0;
#pragma unroll 8
  for (int j = 0; j < bins.each; j++) own += masses[last - j];
  float until = sum_until(own), all = __shfl_sync(ALL_LANES, until, WARP - 1);
  float before = bins.base > -INFINITY ? expf(exact - bins.base) : 0, total = all + before;
  float need = top_p * total - before;
  bool some = before / total < top_p, inside = top_p < 1 && some && need <= all;
  RowCut cut = {INFINITY, INFINITY, 0, bins.base, bins.base + logf(total)};  // none is kept
  if (top_p >= 1 || (some && !inside)) cut.sure = cut.edge = LEAST;
  if (!inside) return cut;
  uint32_t reached = __ballot_sync(ALL_LANES, until >= need);
  int found = reached ? __ffs((int)reached) - 1 : WARP - 1;
  float above = __shfl_sync(ALL_LANES, until, found > 0 ? found - 1 : 0);
  if (found == 0) above = 0;
  int bin = (WARP - found) * bins.each - 1 - lane;
  float mass = lane < bins.each ? masses[bin] : 0;
  until = above + sum_until(mass);
  reached = __ballot_sync(ALL_LANES, lane < bins.each && until >= need);
  int in_lane = reached ? __ffs((int)reached) - 1 : bins.each - 1;
  float next_above = __shfl_sync(ALL_LANES, until, in_lane > 0 ? in_lane - 1 : 0);
  bin = bins.first + __shfl_sync(ALL_LANES, bin, in_lane);
  cut.sure = edge_of(bin + 1), cut.edge = edge_of(bin), cut.need = need - (in_lane > 0 ? next_above : above);
  return cut;
}

// Adds this block's masses to the item's and finds the cuts of its rows. One meeting or three.
template <bool CLUSTER>
__device__ __forceinline__ void find_cuts(const TopP &p, const ItemPlan &plan, const ItemMemory &m, int rows) {
  SegmentPlace at(plan);
  int t = threadIdx.x, warp = warp_id();
  if (!CLUSTER) add_cells(plan.masses + (int64_t)at.item * SCAN_ROWS * SMALL_BINS, m.cells, rows * SMALL_BINS);
  if (!CLUSTER && t < rows && m.notes->large[t]) atomicOr(&plan.large[at.item], 1u << t);
  if (CLUSTER)
    meet_cluster();
  else
    meet_blocks(&plan.arrived[at.item], (uint32_t)plan.segments);
  uint32_t large = CLUSTER ? large_rows(m, plan.segments) : fresh(&plan.large[at.item]);
  MassLoads loads = CLUSTER ? MassLoads(m, plan.segments) : MassLoads(plan, at.item);
  if (large) add_large<CLUSTER>(plan, m, large);
  static_assert(ITEM_THREADS >= SCAN_ROWS * CODES, "a thread has one count");
  if (t < SCAN_ROWS * CODES) m.counts()[t] = 0;
  loads.store(plan, m, at.item, rows, large, CLUSTER);
  __syncthreads();
  if (warp < rows) {
    RowBins bins(m, warp, large >> warp & 1);
    RowCut cut = cut_of(m.masses + warp * NUM_BINS, bins, m.notes->exact[warp], p.top_p);
    if (lane_id() == 0) m.notes->cuts[warp] = cut;
  }
  __syncthreads();
}

}  // namespace cuda
}  // namespace kvq
