// Attention over selected tokens of packed keys and values on tensor cores.
//
// The words of a token come to shared memory as rows of dense tokens do (sparse_gather.cuh) and unfold there to halves,
// in steps of the codebook, which are exact. Coordinates of a word lie in places (tiles.h). Queries are turned to where
// keys are and split into two halves; scales of keys join the scores, those of values the weights, relative to the
// first token's.
#pragma once

#include "sparse_any.cuh"
#include "sparse_gather.cuh"
#include "tiles_codes.cuh"

namespace kvq {
namespace cuda {

template <int BITS, int DIM>
struct PackedShape {
  static constexpr int WORDS = DIM / WORD_BITS, STAGES = 4, CTAS = DIM <= 128 ? 3 : 1;
  static constexpr int SIDE = GATHER_STEP * BITS * WORDS, SCALES = 2 * SIDE;  // words of keys, then of values
  static constexpr int TOKENS = SCALES + 2 * GATHER_STEP, STAGE = TOKENS + GATHER_STEP;
  static constexpr int ROW = GatherShape<DIM>::ROW, TILE = GATHER_STEP * ROW / 2;  // words
  static constexpr int WARP_WORDS = TILE + STAGES * STAGE;
  static constexpr int QUERY_WORDS = (ITEM_ROWS + ANY_WARPS) * DIM + ITEM_ROWS, FRAGMENT_WORDS = DIM / 16 * WARP * 4;
  static constexpr int BYTES = 4 * (GATHER_WARPS * WARP_WORDS + QUERY_WORDS + FRAGMENT_WORDS);
  static_assert(4 * GATHER_WARPS * WARP_WORDS >= GatherShape<DIM>::SUMS_BYTES, "partial sums of warps fit");
  static_assert(STAGE % 4 == 0 && TILE % 4 == 0 && SIDE % 4 == 0, "words are copied in units of 16 bytes");
};

template <int BITS, int DIMS>
struct PackedWarp {
  static constexpr int DIM = DIMS, STEPS = DIM / 16;
  using S = PackedShape<BITS, DIM>;

  const Selected &s;
  __half *tile;
  uint32_t *stages;
  tiles::HalfTable key_table, value_table;
  const int32_t *indices;
  int b, h, count, lane;
  float key_step, value_step, bias, unit;  // of values: scale of the first token
  RowSums<__half, DIM> result;
  uint4 *fragments;  // [STEPS, lane]: upper and lower halves of queries, in shared memory as registers are few

  __device__ __forceinline__ PackedWarp(const Selected &s, char *shared, int warp, int lane) : s(s), lane(lane) {
    tile = (__half *)((uint32_t *)shared + warp * S::WARP_WORDS), stages = (uint32_t *)tile + S::TILE;
    fragments = (uint4 *)((uint32_t *)shared + GATHER_WARPS * S::WARP_WORDS + S::QUERY_WORDS);
    const Attention &a = s.attention;
    key_table = tiles::half_table(a.keys), value_table = tiles::half_table(a.values);
    key_step = tiles::step_of(a.keys), value_step = tiles::step_of(a.values);
  }

  // By all warps of the block.
  __device__ __forceinline__ void begin(const Work &w, int item) {
    ItemPlace place(w, item);
    b = place.b, h = place.kv_head(s.attention, w), count = w.count_of(item), result.clear();
    indices = s.selection.indices + place.b * s.selection.index_stride[0] + place.k * s.selection.index_stride[1];
    AnyBlock turned(s, (float *)fragments - S::QUERY_WORDS);
    turned.load_queries(w, item, keys_of(s, b, h));
    __syncthreads();
    int g = lane >> 2, c = lane & 3;
    const float *row = turned.queries + g * DIM;
    bias = turned.bias[g] * s.attention.scale;
    for (int i = turned.warp; i < STEPS; i += GATHER_WARPS) {
      uint32_t upper[2], lower[2];
#pragma unroll
      for (int j = 0; j < 2; j++) {
        int at = 16 * i + 8 * j + 2 * c;
        float x = row[tiles::code_of(at)], y = row[tiles::code_of(at + 1)];
        upper[j] = pair_of<__half>(x, y);
        float2 rounded = floats_of_pair<__half>(upper[j]);
        lower[j] = pair_of<__half>(x - rounded.x, y - rounded.y);
      }
      fragments[i * WARP + lane] = make_uint4(upper[0], upper[1], lower[0], lower[1]);
    }
    __syncthreads();
    unit = count > 0 ? __half2float(((const __half *)scales_at(s.attention.values, b, h))[first_token()]) : 1;
    unit = unit > 0 ? unit : 1;
  }

