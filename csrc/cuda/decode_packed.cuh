// One warp's attention over packed tokens: scores and sums of values in integers, weights in registers. Nothing but the
// softmax state and the sums outlives a tile.
//
//   scores [tokens, columns] = A (keys) . B (queries)   rows g and g + 8: two tokens of half block g; columns 2 r and
//                                                       2 r + 1: upper and lower bytes of the 16-bit query of row r
//   sums^T [dims, columns]   = A (values) . B (weights) k are tokens of block c in lane c; columns as above, of weights
//                                                       times scales, 15-bit integers
//
// So lane (g, c) does the softmax of row c for the 16 tokens of half block g, and both bytes of a sum are in one lane.
// Weights come to the lanes that feed them to the second product as a matrix of 16-bit elements, two bytes each, is
// transposed. With up to eight rows (OCT) columns are rows, and bytes are multiplied in turn:
//
//   scores^T [rows, tokens] = A (queries) . B (keys)    rows g: upper bytes, rows g + 8: lower ones; column g is of
//   half
//                                                       block g
//
// A lane then does the softmax of row g for block c, whose weights it feeds itself.
#pragma once

#include "decode_limbs.cuh"
#include "decode_mask.cuh"
#include "decode_tile.cuh"

namespace kvq {
namespace cuda {

constexpr int ROWS = 8;             // at most
constexpr float SLACK = 1.0f;       // how far, in log2, a score may pass the maximum of its row
constexpr float UNIT_SLACK = 1.5f;  // how far scales may pass the largest seen

// SUMMED: dims of the values that this warp sums.
template <int KBITS, int VBITS, int DIM, int VDIM, bool OCT, int SUMMED = VDIM>
struct PackedWarp {
  using L = TileLayout<KBITS, VBITS, DIM, VDIM>;
  using Places = TilePlaces<L>;
  using Q = QueryMap<DIM>;
  static constexpr int CHUNKS = SUMMED / 32, REST = SUMMED % 32 / 16, MTILES = SUMMED / 16, LIMBS = OCT ? 2 : 1;
  static constexpr int HALVES = OCT ? 2 : 1, TOKENS = HALVES * HALF_LEN;  // of a tile, whose softmax a lane does
  static constexpr int SUM_ROWS = OCT ? 2 : 1;                            // whose sums a lane has
  static constexpr int AT_ONCE = OCT ? 1 : 2;                             // tokens of a lane in one product of keys
  static constexpr bool ROOM = !OCT || DIM + VDIM <= 256;                 // for queries and addresses in registers

  // Of lane (g, c): the row whose softmax it does, the first token of a tile that it does, whether it is the first lane
  // of that row, row `i` of its sums.
  static __device__ __forceinline__ int row_of(int g, int c) { return OCT ? g : c; }
  static __device__ __forceinline__ int first_token(int g, int c) { return OCT ? c * BLOCK_LEN : g * HALF_LEN; }
  static __device__ __forceinline__ bool leads(int g, int c) { return (OCT ? c : g) == 0; }
  static __device__ __forceinline__ int sum_row(int i, int c) { return OCT ? 2 * c + i : c; }
  // Over the lanes of a row.
  template <class Join>
  static __device__ __forceinline__ float over_row(float x, Join join) {
#pragma unroll
    for (int step = OCT ? 1 : 4; step < (OCT ? 4 : 32); step *= 2) x = join(x, __shfl_xor_sync(~0u, x, step));
    return x;
  }
  static __device__ __forceinline__ float row_max(float x) {
    return over_row(x, [](float x, float y) { return fmaxf(x, y); });
  }
  static __device__ __forceinline__ float row_sum(float x) {
    return over_row(x, [](float x, float y) { return x + y; });
  }

  uint32_t query[L::WORDS][OCT ? 4 : 2];  // fragments of every step
  RowInfo row;
  float top, sum;  // maximum (log2) of the row; sum of its weights over this lane's tokens, in units of the integers
  float unit;      // values' scales are at most this
  float shift;     // bias - top + exponent_of_one()
  int out[LIMBS][MTILES][4];  // sums of integer weights times values' bytes
  uint32_t total[LIMBS];      // sums of the weights in column g of block c

