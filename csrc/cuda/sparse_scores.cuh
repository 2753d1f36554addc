// Scores of top_p_select: one value a row and column, and its place in an order of 1,024 bins.
//
// Bins are the upper ten bits of the ordered float16 code of a score, rounded down: scores of one bin differ by a sixteenth of
// their size at most, and every bin is a range [edge_of(bin), edge_of(bin + 1)).
#pragma once

#include "rows.cuh"
#include "sparse.h"

namespace kvq {
namespace cuda {

constexpr int NUM_BINS = 1024, BIN_SHIFT = 6;
constexpr float LEAST = -3.402823466e38f, LOG2_E = 1.44269504f;

// Of the selection (b, k) of a call: which rows it has.
struct SelectionRows {
  int64_t b, k, heads, rows;
  __device__ __forceinline__ SelectionRows(const TopP &p, int64_t flat)
      : b(flat / p.selection.selections), k(flat % p.selection.selections), heads(p.query_heads / p.selection.selections),
        rows(heads * p.queries) {}
  // Row r among all [B, Hq, M].
  __device__ __forceinline__ int64_t flat_row(const TopP &p, int64_t r) const {
    return (b * p.query_heads + k * heads) * p.queries + r;
  }
};

// One row of scores, with its mask.
struct ScoreRow {
  const char *scores, *mask;
  const int32_t *candidates;
  int64_t mask_stride, last_column;
  bool half, boolean;

  __device__ __forceinline__ ScoreRow(const TopP &p, int64_t flat_row) {
    int64_t m = flat_row % p.queries, flat = flat_row / p.queries, b = flat / p.query_heads, hq = flat % p.query_heads;
    int64_t k = hq / (p.query_heads / p.selection.selections);
    scores = row_at(p.scores, b, hq, m), half = p.scores.dtype == FLOAT16;
    candidates = p.candidates ? p.candidates + b * p.candidate_stride[0] + k * p.candidate_stride[1] : nullptr;
    boolean = p.mask.boolean, last_column = p.mask_columns - 1;
    int64_t at = b * p.mask.stride[0] + hq * p.mask.stride[1] + m * p.mask.stride[2], size = boolean ? 1 : 4;
    mask = p.mask.data ? (const char *)p.mask.data + at * size : nullptr, mask_stride = p.mask.stride[3] * size;
  }

  // The score that counts: -inf where it is hidden, and never -0.
  __device__ __forceinline__ float masked(float score, int64_t column) const {
    if (mask) {
      int64_t token = candidates ? candidates[column] : column;
      const char *at = mask + (token < 0 ? 0 : token > last_column ? last_column : token) * mask_stride;
      score = !boolean ? score + *(const float *)at : *at ? score : -INFINITY;
    }
    return score + 0.0f;
  }
  __device__ __forceinline__ float operator[](int64_t column) const {
    return masked(half ? __half2float(((const __half *)scores)[column]) : ((const float *)scores)[column], column);
  }
};

// Kept whatever the share: NaN and +inf.
__device__ __forceinline__ bool is_unknown(float score) { return !(score < INFINITY); }

__device__ __forceinline__ int bin_of(float score) {
  uint32_t bits = __half_as_ushort(__float2half_rd(score));
  return (int)((bits & 0x8000 ? ~bits & 0xffff : bits | 0x8000) >> BIN_SHIFT);
}
// The least score of a bin, which is above all of the bin before.
__device__ __forceinline__ float edge_of(int bin) {
  uint32_t code = (uint32_t)bin << BIN_SHIFT, bits = code & 0x8000 ? code ^ 0x8000 : ~code & 0xffff;
  float edge = __half2float(__ushort_as_half((unsigned short)bits));
  return bin >= NUM_BINS || !(edge < INFINITY) ? INFINITY : edge > LEAST ? edge + 0.0f : LEAST;
}

// Integers in the order of scores, and back.
__device__ __forceinline__ uint32_t ordered_bits(float score) {
  uint32_t bits = __float_as_uint(score);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// What is known of a row once its masses are: scores from `sure` on are kept, those from `edge` on if the rest of the mass,
// `need` times exp(base), is not reached by larger ones.
struct RowCut {
  float sure, edge, need, base, log_total;
};

}  // namespace cuda
}  // namespace kvq
