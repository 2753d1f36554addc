// The arguments of every operator as plain structs, the same for every device. No torch, no std.
//
// Rows: the G query heads of one key/value head and their M tokens are R = G * M rows that share every unpacked tile.
// Flat row f = (b * H + h) * R + g * M + m counts them all. A tile is 32 tokens (or rows) wide everywhere, because 32
// tokens are one word of values and one or two vectors of any instruction set.
#pragma once

#include <stdint.h>

#include "kvq/layout.h"

namespace kvq {

constexpr int TILE = 32;
static_assert(TILE == BLOCK_LEN && TILE == WORD_BITS, "tiles, blocks and words are one size");

constexpr int MAX_LEADING = 15;  // dims of rotate's vectors before the last

enum Dtype { FLOAT32, BFLOAT16, FLOAT16 };

struct Rotation {
  int dim, rounds;
  const float *signs;   // [rounds, D]
  const float *blocks;  // [D/4, 4, 4] or null
  const float *matrix;  // [D, D] or null
};

// One packed store. Strides are in elements; the last dim is contiguous.
struct Store {
  int dim, bits;
  uint32_t *sign, *mag;
  uint16_t *scale;
  int64_t sign_stride[3];         // batch, head, token or block
  int64_t mag_stride[4];          // batch, head, token or block, plane
  int64_t scale_stride[2];        // batch, head
  float levels[MAX_LEVELS];       // on the CPU only
  const float *level_data;        // the same, on the device
  const float *centre, *balance;  // [D] at [batch, head], null if absent
  int64_t centre_stride[2], balance_stride[2];
  Rotation rotation;
};

// rotate: `count` vectors, counted row-major over the leading dims.
struct Vectors {
  Rotation rotation;
  bool inverse;
  int64_t count;
  int leading;
  int64_t size[MAX_LEADING], x_stride[MAX_LEADING], out_stride[MAX_LEADING];
  const char *x;
  char *out;
  Dtype x_dtype, out_dtype;
};

// A dense [B, H, N, D] tensor with a contiguous last dim.
struct Dense {
  char *data;
  Dtype dtype;
  int64_t stride[3];  // batch, head, token
};

struct Mask {
  const void *data;  // null if absent
  bool boolean;
  int64_t stride[4];
};

// attend, qk and pv. Split s of a block of rows answers for packed tokens s * split_len .. (s+1) * split_len if s is
// below packed_splits, else for exact tokens counted the same way. The sizes depend on shapes alone, never on the
// number of threads, so that the results do not either.
struct Attention {
  Store keys, values;  // values unused when shared
  bool shared;         // the values are the keys (MLA)
  Dense q, p, exact_keys, exact_values, out;
  float *lse;
  int64_t lse_stride[3];
  Mask mask;
  const float *sink_logits;
  bool normalise;  // finish divides by the softmax sum and writes lse
  int64_t batch, heads, group, queries, rows;
  int64_t start, length, num_sinks, exact_len;
  int dim, value_dim, dim_pad, value_pad;  // padded to the tile
  float scale, softcap;
  int64_t row_block, row_blocks, split_len, packed_splits, exact_splits;
  // Scratch of the call. A task is (b, h, block of rows, split).
  float *query;    // [flat rows, dim_pad] q as float32
  float *rotated;  // R (q * balance), [dim_pad / 32, rows, 32] for each block of rows
  float *bias;     // [flat rows] q . centre
  float *partial;  // [tasks, row_block, value_pad] sums of weights times values, packed ones before R^T
  float *state;    // [tasks, row_block, 2] maximum of the logits, sum of the weights
};

// encode and decode: tokens start .. start + tokens of a store and their dense vectors x.
struct Coding {
  Store store;
  bool along_tokens;
  Dense x;
  int64_t batch, heads, start, tokens;
  int64_t blocks;  // of the store's 32-token blocks, those that hold one of these tokens
  int rule;        // ScaleRule of encode
};

// merge: outs [P, B, H, M, D] and lses [P, B, H, M].
struct Pieces {
  int64_t pieces, batch, heads, queries;
  int dim;
  const char *outs;
  Dtype outs_dtype;
  int64_t outs_stride[4];
  const float *lses;
  int64_t lses_stride[4];
  Dense out;
  float *lse;
  int64_t lse_stride[3];
};

}  // namespace kvq