  __device__ __forceinline__ void clear() {
    top = NO_SCORE, sum = 0, unit = 1e-30f, shift = 0;
#pragma unroll
    for (int l = 0; l < LIMBS; l++) {
      total[l] = 0;
#pragma unroll
      for (int m = 0; m < MTILES; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) out[l][m][i] = 0;
    }
  }

  // `bytes` [2 limbs][ROWS][ROW_BYTES], `info` [ROWS] in shared memory.
  __device__ __forceinline__ void load_queries(const char *bytes, const RowInfo *info, int g, int c) {
    row = info[row_of(g, c)];
    load_fragments(bytes, g, c);
  }
  __device__ __forceinline__ void load_fragments(const char *bytes, int g, int c) {
    constexpr int LOWER = ROWS * Q::ROW_BYTES;
    const char *from = bytes + 8 * c + (OCT ? g : g / 2 + g % 2 * ROWS) * Q::ROW_BYTES;
#pragma unroll
    for (int s = 0; s < L::WORDS; s++) {
      if constexpr (!ROOM) {  // word by word to where a product takes them: pairs would be copied for each of its uses
        auto word = [=](int at) { return *(const volatile uint32_t *)(from + 32 * s + at); };
        query[s][0] = word(0), query[s][1] = word(LOWER), query[s][2] = word(4), query[s][3] = word(LOWER + 4);
      } else {
        uint2 two = *(const uint2 *)(from + 32 * s);
        if constexpr (OCT) {
          uint2 lower = *(const uint2 *)(from + LOWER + 32 * s);
          query[s][0] = two.x, query[s][1] = lower.x, query[s][2] = two.y, query[s][3] = lower.y;
        } else {
          query[s][0] = two.x, query[s][1] = two.y;
        }
      }
    }
  }

  static __device__ __forceinline__ Planes<KBITS> key_planes(const uint32_t *sign, const uint32_t *mag, int word) {
    Planes<KBITS> p;
    p.sign = sign[word];
#pragma unroll
    for (int i = 0; i < KBITS - 1; i++) p.mag[i] = mag[i * L::WORDS + word];
    return p;
  }

  // Levels are half a step above their bytes.
  __device__ __forceinline__ void begin(int (&acc)[HALVES][4]) const {
#pragma unroll
    for (int k = 0; k < HALVES; k++)
#pragma unroll
      for (int i = 0; i < 4; i++) acc[k][i] = (OCT ? i / 2 : i % 2) ? row.half_sum : 0;
  }

  // One step of the products of AT_ONCE tokens' bytes with the queries.
  static __device__ __forceinline__ void multiply(int (&acc)[4], const uint32_t (&q)[OCT ? 4 : 2],
                                                  const uint32_t (&bytes)[AT_ONCE][2]) {
    if constexpr (OCT)
      mma_int8<false>(acc, q[0], q[1], q[2], q[3], bytes[0][0], bytes[0][1], acc);
    else
      mma_int8<false>(acc, bytes[0][0], bytes[1][0], bytes[0][1], bytes[1][1], q[0], q[1], acc);
  }

  // Scores of the tokens `first` and `second` of half block g, or of both halves of block c (OCT), still to be
  // multiplied by their scales and row.factor.
  __device__ __forceinline__ void multiply_keys(const uint32_t *tile, const Places &at, const ByteTable &table,
                                                int first, int second, int c, float (&x)[HALVES][2]) const {
    const uint32_t *sign[2] = {tile + at.key_sign + first * L::WORDS, tile + at.key_sign + second * L::WORDS};
    const uint32_t *mag[2] = {tile + at.key_mag + first * L::MAG_STRIDE, tile + at.key_mag + second * L::MAG_STRIDE};
    int acc[HALVES][4];
    begin(acc);
#pragma unroll
    for (int h = 0; h < HALVES; h++) multiply_words(acc[h], sign + h, mag + h, table, c);
    combine(acc, table, x);
  }

