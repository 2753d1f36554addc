// The two products of a warp on a tile in shared memory, m16n8k16 in halves with float32 sums. Lane = 4 g + c.
//
//   scores [rows, tokens] += queries [rows, dims] . keys [tokens, dims]^T
//   sums   [rows, dims]   += weights [rows, tokens] . values, which lie as [dims, tokens] or as [tokens, dims]
//
// Element i of a tile of scores or sums is row g + 8 (i / 2), column 2 c + i % 2; two tiles of scores side by side are
// one A fragment of weights.
#pragma once

#include "tiles_asm.cuh"
#include "tiles_shape.cuh"

namespace kvq {
namespace cuda {
namespace tiles {

// B fragments of columns n .. n + 15 (b[0], b[1] the first eight) and k .. k + 15, from rows of columns.
__device__ __forceinline__ void load_columns(uint32_t (&b)[4], const __half *x, int pitch, int n, int k, int lane) {
  load_straight(b, x + (n + (lane & 7) + 8 * (lane >> 4)) * pitch + k + 8 * (lane >> 3 & 1));
}
// The same from rows of k.
__device__ __forceinline__ void load_rows(uint32_t (&b)[4], const __half *x, int pitch, int n, int k, int lane) {
  load_transposed(b, x + (k + (lane & 15)) * pitch + n + 8 * (lane >> 4));
}

// Products of 16 dims: fragments of the queries, of their low parts with LOW, and keys of k .. k + 15.
template <class S, bool LOW>
__device__ __forceinline__ void multiply_keys(float (&x)[S::ROW_TILES][S::TOKEN_TILES][4],
                                              const uint32_t (&a)[S::ROW_TILES][4],
                                              const uint32_t (&low)[S::ROW_TILES][4], const __half *keys, int pitch,
                                              int k, int lane) {
#pragma unroll
  for (int n = 0; n < S::TOKEN_TILES; n += 2) {
    uint32_t b[4];
    load_columns(b, keys, pitch, 8 * n, k, lane);
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; m++) {
      mma_half<__half>(x[m][n], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
      mma_half<__half>(x[m][n + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
      if constexpr (LOW) {
        mma_half<__half>(x[m][n], low[m][0], low[m][1], low[m][2], low[m][3], b[0], b[1]);
        mma_half<__half>(x[m][n + 1], low[m][0], low[m][1], low[m][2], low[m][3], b[2], b[3]);
      }
    }
  }
}

// `queries`, their low parts `low` (the upper bytes of halves, at low_place) and `keys` are at the first row and token
// of the warp.
template <class S, bool LOW>
__device__ __forceinline__ void add_scores(float (&x)[S::ROW_TILES][S::TOKEN_TILES][4], const __half *queries,
                                           const char *low, const __half *keys, int pitch, int low_pitch, int pad,
                                           int lane) {
#pragma unroll(LOW ? 1 : 2)
  for (int k = 0; k < pad; k += 16) {
    uint32_t a[S::ROW_TILES][4], rest[S::ROW_TILES][4];
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; m++) {
      load_straight(a[m], queries + (16 * m + (lane & 15)) * pitch + k + 8 * (lane >> 4));
      if constexpr (LOW)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          uint32_t bytes = *(const uint32_t *)(low + (16 * m + 8 * i + lane / 4) * low_pitch + k + 4 * (lane % 4));
          rest[m][i] = permute_bytes(bytes, 0, 0x1404u), rest[m][2 + i] = permute_bytes(bytes, 0, 0x3424u);
        }
    }
    multiply_keys<S, LOW>(x, a, rest, keys, pitch, k, lane);
  }
}

// The products with low parts that are whole halves, [rows left, pad] in global memory; rows beyond repeat the last
// one.
template <class S>
__device__ __forceinline__ void add_low_scores(float (&x)[S::ROW_TILES][S::TOKEN_TILES][4], const __half *queries,
                                               int left, const __half *keys, int pitch, int pad, int lane) {
  const uint32_t *row[S::ROW_TILES][2];
#pragma unroll
  for (int m = 0; m < S::ROW_TILES; m++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int r = 16 * m + 8 * i + lane / 4;
      row[m][i] = (const uint32_t *)(queries + (int64_t)(r < left ? r : left - 1) * pad) + lane % 4;
    }
#pragma unroll 1
  for (int k = 0; k < pad; k += 16) {
    uint32_t a[S::ROW_TILES][4];
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) a[m][i] = __ldg(row[m][i % 2] + k / 2 + 4 * (i / 2));
    multiply_keys<S, false>(x, a, a, keys, pitch, k, lane);
  }
}

// `values` are at the first token and dim of the warp, of which `dims` count.
template <class S, bool TRANSPOSED>
__device__ __forceinline__ void add_values(float (&sums)[S::ROW_TILES][S::WARP_DIMS / 8][4],
                                           const uint32_t (&weights)[S::ROW_TILES][S::STEPS][4], const __half *values,
                                           int pitch, int dims, int lane) {
#pragma unroll
  for (int step = 0; step < S::STEPS; step++)
#pragma unroll
    for (int n = 0; n < S::WARP_DIMS / 8; n += 2) {
      if (8 * n >= dims) continue;
      uint32_t b[4];
      if (TRANSPOSED)
        load_columns(b, values, pitch, 8 * n, 16 * step, lane);
      else
        load_rows(b, values, pitch, 8 * n, 16 * step, lane);
#pragma unroll
      for (int m = 0; m < S::ROW_TILES; m++) {
        const uint32_t (&w)[4] = weights[m][step];
        mma_half<__half>(sums[m][n], w[0], w[1], w[2], w[3], b[0], b[1]);
        mma_half<__half>(sums[m][n + 1], w[0], w[1], w[2], w[3], b[2], b[3]);
      }
    }
}

}  // namespace tiles
}  // namespace cuda
}  // namespace kvq
