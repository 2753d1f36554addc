// top_p_select, first part: the mass of every bin of a row, and the bin in which the kept mass reaches top_p.
//
// A block of threads reads a segment of a row once, into registers. Masses are integers while threads add them up, so that their
// order is of no matter: each relative to the largest score that its bin can have in the segment, so that none is too small.
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
};

// Eight scores as they lie in memory.
template <class Score>
struct Piece {
  Score x[PIECE];
  __device__ __forceinline__ void load(const Score *from, int count) {
    if (count >= PIECE && (uintptr_t)from % 16 == 0) {
#pragma unroll
      for (int i = 0; i < (int)sizeof(x) / 16; i++) ((uint4 *)x)[i] = __ldg((const uint4 *)from + i);
      return;
    }
#pragma unroll
    for (int i = 0; i < PIECE; i++) x[i] = i < count ? from[i] : Score(-INFINITY);
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

template <class Score>
__global__ void __launch_bounds__(MASS_THREADS) bin_masses(const __grid_constant__ TopP p, const __grid_constant__ MassPlan plan) {
  __shared__ uint32_t cells[NUM_BINS];
  __shared__ float tops[MASS_THREADS / WARP];
  let_next_kernel_begin();
  int64_t row = blockIdx.x / plan.segments, segment = blockIdx.x % plan.segments, start = segment * plan.segment_len();
  ScoreRow scores(p, row);
  __align__(16) Piece<Score> pieces[MAX_PIECES];
  int t = threadIdx.x;
  auto first_of = [&](int j) { return start + ((int64_t)j * MASS_THREADS + t) * PIECE; };
#pragma unroll
  for (int j = 0; j < MAX_PIECES; j++)
    if (j < plan.pieces) pieces[j].load((const Score *)scores.scores + first_of(j), (int)min((int64_t)PIECE, p.columns - first_of(j)));
  for (int i = t; i < NUM_BINS; i += MASS_THREADS) cells[i] = 0;
  auto each = [&](auto use) {
#pragma unroll
    for (int j = 0; j < MAX_PIECES; j++)
      if (j < plan.pieces)
#pragma unroll
        for (int i = 0; i < PIECE; i++)
          if (!scores.mask || first_of(j) + i < p.columns) {
            float x = scores.masked(float(pieces[j].x[i]), first_of(j) + i);
            use(x < INFINITY ? x : -INFINITY);  // what is unknown has no share
          }
  };
  float top = -INFINITY;
  each([&](float x) { top = fmaxf(top, x); });
  top = largest_of_block(top, tops);
  int shift = min(__clz((int)min((int64_t)plan.segment_len(), p.columns)), 22);  // so that a cell holds a whole segment
  float unit = (float)(1 << shift);
  each([&](float x) {
    int bin = bin_of(x);
    float mass = fast_exp2((x - fminf(edge_of(bin + 1), top)) * LOG2_E);
    if (x > -INFINITY) atomicAdd(&cells[bin], (uint32_t)__float2int_rn(mass * unit));
  });
  __syncthreads();
  for (int i = t; i < NUM_BINS; i += MASS_THREADS) {
    float relative = top > -INFINITY ? fast_exp2((fminf(edge_of(i + 1), top) - top) * LOG2_E) : 0;
    plan.masses[(int64_t)blockIdx.x * NUM_BINS + i] = (float)cells[i] / unit * relative;
  }
  if (t == 0) plan.tops[blockIdx.x] = top;
}

constexpr int CUT_THREADS = NUM_BINS / 4;

// The sum of x over this and all lower threads of a block.
template <int THREADS>
__device__ __forceinline__ float running_sum(float x, float *shared) {
  int lane = lane_id(), warp = warp_id();
  for (int step = 1; step < WARP; step *= 2) {
    float other = __shfl_up_sync(ALL_LANES, x, step);
    if (lane >= step) x += other;
  }
  if (lane == WARP - 1) shared[warp] = x;
  __syncthreads();
  for (int i = 0; i < warp; i++) x += shared[i];
  return x;
}

// Thread t has the four bins that are 4 t .. 4 t + 3 below the top one.
__global__ void __launch_bounds__(CUT_THREADS) find_cut(const __grid_constant__ TopP p, const __grid_constant__ MassPlan plan, RowCut *cuts) {
  __shared__ float sums[CUT_THREADS], shared[CUT_THREADS / WARP];
  __shared__ int first;
  int t = threadIdx.x;
  int64_t row = blockIdx.x, m = row % p.queries, flat = row / p.queries;
  float exact = p.exact_lse[flat / p.query_heads * p.lse_stride[0] + flat % p.query_heads * p.lse_stride[1] + m * p.lse_stride[2]];
  wait_for_kernels_ahead();
  const float *tops = plan.tops + row * plan.segments;
  float base = exact;
  for (int i = 0; i < plan.segments; i++) base = tops[i] > base ? tops[i] : base;
  float4 mass = make_float4(0, 0, 0, 0);
  for (int i = 0; i < plan.segments; i++) {
    float by = tops[i] > -INFINITY ? expf(tops[i] - base) : 0;
    float4 x = ((const float4 *)(plan.masses + (row * plan.segments + i) * NUM_BINS))[CUT_THREADS - 1 - t];
    mass.x = fmaf(x.x, by, mass.x), mass.y = fmaf(x.y, by, mass.y), mass.z = fmaf(x.z, by, mass.z), mass.w = fmaf(x.w, by, mass.w);
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
