// The sums of a CTA's warps become its parts, one of packed tokens and one of exact ones, whose weights count from one
// maximum.
#pragma once

#include "decode_combine.cuh"

namespace kvq {
namespace cuda {

// Where the rows of a part lie: in scratch, or in the shared memory of its CTA.
struct PartPlace {
  float *sums;  // [rows][pitch]
  int pitch;
  float2 *state;  // [rows]: maximum in log2, sum of the weights
};

// Sums of a lane in floats to its rows of `to` [NUM_ROWS][MERGE_ROW].
template <class S, class Warp>
__device__ __forceinline__ void store_sums(const Warp &packed, float unit, float *to, int g, int c) {
  float half[Warp::LIMBS][2];
  packed.halves(half, c);
#pragma unroll
  for (int i = 0; i < Warp::SUM_ROWS; i++)
    Warp::store_column(
        to + Warp::sum_row(i, c) * S::MERGE_ROW, [&](int m, int j) { return packed.sum_of(half, m, j, i) * unit; }, g);
}

// What the warps of a CTA leave for each other. Packed tokens: warp w its sums at `sums` + w * `pitch`, [NUM_ROWS]
// [MERGE_ROW], and its states at `state` [w]; exact ones: the `num_exact` shares theirs at `exact` + i * `exact_pitch`
// and `state` [WARPS + i], before the merge.
template <class S>
struct WarpParts {
  float *sums;
  int pitch;
  float2 (*state)[S::NUM_ROWS];
  float *exact;
  int exact_pitch, num_exact;

  __device__ __forceinline__ float top_of(int row) const {
    float top = state[0][row].x;
#pragma unroll
    for (int w = 1; w < WARPS; w++) top = fmaxf(top, state[w][row].x);
    for (int i = 0; i < num_exact; i++) top = fmaxf(top, state[WARPS + i][row].x);
    return top;
  }

  // Adds four dims of a row of one warp.
  static __device__ __forceinline__ void add(float4 &total, float &weights, float2 state, float top,
                                             const float *sums) {
    float factor = fast_exp2(state.x - top);
    float4 v = *(const float4 *)sums;
    weights = fmaf(factor, state.y, weights);
    total.x = fmaf(factor, v.x, total.x), total.y = fmaf(factor, v.y, total.y);
    total.z = fmaf(factor, v.z, total.z), total.w = fmaf(factor, v.w, total.w);
  }
  static __device__ __forceinline__ void store(const PartPlace &to, int row, int column, float top, float weights,
                                               float4 total) {
    *(float4 *)(to.sums + row * to.pitch + column) = total;
    if (column == 0) to.state[row] = make_float2(top, weights);
  }

  // The parts of the CTA. They may lie where the first warp's sums and the first share's are: only the thread that
  // reads a place writes it.
  template <int NUM_THREADS, class Warp>
  __device__ __forceinline__ void merge(const Warp &packed, float value_step, int rows, const PartPlace &to,
                                        const PartPlace &to_exact, int thread) const {
    constexpr int COLUMNS = S::VDIM / 4;
    int warp = thread / 32, lane = thread % 32, g = lane >> 2, c = lane & 3;
    if (warp < WARPS) {
      float sum = Warp::row_sum(packed.sum), unit = packed.inverse_of_one();
      if (Warp::leads(g, c)) state[warp][Warp::row_of(g, c)] = make_float2(packed.top, sum * unit);
      store_sums<S>(packed, value_step * unit, sums + warp * pitch, g, c);
    }
    __syncthreads();
    for (int i = thread; i < rows * COLUMNS; i += NUM_THREADS) {
      int row = i / COLUMNS, column = 4 * (i % COLUMNS), at = row * S::MERGE_ROW + column;
      float top = top_of(row), weights = 0;
      float4 total = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int w = 0; w < WARPS; w++) add(total, weights, state[w][row], top, sums + w * pitch + at);
      store(to, row, column, top, weights, total);
      if (num_exact == 0) continue;
      weights = 0, total = make_float4(0, 0, 0, 0);
      for (int i = 0; i < num_exact; i++) add(total, weights, state[WARPS + i][row], top, exact + i * exact_pitch + at);
      store(to_exact, row, column, top, weights, total);
    }
  }
};

// The same for a kernel without exact tokens, at `index` of its results.
template <class S, class Results, class Warp>
__device__ __forceinline__ void merge_warps(const Results &results, const Warp &packed, float value_step, int64_t index,
                                            int rows, float *sums) {
  __shared__ float2 state[WARPS][S::NUM_ROWS];
  const PartPlace to{results.sums + index * S::VDIM, S::VDIM, results.state + index};
  __syncthreads();  // the memory of the sums is that of all warps
  WarpParts<S> all{sums, S::NUM_ROWS * S::MERGE_ROW, state, nullptr, 0, 0};
  all.template merge<THREADS>(packed, value_step, rows, to, to, threadIdx.x);
}

}  // namespace cuda
}  // namespace kvq
