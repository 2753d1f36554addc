// One warp's attention over exact tokens (sinks and recent ones), 16 at a time, in the dtype of the cache: products of
// halves with float32 sums. The weights of bfloat16 are split into two halves, so that rounding them costs nothing.
//
//   scores^T [rows, tokens] = A (queries, rows g) . B (keys, column g = token)
//   sums^T [dims, rows]     = A (values, read transposed) . B (weights, n = row g)
#pragma once

#include "decode_packed.cuh"
#include "halves.cuh"

namespace kvq {
namespace cuda {

constexpr int EXACT_STEP = 16;

template <class T, int DIM, int VDIM>
struct ExactWarp {
  static constexpr int VALUE_ROW = VDIM + 8, MTILES = VDIM / 16, STEPS = DIM / 16;  // 8 elements against bank conflicts
  static constexpr int BYTES = EXACT_STEP * VALUE_ROW * sizeof(T);                  // of shared memory

  float top, sum;
  float out[MTILES][4];
  uint32_t query[STEPS][2], key[2][STEPS][2];

  __device__ __forceinline__ void clear() {
    top = NO_SCORE, sum = 0;
#pragma unroll
    for (int m = 0; m < MTILES; m++) out[m][0] = out[m][1] = out[m][2] = out[m][3] = 0;
  }

  // Fragments of one row (a query, a key; zero if null): elements 16 s + 2c, 2c + 1 and 8 further on.
  static __device__ __forceinline__ void load_row(uint32_t (&to)[STEPS][2], const T *row, int c) {
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      to[s][0] = row ? ((const uint32_t *)row)[8 * s + c] : 0;
      to[s][1] = row ? ((const uint32_t *)row)[8 * s + 4 + c] : 0;
    }
  }

  // Starts the loads of tokens first .. first + 16: keys to registers, values to shared memory as one group of copies.
  // Missing tokens are zero.
  __device__ __forceinline__ void start(const DecodeArgs &a, int b, int h, int first, T *shared, int lane) {
    const DenseArgs &k = a.exact_keys, &v = a.exact_values;
    const T *keys = (const T *)k.data + (int64_t)b * k.stride[0] + (int64_t)h * k.stride[1];
    const T *values = (const T *)v.data + (int64_t)b * v.stride[0] + (int64_t)h * v.stride[1];
#pragma unroll
    for (int n = 0; n < 2; n++) {
      int token = first + 8 * n + (lane >> 2);
      load_row(key[n], token < a.exact_len ? keys + (int64_t)token * k.stride[2] : nullptr, lane & 3);
    }
    constexpr int UNITS = VDIM / 8;
#pragma unroll
    for (int i = lane; i < EXACT_STEP * UNITS; i += 32) {
      int token = i / UNITS, at = 8 * (i % UNITS);
      if (first + token < a.exact_len)
        start_copy(shared + token * VALUE_ROW + at, values + (int64_t)(first + token) * v.stride[2] + at);
      else
        *(uint4 *)(shared + token * VALUE_ROW + at) = make_uint4(0, 0, 0, 0);
    }
    commit_copies();
  }

  // Weights of tokens 8 n + 2c and the next as B fragments, rounded, and what rounding left over; raises the maximum.
  __device__ __forceinline__ void weights(const DecodeArgs &a, const RowMask &mask, int first, int c, float &keep,
                                          uint32_t (&upper)[2], uint32_t (&lower)[2]) {
    float x[2][4] = {}, most = top;
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
      for (int n = 0; n < 2; n++) mma_half<T>(x[n], query[s][0], 0, query[s][1], 0, key[n][s][0], key[n][s][1]);
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
      most = fmaxf(most, y);
    }
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

  __device__ __forceinline__ void add_values(const T *shared, float keep, const uint32_t (&upper)[2],
                                             const uint32_t (&lower)[2], int lane) {
    const T *from = shared + ((lane & 7) + 8 * (lane >> 4)) * VALUE_ROW + 8 * ((lane >> 3) & 1);
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