  __device__ __forceinline__ int first_token() const {
    return (int)min((uint32_t)*(indices), (uint32_t)(s.tokens - 1));
  }
  __device__ __forceinline__ int token_at(int at) const {
    at += lane % GATHER_STEP;
    return at < count ? (int)min((uint32_t)*(indices + at), (uint32_t)(s.tokens - 1)) : -1;
  }

  // Starts copies of a store's words of 16 tokens: signs [token, W], then magnitudes [token, planes, W]; missing ones
  // stay.
  __device__ __forceinline__ void start_words(const Store &store, uint32_t *to, int token) const {
    constexpr int UNITS = BITS * S::WORDS * 4 % 16 ? 1 : 4, SIGN_UNITS = S::WORDS / UNITS, ALL = BITS * SIGN_UNITS;
    const uint32_t *sign = store.sign + b * store.sign_stride[0] + h * store.sign_stride[1];
    const uint32_t *mag = store.mag + b * store.mag_stride[0] + h * store.mag_stride[1];
    for (int first = 0; first < GATHER_STEP * ALL; first += WARP) {
      int i = first + lane, row = i / ALL, unit = i % ALL * UNITS,
          from = __shfl_sync(ALL_LANES, token, row % GATHER_STEP);
      bool is_sign = unit < S::WORDS;
      const uint32_t *source =
          is_sign ? sign + from * store.sign_stride[2] + unit : mag + from * store.mag_stride[2] + unit - S::WORDS;
      uint32_t *place =
          is_sign ? to + row * S::WORDS + unit : to + (GATHER_STEP + row * (BITS - 1)) * S::WORDS + unit - S::WORDS;
      if (from >= 0 && row < GATHER_STEP) copy_async<4 * UNITS>(place, source);
    }
  }

  __device__ __forceinline__ void start(int stage, int token) const {
    uint32_t *to = stages + stage * S::STAGE;
    const Store &keys = s.attention.keys, &values = s.attention.values;
    start_words(keys, to, token);
    start_words(values, to + S::SIDE, token);
    const uint16_t *scales = scales_at(lane < GATHER_STEP ? keys : values, b, h);
    if (token >= 0)  // the word that holds the scale
      copy_async<4>(to + S::SCALES + lane, (const uint32_t *)scales + token / 2);
    if (lane < GATHER_STEP) ((int *)to)[S::TOKENS + lane] = token;
  }

  __device__ __forceinline__ void unfold(const uint32_t *words, const uint32_t *tokens,
                                         const tiles::HalfTable &table) const {
    const uint32_t *mag = words + GATHER_STEP * S::WORDS;
    for (int i = lane; i < GATHER_STEP * S::WORDS; i += WARP) {
      int row = i % GATHER_STEP, word = i / GATHER_STEP;
      __half *to = tile + row * S::ROW + word * WORD_BITS;
      if ((int)tokens[row] >= 0)
        tiles::unfold_word<BITS>(words + row * S::WORDS + word, mag + row * (BITS - 1) * S::WORDS + word, S::WORDS,
                                 table, to);
      else
        for (int j = 0; j < 4; j++) ((uint4 *)to)[j] = make_uint4(0, 0, 0, 0);
    }
  }

  static __device__ __forceinline__ float scale_in(uint32_t word, int token) {
    return __half2float(__ushort_as_half((unsigned short)(word >> (16 * (token & 1)))));
  }

  __device__ __forceinline__ void step(int stage, const TokenMask &mask) {
    const uint32_t *words = stages + stage * S::STAGE, *tokens = words + S::TOKENS;
    float x[2][4] = {}, by[4];
    unfold(words, tokens, key_table);
    __syncwarp();
    result.each_keys(tile, lane, [&](int i, const uint32_t (&k)[4]) {
      uint4 query = fragments[i * WARP + lane];
      result.multiply(x, make_uint2(query.x, query.y), k), result.multiply(x, make_uint2(query.z, query.w), k);
    });
    __syncwarp();  // before values take the place of keys
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int row = 8 * (i / 2) + 2 * (lane & 3) + i % 2, token = (int)tokens[row];
      float &y = x[i / 2][i % 2];
      float score = fmaf(y, key_step * scale_in(words[S::SCALES + row], token) * s.attention.scale, bias);
      y = token < 0 ? -INFINITY : mask.add(capped(score, s.attention.softcap) * LOG2_OF_E, token);
      by[i] = token < 0 ? 0 : scale_in(words[S::SCALES + GATHER_STEP + row], token) / unit;
    }
    unfold(words + S::SIDE, tokens, value_table);
    __syncwarp();
    result.add(x, by, tile, lane);
  }

  __device__ __forceinline__ void store(float *sums, float2 *state, int warp) const {
    result.store(sums, state, warp, lane, unit * value_step, [](int place) { return tiles::code_of(place); });
  }
};

}  // namespace cuda
}  // namespace kvq
