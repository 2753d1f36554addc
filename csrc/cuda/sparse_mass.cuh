// top_p_select, first part: the mass of every bin of a row, and the bin in which the kept mass reaches top_p.
//
// A block of threads has a segment of a row, unless the scan that made the scores added them up. Masses are integers
// while threads add them up, so that their order is of no matter: each relative to the largest score that its bin can
// have in the segment, so that none is too small. float16 scores below 64 without a mask, which are the rule, are read
// once and need a third of the instructions of others.
#pragma once

#include "sparse_asm.cuh"
#include "sparse_scores.cuh"

namespace kvq {
namespace cuda {

constexpr int MASS_THREADS = 512, PIECE = 8, MAX_PIECES = 8;

struct MassPlan {
  int pieces, segments;  // pieces of 8 scores a thread; segments a row
  float *masses, *tops;  // [rows, segments, NUM_BINS] relative to exp(top); [rows, segments]
  __host__ __device__ int segment_len() const { return MASS_THREADS * PIECE * pieces; }
  // By a whole warp, of masses that a scan added up: whether they are all there is to know of a row.
  __device__ __forceinline__ bool holds(int64_t row) const {
    return segments && !__any_sync(ALL_LANES, lane_id() < segments && isnan(tops[row * segments + lane_id()]));
  }
};

// Eight scores as they lie in memory; rows may begin at any element.
template <class Score>
struct Piece {
  Score x[PIECE];
  template <class Unit>
  __device__ __forceinline__ void load_units(const Score *from) {
#pragma unroll
    for (int i = 0; i < (int)(sizeof(x) / sizeof(Unit)); i++) ((Unit *)x)[i] = *((const Unit *)from + i);
  }
  __device__ __forceinline__ void load(const Score *from, int count) {
    int offset = (int)((uintptr_t)from % 16);
    if (count >= PIECE && offset == 0) return load_units<uint4>(from);
    if (count >= PIECE && offset % 8 == 0) return load_units<uint2>(from);
    if (count >= PIECE && offset % 4 == 0) return load_units<uint32_t>(from);
#pragma unroll
    for (int i = 0; i < PIECE; i++) x[i] = i < count ? from[i] : Score(0.0f);
  }
};

__device__ __forceinline__ float largest_of_block(float x, float *shared) {
  int warp = warp_id();
  x = warp_max(x);
  if (lane_id() == 0) shared[warp] = x;
  __syncthreads();
  x = shared[0];
  for (int i = 1; i < MASS_THREADS / WARP; i++) x = fmaxf(x, shared[i]);
  return x;
}

constexpr float SMALL_SCORE = 64;  // the bins of smaller ones are narrow
constexpr uint32_t REST_OF_BIN = ((1 << BIN_SHIFT) - 1) * 0x10001u;

// The same scores, 0 instead of -0.
__device__ __forceinline__ __half2 without_minus_zero(__half2 x) {
  return __hadd2(x, __half2half2(__ushort_as_half(0)));
}

// Two float16 scores as ordered codes, and the largest scores of their bins. None is -0.
struct PairOfCodes {
  uint32_t codes;
  __half2 scores, peaks;
  __device__ __forceinline__ explicit PairOfCodes(__half2 x) : scores(x) {
    uint32_t bits = *(uint32_t *)&scores, flip = permute_bytes(bits, 0, 0xBB99) | 0x80008000u;
    codes = bits ^ flip;
    uint32_t peak = (codes | REST_OF_BIN) ^ flip;
    peaks = *(__half2 *)&peak;
  }
};

__device__ __forceinline__ float peak_of(int bin) {
  uint32_t code = (uint32_t)bin << BIN_SHIFT | ((1 << BIN_SHIFT) - 1),
           bits = code & 0x8000 ? code ^ 0x8000 : ~code & 0xffff;
  return __half2float(__ushort_as_half((unsigned short)bits));
}

// `unit` times the least number: times x up to 1 it is a float whose bits are the integer x * unit, rounded.
__device__ __forceinline__ float least_numbers(float unit) { return __uint_as_float((uint32_t)unit); }

// Adds the masses of the first `count` of eight small scores, relative to the peaks of their bins, times unit, which
// `units` are least_numbers of; pair_at(i) are two.
template <bool WHOLE, class PairAt>
__device__ __forceinline__ void add_small(PairAt pair_at, int count, float units, uint32_t *cells) {
#pragma unroll
  for (int i = 0; i < PIECE; i += 2) {
    PairOfCodes pair(pair_at(i / 2));
    float2 below = __half22float2(__hsub2(pair.scores, pair.peaks));  // exact: both lie in one bin
    uint32_t low = __float_as_uint(fast_exp2(below.x * LOG2_E) * units);
    uint32_t high = __float_as_uint(fast_exp2(below.y * LOG2_E) * units);
    // Less to compute than cells[i].
    auto cell_at = [&](uint32_t bytes) { return (uint32_t *)((char *)cells + bytes); };
    constexpr uint32_t BIN = 0xffffu >> BIN_SHIFT << BIN_SHIFT;
    if (WHOLE || i < count) atomicAdd(cell_at((pair.codes & BIN) >> (BIN_SHIFT - 2)), low);
    if (WHOLE || i + 1 < count) atomicAdd(cell_at((pair.codes & BIN << 16) >> (16 + BIN_SHIFT - 2)), high);
  }
}

// A sum of integers, `scale` each, that are relative to exp(peak), relative to exp(top).
__device__ __forceinline__ float relative_mass(uint32_t cell, float peak, float top, float scale) {
  return cell ? (float)cell * scale * fast_exp2((peak - top) * LOG2_E) : 0;
}

template <class Score, bool MASKED>
__global__ void __launch_bounds__(MASS_THREADS, 2)
    bin_masses(const __grid_constant__ TopP p, const __grid_constant__ MassPlan plan,
               const __grid_constant__ MassPlan scanned) {
  __shared__ uint32_t cells[NUM_BINS];
  __shared__ float tops[MASS_THREADS / WARP];
  int row = blockIdx.x / plan.segments, start = (int)(blockIdx.x - row * plan.segments) * plan.segment_len(),
      t = threadIdx.x;
  int left = min((int)p.columns - start, plan.segment_len());
  ScoreRow scores(p, RowPlace(p, row));
  const Score *from = (const Score *)scores.scores + start;
  auto place_of = [&](int j) { return (j * MASS_THREADS + t) * PIECE; };
  for (int i = t; i < NUM_BINS; i += MASS_THREADS) cells[i] = 0;
  wait_for_kernels_ahead(), let_next_kernel_begin();
  if (scanned.holds(row)) return;
  int shift = min(__clz(left), 22);  // so that a cell holds a whole segment
  float unit = (float)(1 << shift), units = least_numbers(unit), top;
  bool small = false;
  if constexpr (sizeof(Score) == 2 && !MASKED) {
    __align__(16) Piece<__half> pieces[MAX_PIECES];
#pragma unroll
    for (int j = 0; j < MAX_PIECES; j++) pieces[j].load(from + place_of(j), left - place_of(j));
    __half2 most = __half2half2(__ushort_as_half(0));  // of the magnitudes
#pragma unroll
    for (int j = 0; j < MAX_PIECES; j++)
#pragma unroll
      for (int i = 0; i < PIECE; i += 2)
        most = __hmax2_nan(most, __habs2(__halves2half2(pieces[j].x[i], pieces[j].x[i + 1])));
    float2 both = __half22float2(most);
    small = __syncthreads_and(both.x < SMALL_SCORE && both.y < SMALL_SCORE), top = 0;
    if (small) {
#pragma unroll
      for (int j = 0; j < MAX_PIECES; j++) {
        int count = left - place_of(j);
        auto pair_at = [&](int i) {
          return without_minus_zero(__halves2half2(pieces[j].x[2 * i], pieces[j].x[2 * i + 1]));
        };
        if (count >= PIECE)
          add_small<true>(pair_at, PIECE, units, cells);
        else if (count > 0)
          add_small<false>(pair_at, count, units, cells);
      }
    }
  }
  if (!small) {
    auto each = [&](auto use) {
#pragma unroll 1
      for (int j = 0; place_of(j) < left; j++) {
        __align__(16) Piece<Score> piece;
        piece.load(from + place_of(j), left - place_of(j));
#pragma unroll
        for (int i = 0; i < PIECE; i++) {
          int column = place_of(j) + i;
          float x = float(piece.x[i]) + 0.0f;
          if (MASKED && column < left) x = scores.masked(x, start + column);
          if (column < left && x < INFINITY && x > -INFINITY) use(x);  // what is unknown has no share
        }
      }
    };
    top = -INFINITY;
    each([&](float x) { top = fmaxf(top, x); });
    top = largest_of_block(top, tops);
    each([&](float x) {
      int bin = bin_of(x);
      atomicAdd(&cells[bin], (uint32_t)__float2int_rn(fast_exp2((x - fminf(edge_of(bin + 1), top)) * LOG2_E) * unit));
    });
  }
  __syncthreads();
  float *to = plan.masses + (int64_t)blockIdx.x * NUM_BINS;
  for (int i = t; i < NUM_BINS; i += MASS_THREADS) {
    float peak = small ? peak_of(i) : fminf(edge_of(i + 1), top);
    to[i] = relative_mass(cells[i], peak, top, 1 / unit);
  }
  if (t == 0) plan.tops[blockIdx.x] = top;
}

constexpr int CUT_THREADS = NUM_BINS / 4;

// The sum of x over this and all lower threads of a block; `shared` holds one X a warp and is free again afterwards.
template <int THREADS, class X>
__device__ __forceinline__ X running_sum(X x, X *shared) {
  int lane = lane_id(), warp = warp_id();
  for (int step = 1; step < WARP; step *= 2) {
    X other = __shfl_up_sync(ALL_LANES, x, step);
    if (lane >= step) x += other;
  }
  if (lane == WARP - 1) shared[warp] = x;
  __syncthreads();
  for (int i = 0; i < warp; i++) x += shared[i];
  __syncthreads();
  return x;
}

// Thread t has the four bins that are 4 t .. 4 t + 3 below the top one. Also clears what later kernels count in.
__global__ void __launch_bounds__(CUT_THREADS)
    find_cut(const __grid_constant__ TopP p, const __grid_constant__ MassPlan binned,
             const __grid_constant__ MassPlan scanned, RowCut *cuts, uint32_t *counters, int num_counters) {
  __shared__ float sums[CUT_THREADS], shared[CUT_THREADS / WARP];
  __shared__ int first;
  int t = threadIdx.x;
  int64_t row = blockIdx.x;
  RowPlace place(p, (int)row);
  wait_for_kernels_ahead(), let_next_kernel_begin();
  float exact = p.exact_lse[place.b * p.lse_stride[0] + place.hq * p.lse_stride[1] + place.m * p.lse_stride[2]];
  const MassPlan &plan = scanned.holds(row) ? scanned : binned;
  const float *tops = plan.tops + row * plan.segments;
  const float4 *masses = (const float4 *)(plan.masses + row * plan.segments * NUM_BINS) + CUT_THREADS - 1 - t;
  for (int i = (int)row * CUT_THREADS + t; i < num_counters; i += (int)gridDim.x * CUT_THREADS) counters[i] = 0;
  float top = -INFINITY;
  for (int i = lane_id(); i < plan.segments; i += WARP) top = fmaxf(top, tops[i]);
  top = warp_max(top);
  float base = top > exact ? top : exact;
  float4 mass = make_float4(0, 0, 0, 0);
#pragma unroll 4
  for (int i = 0; i < plan.segments; i++) {
    float by = tops[i] > -INFINITY ? expf(tops[i] - base) : 0;
    float4 x = masses[i * (NUM_BINS / 4)];
    mass.x = fmaf(x.x, by, mass.x), mass.y = fmaf(x.y, by, mass.y), mass.z = fmaf(x.z, by, mass.z),
    mass.w = fmaf(x.w, by, mass.w);
  }
  sums[t] = running_sum<CUT_THREADS>(mass.x + mass.y + mass.z + mass.w, shared);
  if (t == 0) first = CUT_THREADS;
  __syncthreads();
  float before = base > -INFINITY ? expf(exact - base) : 0, all = sums[CUT_THREADS - 1], total = all + before;
  float need = p.top_p * total - before;
  bool some = before / total < p.top_p, inside = p.top_p < 1 && some && need <= all;
  if (inside && sums[t] >= need) atomicMin(&first, t);
  __syncthreads();
  RowCut cut = {INFINITY, INFINITY, 0, base, base + logf(total)};  // none is kept
  if (p.top_p >= 1 || (some && !inside)) cut.sure = cut.edge = LEAST;
  if (inside && t == first) {
    float above = t ? sums[t - 1] : 0, four[4] = {mass.w, mass.z, mass.y, mass.x};
    int bin = NUM_BINS - 1 - 4 * t;
    for (int i = 0; i < 3 && above + four[i] < need; i++) above += four[i], bin--;
    cut.sure = edge_of(bin + 1), cut.edge = edge_of(bin), cut.need = need - above;
  }
  if (t == (inside ? first : 0)) cuts[row] = cut;
}

}  // namespace cuda
}  // namespace kvq
