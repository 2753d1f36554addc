// A tile of exact tokens as halves: every row over its own power of two, so that halves hold any magnitude. What
// rounding to a half leaves over, the low part, is a half too; float32 keys are multiplied in both parts.
#pragma once

#include "rows.cuh"
#include "tiles.h"

namespace kvq {
namespace cuda {
namespace tiles {

// A power of two that brings `most` to 128 .. 256 as a factor, and its inverse.
struct Unit {
  float factor, unit;
};
__device__ __forceinline__ Unit unit_of(float most) {
  int exponent = (__float_as_int(most) >> 23) - 127;
  exponent = exponent < -100 ? -100 : exponent;
  return {__int_as_float((127 + 7 - exponent) << 23), __int_as_float((127 - 7 + exponent) << 23)};
}

__device__ __forceinline__ float low_part(float x) { return x - __half2float(__float2half_rn(x)); }

__device__ __forceinline__ uint32_t pair_of_halves(float x, float y) {
  __half2 pair = __floats2half2_rn(x, y);
  return *(uint32_t *)&pair;
}

// Elements i .. i + 3; `quads`: aligned to as many.
__device__ __forceinline__ float4 load_four(const char *row, Dtype dtype, int i, bool quads) {
  if (!quads)
    return make_float4(load_element(row, dtype, i), load_element(row, dtype, i + 1), load_element(row, dtype, i + 2),
                       load_element(row, dtype, i + 3));
  if (dtype == FLOAT32) return __ldg((const float4 *)row + i / 4);
  uint2 pairs = __ldg((const uint2 *)row + i / 4);
  float2 low, high;
  if (dtype == FLOAT16) {
    low = __half22float2(*(const __half2 *)&pairs.x), high = __half22float2(*(const __half2 *)&pairs.y);
  } else {
    low = __bfloat1622float2(*(const __nv_bfloat162 *)&pairs.x),
    high = __bfloat1622float2(*(const __nv_bfloat162 *)&pairs.y);
  }
  return make_float4(low.x, low.y, high.x, high.y);
}

constexpr int ROW_LANES = 8;  // lanes that share a row

// Rows first .. first + count of x at (b, h) into [TOKENS, pitch], zeros beyond `dim` up to `pad` and beyond `count`;
// their units into `unit`. `low`: the low parts instead.
template <int TOKENS, int THREADS>
__device__ __forceinline__ void load_exact(const Dense &x, int64_t b, int64_t h, int first, int count, int dim, int pad,
                                           bool quads, bool low, __half *to, int pitch, float *unit) {
  int part = threadIdx.x % ROW_LANES;
  for (int token = threadIdx.x / ROW_LANES; token < TOKENS; token += THREADS / ROW_LANES) {
    bool used = token < count;
    const char *row = row_at(x, b, h, first + (used ? token : 0));
    float most = 0;
    for (int i = 4 * part; used && i < dim; i += 4 * ROW_LANES) {
      float4 v = load_four(row, x.dtype, i, quads);
      most = fmaxf(fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))), most);
    }
#pragma unroll
    for (int step = 1; step < ROW_LANES; step *= 2) most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, step));
    Unit u = unit_of(most);
    for (int i = 4 * part; i < pad; i += 4 * ROW_LANES) {
      float4 v = make_float4(0, 0, 0, 0);
      if (used && i < dim) v = load_four(row, x.dtype, i, quads);
      v.x *= u.factor, v.y *= u.factor, v.z *= u.factor, v.w *= u.factor;
      if (low) v = make_float4(low_part(v.x), low_part(v.y), low_part(v.z), low_part(v.w));
      *(uint2 *)(to + token * pitch + i) = make_uint2(pair_of_halves(v.x, v.y), pair_of_halves(v.z, v.w));
    }
    if (part == 0) unit[token] = used ? u.unit : 0;
  }
}

}  // namespace tiles
}  // namespace cuda
}  // namespace kvq
