// Rotation of one vector by one warp (codecs/rotation.py) for a head dim that is known when the kernel is compiled, as
// the decode kernels need it: lane l holds coordinates N l .. N l + N - 1, so a vector may stay in registers between
// what loads it and what takes it. rotation.cuh does the same for any head dim.
#pragma once

#include "structs.h"

namespace kvq {
namespace cuda {
namespace fixed {

__host__ __device__ constexpr int largest_power(int n) {
  int p = 1;
  while (2 * p <= n) p *= 2;
  return p;
}

// N floats, at an address that is a multiple of their size or of 16 bytes.
template <int N>
__device__ __forceinline__ void load_floats(float (&to)[N], const float *from) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      float4 v = *(const float4 *)(from + i);
      to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
    }
  } else {
    static_assert(N == 2, "two floats or a multiple of four");
    float2 v = *(const float2 *)from;
    to[0] = v.x, to[1] = v.y;
  }
}

// Walsh-Hadamard of N * 32 values in registers; lane l holds values N l .. N l + N - 1.
template <int N>
__device__ __forceinline__ void hadamard(float (&x)[N], int lane) {
#pragma unroll
  for (int half = 1; half < N; half *= 2)
#pragma unroll
    for (int i = 0; i < N; i++)
      if (!(i & half)) {
        float a = x[i], b = x[i + half];
        x[i] = a + b, x[i + half] = a - b;
      }
#pragma unroll
  for (int o = 1; o < 32; o *= 2)
#pragma unroll
    for (int i = 0; i < N; i++) {
      float other = __shfl_xor_sync(~0u, x[i], o);
      x[i] = lane & o ? other - x[i] : x[i] + other;
    }
  const float norm = rsqrtf(32.0f * N);
#pragma unroll
  for (int i = 0; i < N; i++) x[i] *= norm;
}

// One window of P values in shared memory, multiplied by its signs before (forward) or after.
template <int P>
__device__ __forceinline__ void mix_window(float *x, const float *signs, bool inverse, int lane) {
  if constexpr (P >= 32) {
    constexpr int N = P / 32;
    float v[N];
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = x[N * lane + i] * (inverse ? 1.0f : signs[N * lane + i]);
    hadamard<N>(v, lane);
#pragma unroll
    for (int i = 0; i < N; i++) x[N * lane + i] = inverse ? v[i] * signs[N * lane + i] : v[i];
  }
  __syncwarp();
}

template <int DIM>
__device__ __forceinline__ void mix(float *x, const float *signs, bool inverse, int lane) {
  constexpr int P = largest_power(DIM);
  if (P == DIM || !inverse) mix_window<P>(x, signs, inverse, lane);
  if (P < DIM) mix_window<P>(x + DIM - P, signs + DIM - P, inverse, lane);
  if (P < DIM && inverse) mix_window<P>(x, signs, inverse, lane);
}

// One vector in the registers of a warp: lane l holds values N l .. N l + N - 1 of 32 N. Its rotation's parameters, at
// addresses that are multiples of 16, are loaded beforehand, so that their way from memory is shared with what else is
// on its way.
template <int N>
struct WarpRotation {
  static constexpr int BLOCK_VALUES = N >= 4 ? 4 * N : 8;  // of 4x4 blocks: N / 4 whole ones, or the rows of two values
  float sign[N], block[BLOCK_VALUES];
  bool blocks;

  __device__ __forceinline__ void load(const Rotation &r, bool inverse, int lane) {
    blocks = r.blocks != nullptr;
    if (r.rounds)
      load_floats(sign, r.signs + N * lane);
    else
#pragma unroll
      for (int i = 0; i < N; i++) sign[i] = 1.0f;
    if (!blocks) return;
    if constexpr (N >= 4) {
      load_floats(block, r.blocks + 4 * N * lane);
    } else {
      const float *m = r.blocks + 16 * (lane / 2);
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          int row = 2 * (lane & 1) + i;
          block[4 * i + j] = inverse ? m[4 * j + row] : m[4 * row + j];
        }
    }
  }

  __device__ __forceinline__ void turn_blocks(float (&x)[N], bool inverse, int lane) const {
    if constexpr (N >= 4) {
#pragma unroll
      for (int n = 0; n < N / 4; n++) {
        float v[4] = {x[4 * n], x[4 * n + 1], x[4 * n + 2], x[4 * n + 3]};
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float sum = 0;
#pragma unroll
          for (int j = 0; j < 4; j++)
            sum = fmaf(inverse ? block[16 * n + 4 * j + i] : block[16 * n + 4 * i + j], v[j], sum);
          x[4 * n + i] = sum;
        }
      }
    } else {
      float o0 = __shfl_xor_sync(~0u, x[0], 1), o1 = __shfl_xor_sync(~0u, x[1], 1);
      bool odd = lane & 1;
      float v[4] = {odd ? o0 : x[0], odd ? o1 : x[1], odd ? x[0] : o0, odd ? x[1] : o1};
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) sum = fmaf(block[4 * i + j], v[j], sum);
        x[i] = sum;
      }
    }
  }

  // One round of signs and mixing; more rounds load their signs when it is their turn.
  __device__ __forceinline__ void turn(float (&x)[N], const Rotation &r, bool inverse, int lane) const {
    if (inverse && blocks) turn_blocks(x, true, lane);
    for (int k = 0; k < r.rounds; k++) {
      const float *signs = r.signs + (inverse ? r.rounds - 1 - k : k) * 32 * N + N * lane;
      float s[N];
#pragma unroll
      for (int i = 0; i < N; i++) s[i] = r.rounds == 1 ? sign[i] : signs[i];
      if (!inverse)
#pragma unroll
        for (int i = 0; i < N; i++) x[i] *= s[i];
      hadamard<N>(x, lane);
      if (inverse)
#pragma unroll
        for (int i = 0; i < N; i++) x[i] *= s[i];
    }
    if (!inverse && blocks) turn_blocks(x, false, lane);
  }
};

// x [DIM] in shared memory of this warp becomes R x, or R^T x; ends synchronised.
template <int DIM>
__device__ void rotate_row(float *x, const Rotation &r, bool inverse, int lane) {
  if (!inverse)
    for (int i = 0; i < r.rounds; i++) mix<DIM>(x, r.signs + i * DIM, false, lane);
  if (r.blocks)
    for (int n = lane; n < DIM / 4; n += 32) {
      float v[4] = {x[4 * n], x[4 * n + 1], x[4 * n + 2], x[4 * n + 3]};
      const float *m = r.blocks + 16 * n;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) sum += (inverse ? m[4 * j + i] : m[4 * i + j]) * v[j];
        x[4 * n + i] = sum;
      }
    }
  __syncwarp();
  if (r.matrix) {
    float y[DIM / 32 + 1];
    for (int k = 0, d = lane; d < DIM; d += 32, k++) {
      float sum = 0;
#pragma unroll 8
      for (int j = 0; j < DIM; j++) sum += r.matrix[inverse ? j * DIM + d : d * DIM + j] * x[j];
      y[k] = sum;
    }
    __syncwarp();
    for (int k = 0, d = lane; d < DIM; d += 32, k++) x[d] = y[k];
    __syncwarp();
  }
  if (inverse)
    for (int i = r.rounds - 1; i >= 0; i--) mix<DIM>(x, r.signs + i * DIM, true, lane);
}

}  // namespace fixed
}  // namespace cuda
}  // namespace kvq
