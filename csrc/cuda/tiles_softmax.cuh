// From the products of a tile to the weights of its values. Logits are in base 2; weights are relative to a reference
// that no logit so far passes by more than SLACK, and become halves times 2^WEIGHT_BITS over a unit that no scale of a
// value passes, so that no magnitude of the values is lost. Where the reference or the unit rises, what was summed
// before is scaled down.
#pragma once

#include "mma.cuh"
#include "tiles_exact.cuh"
#include "tiles_tokens.cuh"

namespace kvq {
namespace cuda {
namespace tiles {

constexpr float SLACK = 3.0f, LEAST_WEIGHT = 1e-30f;
constexpr int WEIGHT_BITS = 12;

// Rows g + 8 i of tile m of a warp.
template <class S>
struct RowState {
  float top[S::ROW_TILES][2], sum[S::ROW_TILES][2];  // this lane's share of the sum
  float unit;
  float sums[S::ROW_TILES][S::WARP_DIMS / 8][4];

  __device__ __forceinline__ void clear(float top_before) {
    unit = 0;
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; m++) {
      top[m][0] = top[m][1] = top_before, sum[m][0] = sum[m][1] = 0;
#pragma unroll
      for (int n = 0; n < S::WARP_DIMS / 8; n++) sums[m][n][0] = sums[m][n][1] = sums[m][n][2] = sums[m][n][3] = 0;
    }
  }

  // 2^WEIGHT_BITS / unit, 0 before there is a unit.
  __device__ __forceinline__ float to_half() const {
    return unit > 0 ? __uint_as_float(((254u + WEIGHT_BITS) << 23) - __float_as_uint(unit)) : 0;
  }

  // The unit becomes a power of two of at least `most`; returns the factor of what was summed before.
  __device__ __forceinline__ float raise_unit(float most) {
    if (!(most > unit)) return 1;
    float before = unit;
    unit = __int_as_float((__float_as_int(most) + 0x7fffff) & ~0x7fffff);
    return before * (to_half() / (1 << WEIGHT_BITS));
  }

  __device__ __forceinline__ void scale_sums(int m, int i, float by) {
#pragma unroll
    for (int n = 0; n < S::WARP_DIMS / 8; n++) sums[m][n][2 * i] *= by, sums[m][n][2 * i + 1] *= by;
  }
};

// Weights as A fragments, and what rounding them left over.
template <class S>
struct Weights {
  uint32_t high[S::ROW_TILES][S::STEPS][4], low[S::PRECISE ? S::ROW_TILES : 1][S::STEPS][4];

  // Those of elements 2 i and 2 i + 1 of tile n.
  __device__ __forceinline__ void set(int m, int n, int i, float x, float y) {
    high[m][n / 2][2 * (n % 2) + i] = pair_of_halves(x, y);
    if constexpr (S::PRECISE) low[m][n / 2][2 * (n % 2) + i] = pair_of_halves(low_part(x), low_part(y));
  }
};

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
  return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(ALL_LANES, x, 1);
  return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

// cap * tanh(x / cap) for a logit and a result times log2(e); `by` is 2 / cap.
__device__ __forceinline__ float soft_cap(float x, float cap, float by) {
  return cap * LOG2_E * (1 - __fdividef(2, 1 + fast_exp2(x * by)));
}

// Products to logits. `scales` and `factors` are at the first place and row of the warp.
template <class S>
__device__ __forceinline__ void scale_scores(float (&x)[S::ROW_TILES][S::TOKEN_TILES][4], const float *scales,
                                             const RowFactors *factors, int g, int c) {
#pragma unroll
  for (int m = 0; m < S::ROW_TILES; m++) {
    RowFactors row[2] = {factors[16 * m + g], factors[16 * m + g + 8]};
#pragma unroll
    for (int n = 0; n < S::TOKEN_TILES; n++) {
      float2 scale = *(const float2 *)(scales + 8 * n + 2 * c);
#pragma unroll
      for (int i = 0; i < 4; i++)
        x[m][n][i] = fmaf(x[m][n][i] * (i % 2 ? scale.y : scale.x), row[i / 2].factor, row[i / 2].bias);
    }
  }
}

// Logits to weights as A fragments; sums are brought to the new maximum and unit. `scales` are those of the values.
template <class S>
__device__ __forceinline__ void weigh(RowState<S> &rows, float (&x)[S::ROW_TILES][S::TOKEN_TILES][4],
                                      const float *scales, float scale_most, int c, Weights<S> &weights) {
  float unit_factor = rows.raise_unit(scale_most), to_half = rows.to_half();
  float base[S::ROW_TILES][2], keep[S::ROW_TILES][2];
  bool rises = unit_factor != 1;
#pragma unroll
  for (int m = 0; m < S::ROW_TILES; m++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float most = -INFINITY;
#pragma unroll
      for (int n = 0; n < S::TOKEN_TILES; n++) most = fmaxf(most, fmaxf(x[m][n][2 * i], x[m][n][2 * i + 1]));
      most = quad_max(most);
      bool higher = most > rows.top[m][i] + SLACK;
      float top = higher ? most : rows.top[m][i];
      base[m][i] = top == -INFINITY ? 0 : top;
      keep[m][i] = higher ? fast_exp2(rows.top[m][i] - top) : 1;
      rises |= higher;
      rows.top[m][i] = top, rows.sum[m][i] *= keep[m][i];
    }
  if (__any_sync(ALL_LANES, rises))
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; m++)
#pragma unroll
      for (int i = 0; i < 2; i++) rows.scale_sums(m, i, keep[m][i] * unit_factor);
#pragma unroll
  for (int n = 0; n < S::TOKEN_TILES; n++) {
    float2 scale = *(const float2 *)(scales + 8 * n + 2 * c);
    scale.x *= to_half, scale.y *= to_half;
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; m++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float p = fast_exp2(x[m][n][2 * i] - base[m][i]), next = fast_exp2(x[m][n][2 * i + 1] - base[m][i]);
        rows.sum[m][i] += p + next;
        weights.set(m, n, i, p * scale.x, next * scale.y);
      }
  }
}

// The same for weights that are given: over the row's largest so far, at least LEAST_WEIGHT, instead of exponentials.
template <class S>
__device__ __forceinline__ void take_weights(RowState<S> &rows, float (&x)[S::ROW_TILES][S::TOKEN_TILES][4],
                                             const float *scales, float scale_most, int c, Weights<S> &weights) {
  float unit_factor = rows.raise_unit(scale_most), to_half = rows.to_half();
#pragma unroll
  for (int m = 0; m < S::ROW_TILES; m++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float most = rows.top[m][i];
#pragma unroll
      for (int n = 0; n < S::TOKEN_TILES; n++)
        most = fmaxf(most, fmaxf(fabsf(x[m][n][2 * i]), fabsf(x[m][n][2 * i + 1])));
      most = quad_max(most);
      rows.scale_sums(m, i, rows.top[m][i] / most * unit_factor);
      rows.top[m][i] = most;
      float inverse = 1 / most;
#pragma unroll
      for (int n = 0; n < S::TOKEN_TILES; n++) {
        float2 scale = *(const float2 *)(scales + 8 * n + 2 * c);
        float p = x[m][n][2 * i], next = x[m][n][2 * i + 1];
        rows.sum[m][i] += p + next;
        weights.set(m, n, i, p * inverse * (scale.x * to_half), next * inverse * (scale.y * to_half));
      }
    }
}

}  // namespace tiles
}  // namespace cuda
}  // namespace kvq
