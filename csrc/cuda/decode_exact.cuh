// One warp's attention over exact tokens (sinks and recent ones), 16 at a time, in the dtype of the cache: products of
// halves with float32 sums. The weights of bfloat16 are split into two halves, so that rounding them costs nothing.
//
//   scores^T [rows, tokens] = A (queries, rows g) . B (keys, column g = token)
//   sums^T [dims, rows]     = A (values, read transposed) . B (weights, n = row g)
#pragma once

#include "decode_packed.cuh"
#include "halves.cuh"
#include "tiles_asm.cuh"

namespace kvq {
namespace cuda {

constexpr int EXACT_STEP = 16;

// `keys` [16][KEY_ROW] and `values` [16][VALUE_ROW] are this warp's, in shared memory, 8 elements of a row against bank
// conflicts.
template <class T, int DIM, int VDIM>
struct ExactWarp {
  static constexpr int KEY_ROW = DIM + 8, VALUE_ROW = VDIM + 8, MTILES = VDIM / 16, STEPS = DIM / 16;
  static constexpr int BYTES = EXACT_STEP * (KEY_ROW + VALUE_ROW) * (int)sizeof(T);

  T *keys, *values;
  float top, sum;
  float out[MTILES][4];

  __device__ __forceinline__ explicit ExactWarp(void *memory)
      : keys((T *)memory), values(keys + EXACT_STEP * KEY_ROW) {}

  __device__ __forceinline__ void clear() {
    top = NO_SCORE, sum = 0;
#pragma unroll
    for (int m = 0; m < MTILES; m++) out[m][0] = out[m][1] = out[m][2] = out[m][3] = 0;
  }

  // Starts the copies of tokens first .. first + 16 as one group; missing ones are zero.
  template <int WIDTH>
  static __device__ __forceinline__ void start(T *shared, const DenseArgs &x, int b, int h, int first, int stop,
                                               int lane) {
    constexpr int UNITS = WIDTH / 8;
    const T *from = (const T *)x.data + (int64_t)b * x.stride[0] + (int64_t)h * x.stride[1];
#pragma unroll
    for (int i = lane; i < EXACT_STEP * UNITS; i += 32) {
      int token = i / UNITS, at = 8 * (i % UNITS), last = min(first + token, stop - 1);
      start_copy(shared + token * (WIDTH + 8) + at, from + (int64_t)last * x.stride[2] + at, first + token < stop);
    }
    close_copies();
  }
  __device__ __forceinline__ void start_keys(const DecodeArgs &a, int b, int h, int step, int lane) const {
    start<DIM>(keys, a.exact_keys, b, h, step * EXACT_STEP, a.exact_len, lane);
  }
  __device__ __forceinline__ void start_values(const DecodeArgs &a, int b, int h, int step, int lane) const {
    start<VDIM>(values, a.exact_values, b, h, step * EXACT_STEP, a.exact_len, lane);
  }

  // Products of the queries [ROWS][KEY_ROW] with the keys.
  __device__ __forceinline__ void scores(const T *queries, float (&x)[2][4], int lane) const {
    const T *from = keys + ((lane & 7) + 8 * (lane >> 4)) * KEY_ROW + 8 * ((lane >> 3) & 1);
    const uint32_t *query = (const uint32_t *)(queries + (lane >> 2) * KEY_ROW) + (lane & 3);
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      uint32_t key[4];
      load_straight(key, from + 16 * s);
#pragma unroll
      for (int n = 0; n < 2; n++) mma_half<T>(x[n], query[8 * s], 0, query[8 * s + 4], 0, key[2 * n], key[2 * n + 1]);
    }
  }

  // Weights of tokens 8 n + 2c and the next as B fragments, rounded, and what rounding left over; raises the maximum.
  __device__ __forceinline__ void weights(const DecodeArgs &a, const RowMask &mask, int first, int c, float (&x)[2][4],
                                          float &keep, uint32_t (&upper)[2], uint32_t (&lower)[2]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int token = first + 8 * (i / 2) + 2 * c + i % 2;
      float &y = x[i / 2][i % 2];
      y *= a.scale * LOG2E;
      if (a.softcap > 0) y = soft_capped(y, a.softcap);
      if (token >= a.exact_len)
        y = -INFINITY;
      else if (mask.data)
        y = mask.add(y, token < a.num_sinks ? token - a.num_sinks : token - a.num_sinks + a.length);
    }
    weigh(x, keep, upper, lower);
  }
  // The same of scores that count as they are, times log2 e.
  __device__ __forceinline__ void weigh(const float (&x)[2][4], float &keep, uint32_t (&upper)[2],
                                        uint32_t (&lower)[2]) {
    float most = fmaxf(fmaxf(fmaxf(fmaxf(top, x[0][0]), x[0][1]), x[1][0]), x[1][1]);
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    keep = fast_exp2(top - most);
    top = most, sum *= keep;
#pragma unroll
    for (int n = 0; n < 2; n++) {
      float p0 = fast_exp2(x[n][0] - most), p1 = fast_exp2(x[n][1] - most);
      sum += p0 + p1;
      upper[n] = pair_of<T>(p0, p1);
      float2 rounded = floats_of_pair<T>(upper[n]);
      lower[n] = pair_of<T>(p0 - rounded.x, p1 - rounded.y);
    }
  }

  __device__ __forceinline__ void add_values(float keep, const uint32_t (&upper)[2], const uint32_t (&lower)[2],
                                             int lane) {
    const T *from = values + ((lane & 7) + 8 * (lane >> 4)) * VALUE_ROW + 8 * ((lane >> 3) & 1);
    int c = lane & 3;
    float keep0 = __shfl_sync(~0u, keep, 8 * c), keep1 = __shfl_sync(~0u, keep, 8 * c + 4);
#pragma unroll
    for (int m = 0; m < MTILES; m++) {
      uint32_t v[4];
      load_transposed(v, from + 16 * m);
      out[m][0] *= keep0, out[m][1] *= keep1, out[m][2] *= keep0, out[m][3] *= keep1;
      mma_half<T>(out[m], v[0], v[1], v[2], v[3], upper[0], upper[1]);
      mma_half<T>(out[m], v[0], v[1], v[2], v[3], lower[0], lower[1]);
    }
  }

  // The dim of out[m][2 * i ..] in lane g.
  static __device__ __forceinline__ int dim_of(int m, int i, int g) { return 16 * m + 8 * i + g; }
};

}  // namespace cuda
}  // namespace kvq
