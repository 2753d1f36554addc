// The arguments of the operators of sparse attention as plain structs, the same for every device. No torch, no std.
#pragma once

#include "structs.h"

namespace kvq {

constexpr int QUERY_BITS = 4;

// Vectors [D] a key/value head, null if absent.
struct HeadVectors {
  const float *data;
  int64_t stride[2];  // batch, head
};

// Coded queries: planes [B, Hq, M, 4, W] and terms [B, Hq, M, 4], contiguous in the last dim.
struct QueryCode {
  uint32_t *planes;
  int64_t plane_stride[4];  // batch, head, token, plane
  float *terms;
  int64_t term_stride[3];  // batch, head, token
};

// quantise_query: q [B, Hq, M, D] to its code; a key/value head has `group` query heads.
struct QueryCoding {
  Dense q;
  HeadVectors query_centre, centre, balance;
  Rotation rotation;
  float scale;
  QueryCode code;
  int64_t batch, heads, group, queries;
  int dim;
};

// One-bit index of keys: sign [B, H, C, W], factor and bias [B, H, C] float16. Null: absent.
struct SignIndex {
  uint32_t *sign;
  int64_t sign_stride[3];  // batch, head, token
  uint16_t *factor, *bias;
  int64_t factor_stride[2], bias_stride[2];  // batch, head
};

// index_keys: x [B, H, N, D] to tokens start .. start + N of the index.
struct Indexing {
  Dense x;
  HeadVectors query_centre, centre, balance;
  Rotation rotation;
  SignIndex index;
  int64_t batch, heads, start, tokens;
  int64_t blocks;  // of 32 tokens of the index, those that hold one of these tokens
  int dim;
};

// sign_scores: out [B, Hq, M, N] of tokens start .. start + N.
struct SignScan {
  QueryCode code;
  SignIndex index;
  Dense out;  // float32 or float16
  float scale;
  int64_t batch, heads, group, queries, start, tokens;
  int dim;
};

// indices [B, K, S] and count [B, K]; K divides the query heads and is a multiple of the key/value heads.
struct Selection {
  int32_t *indices, *count;
  int64_t index_stride[2];  // batch, selection
  int64_t count_stride;     // batch
  int64_t selections, capacity;
};

// top_p_select: `columns` scores a row, rows [B, Hq, M]; candidates [B, K, columns] null if absent.
struct TopP {
  Dense scores;  // float32 or float16
  const float *exact_lse;
  int64_t lse_stride[3];
  Mask mask;
  int64_t mask_columns;
  const int32_t *candidates;
  int64_t candidate_stride[2];  // batch, selection
  float top_p;
  Selection selection;
  int64_t batch, query_heads, queries, columns;
};

// attend_selected and qk_selected: from one dense tensor [B, H, C, D] or from a store packed along D, both of `tokens`.
struct Selected {
  Attention attention;  // queries, sizes, mask and outputs; exact_keys and exact_values, or keys and values
  bool packed_keys, packed_values;
  int64_t tokens;  // that an index may name
  Selection selection;
};

// gather_selected: rows of x [B, H, C, D] to out [B, K, S, D]; strides in bytes.
struct Gathering {
  const char *x;
  char *out;
  int64_t x_stride[3], out_stride[3], row_bytes, batch, heads, tokens;
  Selection selection;
};

}  // namespace kvq
