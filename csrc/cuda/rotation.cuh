// R x and R^T x of one vector of D floats in shared memory, by one warp. Any kind of rotation, any D that is a multiple
// of 4 up to 512.
//
// A window of the Walsh-Hadamard transform is held in registers, element 32k + lane in v[k]: stages of 32 and more are
// between registers, those below between lanes.
#pragma once

#include "rows.cuh"

namespace kvq {
namespace cuda {

// Not normalised, of 32 * N elements.
template <int N>
__device__ inline void hadamard(float (&v)[N], int lane) {
#pragma unroll
  for (int half = 1; half < WARP; half *= 2) {
#pragma unroll
    for (int k = 0; k < N; k++) {
      float other = __shfl_xor_sync(ALL_LANES, v[k], half);
      v[k] = lane & half ? other - v[k] : v[k] + other;
    }
  }
#pragma unroll
  for (int half = 1; half < N; half *= 2) {
#pragma unroll
    for (int k = 0; k < N; k++)
      if (!(k & half)) {
        float low = v[k], high = v[k | half];
        v[k] = low + high;
        v[k | half] = low - high;
      }
  }
}

// One window of a mixing round: signs, then the transform, or the other way round.
template <int N, bool INVERSE>
__device__ inline void mix_window(float *x, const float *sign, int lane) {
  const float norm = 1 / sqrtf(32.0f * N);
  float v[N];
#pragma unroll
  for (int k = 0; k < N; k++) v[k] = x[k * WARP + lane] * (INVERSE ? norm : norm * sign[k * WARP + lane]);
  hadamard<N>(v, lane);
#pragma unroll
  for (int k = 0; k < N; k++) x[k * WARP + lane] = INVERSE ? v[k] * sign[k * WARP + lane] : v[k];
}

// The same for a window of 4, 8 or 16 elements in the first lanes.
template <bool INVERSE>
__device__ inline void mix_small_window(float *x, int size, const float *sign, int lane) {
  bool used = lane < size;
  const float norm = size == 4 ? 0.5f : size == 8 ? 0.35355339f : 0.25f, by = used ? norm * sign[lane] : 0;
  float v = used ? x[lane] * (INVERSE ? 1 : by) : 0;
  for (int half = 1; half < size; half *= 2) {
    float other = __shfl_xor_sync(ALL_LANES, v, half);
    v = lane & half ? other - v : v + other;
  }
  if (used) x[lane] = INVERSE ? v * by : v;
}

// One round: the first P coordinates, then the last P, with P the largest power of two that fits.
template <bool INVERSE>
__device__ inline void mix(float *x, int dim, const float *sign, int lane) {
  int power = 1 << (31 - __clz(dim));
  int windows = power == dim ? 1 : 2;
  for (int i = 0; i < windows; i++) {
    int first = (INVERSE ? windows - 1 - i : i) * (dim - power);
    if (power == 512) mix_window<16, INVERSE>(x + first, sign + first, lane);
    if (power == 256) mix_window<8, INVERSE>(x + first, sign + first, lane);
    if (power == 128) mix_window<4, INVERSE>(x + first, sign + first, lane);
    if (power == 64) mix_window<2, INVERSE>(x + first, sign + first, lane);
    if (power == 32) mix_window<1, INVERSE>(x + first, sign + first, lane);
    if (power < 32) mix_small_window<INVERSE>(x + first, power, sign + first, lane);
    __syncwarp();
  }
}

// A 4 x 4 map for every four coordinates.
template <bool INVERSE>
__device__ inline void apply_blocks(float *x, int dim, const float *blocks, int lane) {
  for (int n = lane; n < dim / 4; n += WARP) {
    float4 v = ((float4 *)x)[n], row[4];
#pragma unroll
    for (int i = 0; i < 4; i++) row[i] = ((const float4 *)blocks)[4 * n + i];
    float y[4];
    if (INVERSE) {
      y[0] = row[0].x * v.x + row[1].x * v.y + row[2].x * v.z + row[3].x * v.w;
      y[1] = row[0].y * v.x + row[1].y * v.y + row[2].y * v.z + row[3].y * v.w;
      y[2] = row[0].z * v.x + row[1].z * v.y + row[2].z * v.z + row[3].z * v.w;
      y[3] = row[0].w * v.x + row[1].w * v.y + row[2].w * v.z + row[3].w * v.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++) y[i] = row[i].x * v.x + row[i].y * v.y + row[i].z * v.z + row[i].w * v.w;
    }
    ((float4 *)x)[n] = make_float4(y[0], y[1], y[2], y[3]);
  }
  __syncwarp();
}

template <bool INVERSE>
__device__ inline void apply_matrix(float *x, int dim, const float *matrix, float *other, int lane) {
  for (int i = lane; i < dim; i += WARP) {
    float sum = 0;
    for (int j = 0; j < dim; j += 4) {
      float4 v = *(float4 *)(x + j), m;
      const float *column = matrix + (int64_t)j * dim + i;
      if (INVERSE)
        m = make_float4(column[0], column[dim], column[2 * dim], column[3 * dim]);
      else
        m = *(const float4 *)(matrix + (int64_t)i * dim + j);
      sum = fmaf(m.w, v.w, fmaf(m.z, v.z, fmaf(m.y, v.y, fmaf(m.x, v.x, sum))));
    }
    other[i] = sum;
  }
  __syncwarp();
  for (int i = lane; i < dim; i += WARP) x[i] = other[i];
  __syncwarp();
}

// In place. `x` and `other`, used by dense rotations only, are D floats of shared memory of this warp, aligned to 16
// bytes. Every lane sees what the others wrote to x before and after.
template <bool INVERSE>
__device__ inline void rotate_row(const Rotation &r, float *x, float *other, int lane) {
  __syncwarp();
  if (INVERSE && r.matrix) apply_matrix<true>(x, r.dim, r.matrix, other, lane);
  if (INVERSE && r.blocks) apply_blocks<true>(x, r.dim, r.blocks, lane);
  for (int i = 0; i < r.rounds; i++) mix<INVERSE>(x, r.dim, r.signs + (INVERSE ? r.rounds - 1 - i : i) * r.dim, lane);
  if (!INVERSE && r.blocks) apply_blocks<false>(x, r.dim, r.blocks, lane);
  if (!INVERSE && r.matrix) apply_matrix<false>(x, r.dim, r.matrix, other, lane);
}

}  // namespace cuda
}  // namespace kvq
