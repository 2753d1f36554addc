// The shape of a CTA and its shared memory.
//
// A warp has 16 * ROW_TILES rows, TOKENS / TOKEN_WARPS tokens of each tile and VALUE_DIMS / DIM_WARPS dims of the sums.
// Warps that share rows and tokens compute the same scores; warps that share rows but not tokens keep a softmax each,
// and their sums are added at the end. PRECISE multiplies queries, exact keys and values, and weights as sums of two
// halves: for float32, which then keeps five digits.
#pragma once

#include "tiles.h"

namespace kvq {
namespace cuda {
namespace tiles {

template <int ROW_TILES_, int ROW_WARPS_, int TOKEN_WARPS_, int DIM_WARPS_, int TOKENS_, int VALUE_DIMS_,
          bool PRECISE_ = false>
struct Shape {
  static constexpr int ROW_TILES = ROW_TILES_, ROW_WARPS = ROW_WARPS_, TOKEN_WARPS = TOKEN_WARPS_,
                       DIM_WARPS = DIM_WARPS_;
  static constexpr int TOKENS = TOKENS_, VALUE_DIMS = VALUE_DIMS_;
  static constexpr bool PRECISE = PRECISE_;
  static constexpr int ROWS = 16 * ROW_TILES * ROW_WARPS, THREADS = 32 * ROW_WARPS * TOKEN_WARPS * DIM_WARPS;
  static constexpr int WARP_TOKENS = TOKENS / TOKEN_WARPS, WARP_DIMS = VALUE_DIMS / DIM_WARPS;
  static constexpr int TOKEN_TILES = WARP_TOKENS / 8,
                       STEPS = WARP_TOKENS / 16;        // of 8 columns; of 16 in the second product
  static constexpr int BLOCKS = THREADS > 128 ? 1 : 2;  // of a multiprocessor
  static constexpr int WEIGHT_PITCH = TOKENS + 4, SUM_PITCH = VALUE_DIMS + 4;  // of float32 rows
  static constexpr int BIAS_PITCH = TOKENS + 4, MASK_WORDS = TOKENS / 32;      // a row of the mask: float32, or bits
  static_assert(WARP_TOKENS % 16 == 0 && WARP_DIMS % 16 == 0 && TOKENS % BLOCK_LEN == 0, "whole products");
};

// What a CTA does.
struct Task {
  int b, h, row, rows;  // sequence, head, the first row within the head and their number
  int flat, index;      // flat row of the first; index of the task in the scratch
  int tile, end;        // the first tile and the one after the last, packed and exact ones counted apart
};

// CTAs of packed splits come first, those of exact ones fill the gaps they leave.
template <class S, bool PACKED>
__device__ __forceinline__ Task task_of(const Plan &plan) {
  const Attention &a = plan.a;
  int row_blocks = (int)a.row_blocks, blocks = (int)(a.batch * a.heads) * row_blocks,
      packed_splits = (int)a.packed_splits;
  int split = blockIdx.x / blocks, block = blockIdx.x % blocks, head = block / row_blocks;
  Task t;
  t.b = head / (int)a.heads, t.h = head % (int)a.heads, t.index = block * (packed_splits + (int)a.exact_splits) + split;
  t.row = block % row_blocks * (int)a.row_block;
  t.rows = min((int)a.row_block, (int)a.rows - t.row), t.flat = head * (int)a.rows + t.row;
  int first = PACKED ? (int)a.start / S::TOKENS : 0,
      last = PACKED ? plan.packed_tiles : plan.num_tiles - plan.packed_tiles;
  t.tile = first + (PACKED ? split : split - packed_splits) * plan.split_tiles;
  t.end = min(t.tile + plan.split_tiles, last);
  return t;
}

// What a row of the CTA needs in every tile.
struct RowFactors {
  float factor, bias;  // logit (times log2 e) = product * key scale * factor + bias
};

// Kinds of the mask from `first` on: those of `members` members and, of each, `count` blocks after block `from`.
struct MaskBlocks {
  int64_t first;
  int members, from, count;
};

// Offsets in bytes and pitches in halves, that of the queries' low parts in bytes.
struct Places {
  int query_pitch, low_pitch, value_pitch, exact_pitch;
  int queries, low, keys, values, weights, mask, words, value_words, tables, scales, factors, squares, offsets,
      mask_blocks, task, tiles, counts, sums, size;
};

inline int take(int &offset, int64_t bytes) {
  int here = offset;
  offset += (int)round_up(bytes, 16);
  return here;
}

template <class S, Mode MODE>
Places places_of(const Plan &plan) {
  const Attention &a = plan.a;
  Places at{};
  int end = 0, dims = (int)round_up(a.value_dim, 16), blocks = S::TOKENS / BLOCK_LEN;
  bool keys = MODE != SUMS, values = MODE != SCORES && !a.shared;
  at.query_pitch = plan.query_pad + 8, at.low_pitch = plan.query_pad + 16;
  at.value_pitch = S::TOKENS + 8, at.exact_pitch = dims + 8;
  if (keys) {
    at.queries = take(end, 2 * S::ROWS * at.query_pitch);
    if (!S::PRECISE) at.low = take(end, S::ROWS * at.low_pitch);
    at.keys = take(end, 2 * S::TOKENS * at.query_pitch);
  }
  if (values) {
    int packed = dims * at.value_pitch, exact = S::TOKENS * at.exact_pitch;
    at.values = take(end, 2 * (packed > exact ? packed : exact));
  }
  if (a.mask.data) at.mask = take(end, 4 * S::ROWS * (a.mask.boolean ? S::MASK_WORDS : S::BIAS_PITCH));
  if (MODE != ATTEND) at.weights = take(end, 4 * S::ROWS * S::WEIGHT_PITCH);
  if (keys) at.words = take(end, 4 * S::TOKENS * a.keys.bits * (plan.query_pad / WORD_BITS));
  if (values) at.value_words = take(end, 4 * blocks * a.values.bits * a.value_dim);
  at.tables = take(end, 32);
  at.scales = take(end, 8 * S::TOKENS);  // of keys, then of values
  at.factors = take(end, sizeof(RowFactors) * S::ROWS);
  at.squares = take(end, 4 * S::ROWS);
  at.offsets = take(end, 8 * S::ROWS);
  at.mask_blocks = take(end, sizeof(MaskBlocks));
  at.task = take(end, sizeof(Task));
  at.tiles = take(end, 4 * S::THREADS);
  at.counts = take(end, 4 * (S::THREADS / 32 + 1));
  at.sums = 8 * S::ROWS * S::TOKEN_WARPS;  // after the states of the warps; both take the place of all else at last
  int last = MODE == SCORES ? 0 : at.sums + 4 * S::ROWS * S::SUM_PITCH;
  at.size = end > last ? end : last;
  return at;
}

}  // namespace tiles
}  // namespace cuda
}  // namespace kvq