  // Of AT_ONCE tokens.
  __device__ __forceinline__ void multiply_words(int (&acc)[4], const uint32_t *const *sign, const uint32_t *const *mag,
                                                 const ByteTable &table, int c) const {
    uint32_t bytes[AT_ONCE][2];
#pragma unroll
    for (int quad = 0; quad < Q::QUADS; quad++) {
      Planes<KBITS> planes[AT_ONCE];
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++) planes[k] = key_planes(sign[k], mag[k], 4 * quad + c);
      multiply_planes(acc, planes, table, quad);
    }
#pragma unroll
    for (int word = 4 * Q::QUADS; word < L::WORDS; word++) {
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++) {
        Planes<KBITS> planes = key_planes(sign[k], mag[k], word);
        planes.bytes(table, planes.selector(c), c, bytes[k][0], bytes[k][1]);
      }
      multiply(acc, query[word], bytes);
    }
  }

  // Four steps, of a word of each plane of AT_ONCE tokens.
  __device__ __forceinline__ void multiply_planes(int (&acc)[4], const Planes<KBITS> (&planes)[AT_ONCE],
                                                  const ByteTable &table, int quad) const {
    Selectors s[AT_ONCE];
    uint32_t bytes[AT_ONCE][2];
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) s[k] = planes[k].selectors(table);
#pragma unroll
    for (int phase = 0; phase < 4; phase++) {
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++) planes[k].bytes(table, s[k].of_phase[phase], phase, bytes[k][0], bytes[k][1]);
      multiply(acc, query[4 * quad + phase], bytes);
    }
  }

  // Upper and lower bytes of two tokens together.
  static __device__ __forceinline__ void combine(const int (&acc)[HALVES][4], const ByteTable &table,
                                                 float (&x)[HALVES][2]) {
    int limb = (int)table.limb;
#pragma unroll
    for (int h = 0; h < HALVES; h++)
#pragma unroll
      for (int k = 0; k < 2; k++)
        x[h][k] = (float)(OCT ? limb * acc[k][h] + acc[k][2 + h] : limb * acc[0][2 * k] + acc[0][2 * k + 1]);
  }

  // Of this lane's tokens, still to be multiplied by row.factor.
  __device__ __forceinline__ void scores(const uint32_t *tile, const Places &at, const ByteTable &table, int c,
                                         float (&x)[TOKENS]) const {
    const uint4 *scales = (const uint4 *)(tile + at.key_scale);
#pragma unroll
    for (int i = 0; i < HALF_LEN / 2; i++) {
      float two[HALVES][2];
      multiply_keys(tile, at, table, 2 * i, 2 * i + 1, c, two);
#pragma unroll
      for (int h = 0; h < HALVES; h++) {
        uint4 four = scales[2 * h + i / 4];
        const uint32_t pairs[4] = {four.x, four.y, four.z, four.w};
        float2 scale = __half22float2(*(const __half2 *)&pairs[i % 4]);
        x[HALF_LEN * h + 2 * i] = two[h][0] * scale.x, x[HALF_LEN * h + 2 * i + 1] = two[h][1] * scale.y;
      }
    }
  }

  // Takes the tile's maximum and largest scale where they are higher, and scales what was summed before.
  __device__ __forceinline__ void raise(float most, float scale_top, int g, int c) {
    scale_top =
        __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(fmaxf(scale_top, 0))));  // in the order of integers
    float before = unit;
    if (scale_top > unit) unit = UNIT_SLACK * scale_top;
    most = fmaxf(row_max(most), top);
    float keep = fast_exp2(top - most) * (before / unit);
    bool empty = __all_sync(~0u, top == NO_SCORE);  // nothing has been summed
    top = most, sum *= keep, shift = row.bias - top + exponent_of_one();
    if (empty) return;
    // Of columns 2 c and 2 c + 1, and of column g.
    float keep0 = OCT ? __shfl_sync(~0u, keep, 8 * c) : keep, keep1 = OCT ? __shfl_sync(~0u, keep, 8 * c + 4) : keep;
    float keep_total = OCT ? keep : __shfl_sync(~0u, keep, g / 2);
