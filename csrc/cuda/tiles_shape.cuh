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
  // Of the mask of a tile, in elements of that many bytes: halves if it is bool.
  static __host__ __device__ constexpr int mask_pitch(int bytes) { return TOKENS + 16 / bytes; }
  static_assert(WARP_TOKENS % 16 == 0 && WARP_DIMS % 16 == 0 && TOKENS % BLOCK_LEN == 0, "whole products");
};

// What a row of the CTA needs in every tile.
struct RowFactors {
  float factor, bias;  // logit (times log2 e) = product * key scale * factor + bias
};

// Kinds of the mask from `first` on: those of `members` members and, of each, `count` blocks after block `from`.
struct MaskBlocks {
  int64_t first;
  int members, from, count;
};

// Offsets in bytes and pitches in halves.
struct Places {
  int query_pitch, value_pitch, exact_pitch;
  int queries, keys, values, weights, bias, words, value_words, tables, scales, factors, norms, offsets, mask_blocks,
      tiles, counts, sums, size;
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
  at.query_pitch = plan.query_pad + 8, at.value_pitch = S::TOKENS + 8, at.exact_pitch = dims + 8;
  if (keys) {
    at.queries = take(end, 2 * S::ROWS * at.query_pitch);
    at.keys = take(end, 2 * S::TOKENS * at.query_pitch);
  }
  if (values) {
    int packed = dims * at.value_pitch, exact = S::TOKENS * at.exact_pitch;
    at.values = take(end, 2 * (packed > exact ? packed : exact));
  }
  int element = a.mask.boolean ? 2 : 4;
  if (a.mask.data) at.bias = take(end, element * S::ROWS * S::mask_pitch(element));
  if (MODE != ATTEND) at.weights = take(end, 4 * S::ROWS * S::WEIGHT_PITCH);
  if (keys) at.words = take(end, 4 * S::TOKENS * a.keys.bits * (plan.query_pad / WORD_BITS));
  if (values) at.value_words = take(end, 4 * blocks * a.values.bits * a.value_dim);
  at.tables = take(end, 32);
  at.scales = take(end, 8 * S::TOKENS);  // of keys, then of values
  at.factors = take(end, sizeof(RowFactors) * S::ROWS);
  at.norms = take(end, 4 * S::ROWS);
  at.offsets = take(end, 8 * S::ROWS);
  at.mask_blocks = take(end, sizeof(MaskBlocks));
  at.tiles = take(end, 4 * S::THREADS);
  at.counts = take(end, S::THREADS / 8);
  at.sums = 8 * S::ROWS * S::TOKEN_WARPS;  // after the states of the warps; both take the place of all else at last
  int last = MODE == SCORES ? 0 : at.sums + 4 * S::ROWS * S::SUM_PITCH;
  at.size = end > last ? end : last;
  return at;
}

}  // namespace tiles
}  // namespace cuda
}  // namespace kvq
