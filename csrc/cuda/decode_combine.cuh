// The parts of a row become its output: sums of packed parts are turned back once, exact parts join, all are divided.
#pragma once

#include "decode_queries.cuh"

namespace kvq {
namespace cuda {

constexpr int MANY_ROWS = 512;  // from here on a row is combined by fewer threads

// How a call is cut, and its scratch. Packed parts come first; part p of head bh and row r is at index
// (bh * count + p) * rows + r.
struct Parts {
  float *sums;    // [.., VDIM], packed ones in rotated space
  float2 *state;  // maximum in log2, sum of the weights
  int packed, exact;
  int first_tile, num_tiles, exact_steps;

  __host__ __device__ int count() const { return packed + exact; }
  __device__ __forceinline__ int64_t index(int bh, int part, int rows) const {
    return ((int64_t)bh * count() + part) * rows;
  }
  __device__ __forceinline__ int tile(int split) const {
    return first_tile + (int)((int64_t)split * num_tiles / packed);
  }
};

template <int NUM_THREADS>
__device__ __forceinline__ float block_reduce(float x, bool maximum, float *shared) {
  for (int o = 16; o; o >>= 1) {
    float other = __shfl_xor_sync(~0u, x, o);
    x = maximum ? fmaxf(x, other) : x + other;
  }
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  x = shared[0];
  for (int i = 1; i < NUM_THREADS / 32; i++) x = maximum ? fmaxf(x, shared[i]) : x + shared[i];
  __syncthreads();
  return x;
}

template <class T>
__device__ __forceinline__ void store_as(T *to, float x);
template <>
__device__ __forceinline__ void store_as<__half>(__half *to, float x) {
  *to = __float2half_rn(x);
}
template <>
__device__ __forceinline__ void store_as<__nv_bfloat16>(__nv_bfloat16 *to, float x) {
  *to = __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ void store_as<float>(float *to, float x) {
  *to = x;
}

// What does not depend on the parts, loaded while they are still being made: the values' rotation, by the first warp.
template <int VDIM>
struct InverseRotation {
  static constexpr int N = (VDIM + 31) / 32;
  static constexpr bool IN_REGISTERS = VDIM == 32 * fixed::largest_power(N) && VDIM >= 64;
  fixed::WarpRotation<IN_REGISTERS ? N : 2> rotation;

  __device__ __forceinline__ void load(const Rotation &r, int lane) {
    if (IN_REGISTERS && !r.matrix) rotation.load(r, true, lane);
  }
  __device__ __forceinline__ void turn(float *y, const Rotation &r, int lane) {
    if constexpr (IN_REGISTERS) {
      if (!r.matrix) {
        float x[N];
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = y[N * lane + i];
        rotation.turn(x, r, true, lane);
#pragma unroll
        for (int i = 0; i < N; i++) y[N * lane + i] = x[i];
        return;
      }
    }
    fixed::rotate_row<VDIM>(y, r, true, lane);
  }
};

// One CTA a row; dynamic shared memory holds the weight of every part.
template <class T, int VDIM, int NUM_THREADS>
__global__ void __launch_bounds__(NUM_THREADS)
    combine_kernel(const __grid_constant__ DecodeArgs a, const __grid_constant__ Parts parts) {
  extern __shared__ float weight[];
  constexpr int COLUMNS = VDIM / 4, LANES = NUM_THREADS / COLUMNS,
                AHEAD = NUM_THREADS / 32;  // LANES: threads per column of four dims
  __shared__ float reduced[NUM_THREADS / 32], y[VDIM], partial[LANES][2][VDIM];
  int rows = a.rows, bh = blockIdx.x / rows, row = blockIdx.x - bh * rows, t = threadIdx.x, count = parts.count();
  int b = bh / a.heads, h = bh - b * a.heads, column = t % COLUMNS, lane = t / COLUMNS;
  QueryPlace place(a, b, h, row);
  const float2 *state = parts.state + ((int64_t)bh * count * rows + row);
  const float *sums = parts.sums + ((int64_t)bh * count * rows + row) * VDIM + 4 * column;
  float sink = a.sink_logits ? __ldg(a.sink_logits + place.head) * LOG2E : NO_SCORE, most = sink;
  InverseRotation<VDIM> inverse_rotation;
  if (t < 32) inverse_rotation.load(a.values.rotation, t);
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  float4 ahead[AHEAD];  // the first sums of this thread, on their way while the weights are found
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
    if (lane < LANES && lane + i * LANES < count)
      ahead[i] = *(const float4 *)(sums + (int64_t)(lane + i * LANES) * rows * VDIM);
  float2 mine = t < count ? state[t * rows] : make_float2(NO_SCORE, 0);
  most = fmaxf(most, mine.x);
  for (int p = t + NUM_THREADS; p < count; p += NUM_THREADS) most = fmaxf(most, state[p * rows].x);
  most = block_reduce<NUM_THREADS>(most, true, reduced);
  float all = 0, packed = 0;
  for (int p = t; p < count; p += NUM_THREADS) {
    float2 s = p == t ? mine : state[p * rows];
    float w = fast_exp2(s.x - most);
    weight[p] = w, all += w * s.y, packed += p < parts.packed ? w * s.y : 0;
  }
  all = block_reduce<NUM_THREADS>(all, false, reduced);
  const StoreArgs &v = a.values;
  if (v.centre) packed = block_reduce<NUM_THREADS>(packed, false, reduced);
  if (a.sink_logits) all += fast_exp2(sink - most);
  if (lane < LANES) {
    float4 both[2] = {};
    auto add = [&](int p, float4 x) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float w = (p >= parts.packed) == e ? weight[p] : 0;
        both[e].x += w * x.x, both[e].y += w * x.y, both[e].z += w * x.z, both[e].w += w * x.w;
      }
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
      if (lane + i * LANES < count) add(lane + i * LANES, ahead[i]);
#pragma unroll 4
    for (int p = lane + AHEAD * LANES; p < count; p += LANES)
      add(p, *(const float4 *)(sums + (int64_t)p * rows * VDIM));
    *(float4 *)&partial[lane][0][4 * column] = both[0], *(float4 *)&partial[lane][1][4 * column] = both[1];
  }
  __syncthreads();
  if (t < 32) {
    for (int d = t; d < VDIM; d += 32) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < LANES; i++) sum += partial[i][0][d];
      y[d] = sum;
    }
    __syncwarp();
    inverse_rotation.turn(y, v.rotation, t);
  }
  __syncthreads();
  const float *centre = v.centre ? v.centre + (int64_t)b * v.centre_stride[0] + h * v.centre_stride[1] : nullptr;
  const float *balance = v.balance ? v.balance + (int64_t)b * v.balance_stride[0] + h * v.balance_stride[1] : nullptr;
  T *out = (T *)a.out.data + place.at(a.out.stride);
  float inverse = all > 0 ? 1 / all : 0;
  for (int d = t; d < VDIM; d += NUM_THREADS) {
    float sum = balance ? y[d] * __ldg(balance + d) : y[d];
    if (centre) sum += packed * __ldg(centre + d);
#pragma unroll
    for (int i = 0; i < LANES; i++) sum += partial[i][1][d];
    store_as<T>(out + d, sum * inverse);
  }
  if (t == 0) a.lse[place.at(a.lse_stride)] = all > 0 ? (most + log2f(all)) / LOG2E : -INFINITY;
}

}  // namespace cuda
}  // namespace kvq