#pragma unroll
    for (int l = 0; l < LIMBS; l++) {
      total[l] = __float2uint_rn((float)total[l] * keep_total);
#pragma unroll
      for (int m = 0; m < MTILES; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) out[l][m][i] = __float2int_rn((float)out[l][m][i] * (i % 2 ? keep1 : keep0));
    }
  }

  // Scores times `factor` plus `offset` to weights times scales, as bytes of B fragments: weight[.][phase] holds codes
  // n = 0 .. 3 and 4 .. 7.
  __device__ __forceinline__ void weights(const float (&x)[TOKENS], const uint32_t (&scale)[TOKENS / 2], float factor,
                                          float offset, uint32_t (&weight)[LIMBS][4][2]) {
    float y[TOKENS];
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) {
      float2 s = __half22float2(*(const __half2 *)&scale[i]);
      float p0 = fast_exp2(fmaf(x[2 * i], factor, offset)), p1 = fast_exp2(fmaf(x[2 * i + 1], factor, offset));
      sum += p0 + p1;
      y[2 * i] = fmaf(p0, s.x, WEIGHT_ZERO + fraction_of(2 * i, TOKENS));
      y[2 * i + 1] = fmaf(p1, s.y, WEIGHT_ZERO + fraction_of(2 * i + 1, TOKENS));
    }
#pragma unroll
    for (int phase = 0; phase < 4; phase++)
      if constexpr (OCT) {
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
          for (int l = 0; l < 2; l++) weight[l][phase][h] = four_bytes(y + 16 * h + phase, l);
      } else {  // what comes back has two tokens of both halves of a block
        uint32_t two = transposed(two_of_both(y[phase], y[phase + 4]));
        uint32_t more = transposed(two_of_both(y[phase + 8], y[phase + 12]));
        weight[0][phase][0] = permute_bytes(two, more, 0x5410u);
        weight[0][phase][1] = permute_bytes(two, more, 0x7632u);
      }
  }

  // The sums take in the values of 16 * PAIRS dims of block c, 2 * PAIRS words a lane.
  template <int PAIRS>
  __device__ __forceinline__ void add_values(const uint32_t *sign, const uint32_t *mag, const ByteTable &table,
                                             const uint32_t (&weight)[LIMBS][4][2], int first) {
    Planes<VBITS> planes[2 * PAIRS];
    Selectors s[2 * PAIRS];
#pragma unroll
    for (int plane = 0; plane < VBITS; plane++) {
      const uint32_t *from = plane ? mag + (plane - 1) * VDIM : sign;
      uint32_t words[4];
      if constexpr (PAIRS == 2)
        *(uint4 *)words = *(const uint4 *)from;
      else
        *(uint2 *)words = *(const uint2 *)from;
#pragma unroll
      for (int i = 0; i < 2 * PAIRS; i++) (plane ? planes[i].mag[plane ? plane - 1 : 0] : planes[i].sign) = words[i];
    }
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; i++) s[i] = planes[i].selectors(table);
#pragma unroll
    for (int phase = 0; phase < 4; phase++)
