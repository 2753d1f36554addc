// Scores of top_p_select: one value a row and column, and its place in an order of 1,024 bins.
//
// Bins are the upper ten bits of the ordered float16 code of a score, rounded down: scores of one bin differ by a
// sixteenth of their size at most, and every bin is a range [edge_of(bin), edge_of(bin + 1)).
#pragma once

#include "rows.cuh"
#include "sparse.h"

namespace kvq {
namespace cuda {

constexpr int NUM_BINS = 1024, BIN_SHIFT = 6, CODES = 1 << BIN_SHIFT;  // codes of float16 in a bin
constexpr float LEAST = -3.402823466e38f, LOG2_E = 1.44269504f;

// Where a row lies among [B, Hq, M], all of which are fewer than 2^31.
struct RowPlace {
  int b, hq, m;
  __device__ __forceinline__ RowPlace(int b, int hq, int m) : b(b), hq(hq), m(m) {}
  __device__ __forceinline__ RowPlace(const TopP &p, int flat)
      : b(flat / (int)p.queries / (int)p.query_heads),
        hq(flat / (int)p.queries % (int)p.query_heads),
        m(flat % (int)p.queries) {}
  __device__ __forceinline__ int flat(const TopP &p) const {
    return (b * (int)p.query_heads + hq) * (int)p.queries + m;
  }
};

// The rows of selection (b, k) of a call, of which `flat` counts all.
struct SelectionRows {
  int b, k, heads, queries;
  __device__ __forceinline__ SelectionRows(const TopP &p, int flat)
      : b(flat / (int)p.selection.selections),
        k(flat % (int)p.selection.selections),
        heads((int)p.query_heads / (int)p.selection.selections),
        queries((int)p.queries) {}
  __device__ __forceinline__ int count() const { return heads * queries; }
  __device__ __forceinline__ RowPlace row(int i) const { return RowPlace(b, k * heads + i % heads, i / heads); }
  template <class Use>
  __device__ __forceinline__ void each(Use use) const {
#pragma unroll 1
    for (int i = 0; i < count(); i++) use(row(i));
  }
};

// One row of scores, with its mask.
struct ScoreRow {
  const char *scores, *mask;
  const int32_t *candidates;
  int64_t mask_stride;
  int last_column;
  bool half, boolean;

  __device__ __forceinline__ ScoreRow(const TopP &p, const RowPlace &row) {
    scores = row_at(p.scores, row.b, row.hq, row.m), half = p.scores.dtype == FLOAT16;
    mask = nullptr, candidates = nullptr;
    if (!p.mask.data) return;
    boolean = p.mask.boolean, last_column = (int)p.mask_columns - 1;
    int64_t at = row.b * p.mask.stride[0] + row.hq * p.mask.stride[1] + row.m * p.mask.stride[2],
            size = boolean ? 1 : 4;
    mask = (const char *)p.mask.data + at * size, mask_stride = p.mask.stride[3] * size;
    int k = row.hq / ((int)p.query_heads / (int)p.selection.selections);
    if (p.candidates) candidates = p.candidates + row.b * p.candidate_stride[0] + k * p.candidate_stride[1];
  }

  // The score that counts: -inf where it is hidden, and never -0.
  __device__ __forceinline__ float masked(float score, int column) const {
    if (mask) {
      int token = candidates ? candidates[column] : column;
      const char *at = mask + max(min(token, last_column), 0) * mask_stride;
      score = !boolean ? score + *(const float *)at : *at ? score : -INFINITY;
    }
    return score + 0.0f;
  }
  __device__ __forceinline__ float operator[](int column) const {
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

// Whether a bin has scores from -65504 to 65504, not infinity and NaN.
__device__ __forceinline__ bool is_bin_of_numbers(int bin) {
  return bin >= (0xffff - 0xfbff) >> BIN_SHIFT && bin <= (0x8000 | 0x7bff) >> BIN_SHIFT;
}

// Integers in the order of scores, and back.
__device__ __forceinline__ uint32_t ordered_bits(float score) {
  uint32_t bits = __float_as_uint(score);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float score_of_bits(uint32_t ordered) {
  return __uint_as_float(ordered & 0x80000000u ? ordered ^ 0x80000000u : ~ordered);
}

// What is known of a row once its masses are: scores from `sure` on are kept, those from `edge` on if the rest of the
// mass, `need` times exp(base), is not reached by larger ones. Scores of 64 and more are at most base.
struct RowCut {
  float sure, edge, need, base, log_total;
};

}  // namespace cuda
}  // namespace kvq
