// Rows of any dtype to and from float, and sums over a warp. A warp is 32 lanes that run every call together.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "structs.h"

namespace kvq {
namespace cuda {

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

__device__ inline int lane_id() { return threadIdx.x % WARP; }

// Index of the warp in its block; by a shuffle, so that the compiler knows it is one number for all lanes.
__device__ inline int warp_id() { return __shfl_sync(ALL_LANES, (int)threadIdx.x / WARP, 0); }

__device__ inline int element_size(Dtype dtype) { return dtype == FLOAT32 ? 4 : 2; }

__device__ inline float load_element(const char *row, Dtype dtype, int64_t i) {
  if (dtype == FLOAT32) return ((const float *)row)[i];
  if (dtype == BFLOAT16) return __bfloat162float(((const __nv_bfloat16 *)row)[i]);
  return __half2float(((const __half *)row)[i]);
}

__device__ inline float float_of(float x) { return x; }
__device__ inline float float_of(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float float_of(__half x) { return __half2float(x); }

template <int N, class T>
__device__ __forceinline__ void load_spread_as(float (&x)[N], const T *row, int first, int dim) {
  T loaded[N];
#pragma unroll
  for (int j = 0; j < N; j++)
    if (first + j * WARP < dim) loaded[j] = row[first + j * WARP];
#pragma unroll
  for (int j = 0; j < N; j++) x[j] = first + j * WARP < dim ? float_of(loaded[j]) : 0;
}
// Elements first, first + 32, .. of a row of `dim`, 0 behind its end, by loads that are under way together.
template <int N>
__device__ __forceinline__ void load_spread(float (&x)[N], const char *row, Dtype dtype, int first, int dim) {
  if (dtype == FLOAT32)
    load_spread_as(x, (const float *)row, first, dim);
  else if (dtype == BFLOAT16)
    load_spread_as(x, (const __nv_bfloat16 *)row, first, dim);
  else
    load_spread_as(x, (const __half *)row, first, dim);
}

// Rounds to nearest even.
__device__ inline void store_element(char *row, Dtype dtype, int64_t i, float x) {
  if (dtype == FLOAT32) {
    ((float *)row)[i] = x;
  } else if (dtype == BFLOAT16) {
    ((__nv_bfloat16 *)row)[i] = __float2bfloat16_rn(x);
  } else {
    ((__half *)row)[i] = __float2half_rn(x);
  }
}

__device__ inline char *row_at(const Dense &x, int64_t batch, int64_t head, int64_t token) {
  return x.data + element_size(x.dtype) * (batch * x.stride[0] + head * x.stride[1] + token * x.stride[2]);
}

// The sum over all lanes, in every lane.
__device__ inline float warp_sum(float x) {
  for (int step = WARP / 2; step; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
  return x;
}
__device__ inline float warp_max(float x) {
  for (int step = WARP / 2; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
  return x;
}

}  // namespace cuda
}  // namespace kvq