#pragma unroll
      for (int pair = 0; pair < PAIRS; pair++) {
        uint32_t x0, x1, y0, y1;
        const Selectors &first_of = s[2 * pair], &second = s[2 * pair + 1];
        planes[2 * pair].bytes(table, first_of.of_phase[phase], phase, x0, x1);
        planes[2 * pair + 1].bytes(table, second.of_phase[phase], phase, y0, y1);
#pragma unroll
        for (int l = 0; l < LIMBS; l++) {
          int (&to)[4] = out[l][first + pair];
          mma_int8<true>(to, x0, y0, x1, y1, weight[l][phase][0], weight[l][phase][1], to);
        }
      }
  }

  // `first` is the first dim.
  __device__ __forceinline__ void sum_values(const uint32_t *tile, const Places &at, const ByteTable &table, int g,
                                             const uint32_t (&weight)[LIMBS][4][2], int first = 0) {
    const uint32_t ones = 0x01010101u, *sign = tile + at.value_sign + first, *mag = tile + at.value_mag + first;
#pragma unroll
    for (int l = 0; l < LIMBS; l++)
#pragma unroll
      for (int phase = 0; phase < 4; phase++)
        total[l] = __dp4a(weight[l][phase][0], ones, __dp4a(weight[l][phase][1], ones, total[l]));
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++)
      add_values<2>(sign + 32 * chunk + 4 * g, mag + 32 * chunk + 4 * g, table, weight, 2 * chunk);
    if constexpr (REST > 0)
      add_values<1>(sign + 32 * CHUNKS + 2 * g, mag + 32 * CHUNKS + 2 * g, table, weight, 2 * CHUNKS);
  }

  // Half the sums of the integer weights of columns 2c and 2c + 1: levels are half a step above their bytes.
  __device__ __forceinline__ void halves(float (&half)[LIMBS][2], int c) const {
#pragma unroll
    for (int l = 0; l < LIMBS; l++) {
      uint32_t sum = total[l] + __shfl_xor_sync(~0u, total[l], 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      half[l][0] = 0.5f * (float)__shfl_sync(~0u, sum, 8 * c),
      half[l][1] = 0.5f * (float)__shfl_sync(~0u, sum, 8 * c + 4);
    }
  }

  // Sum of dim (m, j), see dim_of, of row sum_row(i), in units of the integers; `half` is what `halves` gave.
  __device__ __forceinline__ float sum_of(const float (&half)[LIMBS][2], int m, int j, int i) const {
    float upper = (float)out[0][m][2 * j + i] + half[0][i];
    float lower = (float)out[LIMBS - 1][m][2 * j + (OCT ? i : 1)] + half[LIMBS - 1][OCT ? i : 1];
    return 256 * upper + lower;
  }

  // The dim of out[.][m][2 * i ..] in lane g: dims lie as the words were read.
  static __device__ __forceinline__ int dim_of(int m, int i, int g) {
    return m / 2 < CHUNKS ? 32 * (m / 2) + 4 * g + 2 * (m % 2) + i : 32 * CHUNKS + 2 * g + i;
  }

  // Writes value(m, i) of out[.][m][2 * i ..] to its dims of a row.
  template <class Value>
  static __device__ __forceinline__ void store_column(float *row, Value value, int g) {
#pragma unroll
    for (int m = 0; m < MTILES; m++)
      if (m / 2 >= CHUNKS)
        *(float2 *)(row + dim_of(m, 0, g)) = make_float2(value(m, 0), value(m, 1));
      else if (m % 2 == 0)
        *(float4 *)(row + dim_of(m, 0, g)) = make_float4(value(m, 0), value(m, 1), value(m + 1, 0), value(m + 1, 1));
  }

  // What a weight of one is in units of the integers: its inverse and its logarithm.
  __device__ __forceinline__ float inverse_of_one() const { return fast_exp2(-WEIGHT_TOP_LOG2) * unit; }
  __device__ __forceinline__ float exponent_of_one() const { return WEIGHT_TOP_LOG2 - __log2f(unit); }

  // The values of a tile whose scores are x; `first` is its first token. Restricted: see restrict_scores.
  __device__ __forceinline__ void add_tile(const uint32_t *tile, const Places &at, const ByteTable &values,
                                           float (&x)[TOKENS], bool restricted, int first, int start, int stop,
                                           float softcap, const RowMask &mask, int g, int c) {
    uint32_t scale[TOKENS / 2];
    const uint4 *from = (const uint4 *)(tile + at.value_scale);
#pragma unroll
    for (int i = 0; i < TOKENS / 8; i++) {
      uint4 v = from[i];
      scale[4 * i] = v.x, scale[4 * i + 1] = v.y, scale[4 * i + 2] = v.z, scale[4 * i + 3] = v.w;
    }
    float factor = row.factor, bias = row.bias;
    if (__builtin_expect(restricted, 0)) {
      restrict_scores<1>(x, scale, factor, bias, first + first_token(g, c), start, stop, softcap, mask);
      factor = 1, bias = 0;
    }
    __half2 scale_top = *(const __half2 *)&scale[0];
#pragma unroll
    for (int i = 1; i < TOKENS / 2; i++) scale_top = __hmax2(scale_top, *(const __half2 *)&scale[i]);
    float most[4] = {x[0], x[1], x[2], x[3]};  // four chains
#pragma unroll
    for (int t = 4; t < TOKENS; t++) most[t % 4] = fmaxf(most[t % 4], x[t]);
    most[0] = fmaf(fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3])), factor, bias);
    float scale_most = fmaxf(__low2float(scale_top), __high2float(scale_top));
    if (__builtin_expect(__any_sync(~0u, most[0] > top + SLACK || scale_most > unit), 0))
      raise(most[0], scale_most, g, c);
    float offset = restricted ? exponent_of_one() - top : shift;  // large ones cancel first
    uint32_t weight[LIMBS][4][2];
    weights(x, scale, factor, offset, weight);
    sum_values(tile, at, values, g, weight);
  }
};

}  // namespace cuda
}  // namespace kvq
