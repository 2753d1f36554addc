// One warp's attention over packed tokens: scores and sums of values in integers, weights in registers. Nothing but the
// softmax state and the sums outlives a tile.
//
//   scores^T [rows, tokens] = A (queries) . B (keys)   rows g: upper byte of a 16-bit query, rows g + 8: its lower one;
//                                                      column g is token 2i + g % 2 of block g / 2
//   sums^T [dims, columns]  = A (values) . B (weights) k are tokens of block c in lane c
//
// The column of a score in lane (g, c) is a token of block c, so the lane that computes a weight is the one that feeds
// it to the second product. Weights times scales are 15-bit integers, again multiplied byte by byte. With at most four
// rows a row is held twice (rows g and g + 4): columns 0 .. 3 of the sums belong to upper bytes and 4 .. 7 to lower
// ones; of the softmax each of the two lanes does one half of a block, and they exchange bytes. With up to eight rows
// (OCT) upper and lower bytes are multiplied in turn.
#pragma once

#include "decode_mask.cuh"
#include "decode_tile.cuh"

namespace kvq {
namespace cuda {

constexpr int ROWS = 8;                    // of one A fragment
constexpr float QUERY_TOP = 32512.0f;      // of a 16-bit query: 127 * 256
constexpr float WEIGHT_TOP_LOG2 = 13.99f;  // of a weight at the maximum when it was taken: just below 2 ** 14
constexpr float SLACK = 1.0f;              // how far, in log2, a score may pass that maximum
constexpr float UNIT_SLACK = 1.5f;         // how far scales may pass the largest seen

// Step and place of query coordinate d among the bytes of a row: [step][lane c][8 codes n].
template <int DIM>
struct QueryMap {
  static constexpr int WORDS = (DIM + 31) / 32, QUADS = WORDS / 4, ROW_BYTES = 32 * WORDS;
  static __host__ __device__ constexpr int byte_of(int d) {
    int word = d / 32, n = d % 32 / 4, phase = d % 4;
    int step = word < 4 * QUADS ? 4 * (word / 4) + phase : word, c = word < 4 * QUADS ? word % 4 : phase;
    return 32 * step + 8 * c + n;
  }
};

// What a row of queries is besides its bytes: factor of the integer scores, q . centre (both times log2 e), half the
// sum of its integers.
struct RowInfo {
  float factor, bias;
  int half_sum;
};

// Fractions that are added before a weight is cut to an integer, spread evenly over `count` tokens, so that
// weights below one unit are lost on none but counted on some: sums stay unbiased.
__host__ __device__ constexpr float fraction_of(int token, int count) {
  return ((float)(token * 11 % count) + 0.5f) / (float)count;
}

// SUMMED: dims of the values that this warp sums.
template <int KBITS, int VBITS, int DIM, int VDIM, bool OCT, int SUMMED = VDIM>
struct PackedWarp {
  using L = TileLayout<KBITS, VBITS, DIM, VDIM>;
  using Places = TilePlaces<L>;
  using Q = QueryMap<DIM>;
  static constexpr int CHUNKS = SUMMED / 32, REST = SUMMED % 32 / 16, MTILES = SUMMED / 16, LIMBS = OCT ? 2 : 1;
  static constexpr int TOKENS = OCT ? BLOCK_LEN : BLOCK_LEN / 2;  // of a block, whose softmax a lane does

  uint32_t query[L::WORDS][4];  // A fragments of every step
  RowInfo row;
  float top, sum;  // maximum (log2) of row g; sum of its weights over this lane's tokens, in units of the integers
  float unit;      // values' scales are at most this
  float shift;     // bias - top + exponent_of_one()
  int out[LIMBS][MTILES][4];  // sums of integer weights times values' bytes
  uint32_t total[LIMBS];      // sums of row g's integer weights of block c

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
    int place = OCT ? g : g & 3;
    row = info[place];
#pragma unroll
    for (int s = 0; s < L::WORDS; s++) {
      int at = place * Q::ROW_BYTES + 32 * s + 8 * c;
      uint2 upper = *(const uint2 *)(bytes + at), lower = *(const uint2 *)(bytes + ROWS * Q::ROW_BYTES + at);
      query[s][0] = upper.x, query[s][1] = lower.x, query[s][2] = upper.y, query[s][3] = lower.y;
    }
  }

  static __device__ __forceinline__ Planes<KBITS> key_planes(const uint32_t *sign, const uint32_t *mag, int word) {
    Planes<KBITS> p;
    p.sign = sign[word];
#pragma unroll
    for (int i = 0; i < KBITS - 1; i++) p.mag[i] = mag[i * L::WORDS + word];
    return p;
  }

  // Integer scores of the tokens 2i and 2i + 1 of every block: upper and lower limbs.
  __device__ __forceinline__ void multiply_keys(const uint32_t *tile, const Places &at, const ByteTable &table, int i,
                                                int c, int (&acc)[4]) const {
    const uint32_t *sign = tile + at.key_sign + 2 * i * L::WORDS, *mag = tile + at.key_mag + 2 * i * L::MAG_STRIDE;
    uint32_t b0, b1;
#pragma unroll
    for (int j = 0; j < 4; j++) acc[j] = 0;
#pragma unroll
    for (int quad = 0; quad < Q::QUADS; quad++) {
      Planes<KBITS> planes = key_planes(sign, mag, 4 * quad + c);
      Selectors s = planes.selectors(table);
#pragma unroll
      for (int phase = 0; phase < 4; phase++) {
        const uint32_t (&a)[4] = query[4 * quad + phase];
        planes.bytes(table, s.low(phase), s.high(phase), phase, b0, b1);
        mma_int8<false>(acc, a[0], a[1], a[2], a[3], b0, b1, acc);
      }
    }
#pragma unroll
    for (int word = 4 * Q::QUADS; word < L::WORDS; word++) {
      Planes<KBITS> planes = key_planes(sign, mag, word);
      const uint32_t (&a)[4] = query[word];
      uint32_t s = planes.selector(c);
      planes.bytes(table, s, s >> 16, c, b0, b1);
      mma_int8<false>(acc, a[0], a[1], a[2], a[3], b0, b1, acc);
    }
  }

  // Scores of eight tokens of block c, the 8 * `eight`-th and later, still to be multiplied by row.factor.
  __device__ __forceinline__ void eight_scores(const uint32_t *tile, const Places &at, const ByteTable &table,
                                               int eight, int c, float *x) const {
    uint4 four = ((const uint4 *)(tile + at.key_scale))[eight];
    const uint32_t pairs[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int k = 0; k < 4; k++) {
      int acc[4];
      multiply_keys(tile, at, table, 4 * eight + k, c, acc);
      float2 scale = __half22float2(*(const __half2 *)&pairs[k]);
      x[2 * k] = (float)((int)table.limb * acc[0] + acc[2] + row.half_sum) * scale.x;
      x[2 * k + 1] = (float)((int)table.limb * acc[1] + acc[3] + row.half_sum) * scale.y;
    }
  }

  // First of this lane's tokens in its block.
  static __device__ __forceinline__ int first_token(int g) { return OCT ? 0 : g / 4 * TOKENS; }

  // Of this lane's tokens of block c.
  __device__ __forceinline__ void scores(const uint32_t *tile, const Places &at, const ByteTable &table, int g, int c,
                                         float (&x)[TOKENS]) const {
    if constexpr (OCT) {
#pragma unroll
      for (int eight = 0; eight < BLOCK_LEN / 8; eight++) eight_scores(tile, at, table, eight, c, x + 8 * eight);
    } else {
      const uint4 *scales = (const uint4 *)(tile + at.key_scale + first_token(g) / 2);
#pragma unroll
      for (int i = 0; i < TOKENS / 2; i++) {
        int first[4], second[4];  // of the two halves
        multiply_keys(tile, at, table, i, c, first);
        multiply_keys(tile, at, table, i + TOKENS / 2, c, second);
        uint4 four = scales[i / 4];
        const uint32_t pairs[4] = {four.x, four.y, four.z, four.w};
        float2 scale = __half22float2(*(const __half2 *)&pairs[i % 4]);
        int limb = (int)table.limb, n0 = limb * first[0] + first[2], n1 = limb * first[1] + first[3];
        int m0 = limb * second[0] + second[2], m1 = limb * second[1] + second[3];
        x[2 * i] = (float)((g < 4 ? n0 : m0) + row.half_sum) * scale.x;
        x[2 * i + 1] = (float)((g < 4 ? n1 : m1) + row.half_sum) * scale.y;
      }
    }
  }

  // Takes the tile's maximum and largest scale where they are higher, and scales what was summed before.
  __device__ __forceinline__ void raise(float most, float scale_top, int c) {
    scale_top =
        __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(fmaxf(scale_top, 0))));  // in the order of integers
    float before = unit;
    if (scale_top > unit) unit = UNIT_SLACK * scale_top;
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    if (!OCT) most = fmaxf(most, __shfl_xor_sync(~0u, most, 16));
    most = fmaxf(fmaxf(most, __shfl_xor_sync(~0u, most, 2)), top);
    float keep = fast_exp2(top - most) * (before / unit);
    bool empty = __all_sync(~0u, top == NO_SCORE);  // nothing has been summed
    top = most, sum *= keep, shift = row.bias - top + exponent_of_one();
    if (empty) return;
    float keep0 = __shfl_sync(~0u, keep, 8 * c), keep1 = __shfl_sync(~0u, keep, 8 * c + 4);
#pragma unroll
    for (int l = 0; l < LIMBS; l++) {
      total[l] = __float2uint_rn((float)total[l] * keep);
#pragma unroll
      for (int m = 0; m < MTILES; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) out[l][m][i] = __float2int_rn((float)out[l][m][i] * (i % 2 ? keep1 : keep0));
    }
  }

  // Selects limb l of two weights: byte 2 of both (the upper one) or byte 1.
  static __device__ __forceinline__ uint32_t limb_of_two(int l, int g) {
    return (OCT ? l == 0 : g < 4) ? 0x0062u : 0x0051u;
  }

  // Scores times `factor` plus `offset` to weights times scales, as bytes of B fragments: weight[.][phase] holds codes
  // n = 0 .. 3 and 4 .. 7. The float 2 ** 15 + w has w's whole part in bits 8 to 22: its limbs are two bytes.
  __device__ __forceinline__ void weights(const float (&x)[TOKENS], const uint32_t (&scale)[TOKENS / 2], float factor,
                                          float offset, int g, uint32_t (&weight)[LIMBS][4][2]) {
    float y[TOKENS];
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) {
      float2 s = __half22float2(*(const __half2 *)&scale[i]);
      float p0 = fast_exp2(fmaf(x[2 * i], factor, offset)), p1 = fast_exp2(fmaf(x[2 * i + 1], factor, offset));
      sum += p0 + p1;
      y[2 * i] = fmaf(p0, s.x, 32768.0f + fraction_of(2 * i, TOKENS));
      y[2 * i + 1] = fmaf(p1, s.y, 32768.0f + fraction_of(2 * i + 1, TOKENS));
    }
    const uint32_t upper = 0x0062u, lower = 0x0051u;  // byte 2 of two words, byte 1
#pragma unroll
    for (int phase = 0; phase < 4; phase++)
      if constexpr (OCT) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          weight[0][phase][h] = four_bytes(y + 16 * h + phase, upper);
          weight[1][phase][h] = four_bytes(y + 16 * h + phase, lower);
        }
      } else {
        uint32_t own = four_bytes(y + phase, g < 4 ? upper : lower);
        uint32_t other = __shfl_xor_sync(~0u, four_bytes(y + phase, g < 4 ? lower : upper), 16);
        weight[0][phase][0] = g < 4 ? own : other, weight[0][phase][1] = g < 4 ? other : own;
      }
  }

  // One byte each of x [0], [4], [8] and [12]; `two` selects it from two words.
  static __device__ __forceinline__ uint32_t four_bytes(const float *x, uint32_t two) {
    uint32_t low = permute_bytes(__float_as_uint(x[0]), __float_as_uint(x[4]), two);
    uint32_t high = permute_bytes(__float_as_uint(x[8]), __float_as_uint(x[12]), two);
    return permute_bytes(low, high, 0x5410u);
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
        planes[2 * pair].bytes(table, first_of.low(phase), first_of.high(phase), phase, x0, x1);
        planes[2 * pair + 1].bytes(table, second.low(phase), second.high(phase), phase, y0, y1);
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

  // Row g's sum over all of the warp's tokens.
  __device__ __forceinline__ float row_sum() const {
    float all = sum + __shfl_xor_sync(~0u, sum, 1);
    all += __shfl_xor_sync(~0u, all, 2);
    return OCT ? all : all + __shfl_xor_sync(~0u, all, 16);
  }

  // What a weight of one is in units of the integers, its inverse and its logarithm.
  __device__ __forceinline__ float one() const { return fast_exp2(WEIGHT_TOP_LOG2) / unit; }
  __device__ __forceinline__ float inverse_of_one() const { return fast_exp2(-WEIGHT_TOP_LOG2) * unit; }
  __device__ __forceinline__ float exponent_of_one() const { return WEIGHT_TOP_LOG2 - __log2f(unit); }

  // Soft-cap, mask, and the tokens that do not count: before `start`, from `stop` on. `here` is the first of N.
  template <int N>
  __device__ __forceinline__ void restrict_scores(float (&x)[N], uint32_t (&scale)[N / 2], int here, int start,
                                                  int stop, float softcap, const RowMask &mask) const {
#pragma unroll
    for (int t = 0; t < N; t++) x[t] = fmaf(x[t], row.factor, row.bias);
    if (softcap > 0)
#pragma unroll
      for (int t = 0; t < N; t++) x[t] = soft_capped(x[t], softcap);
    if (mask.data) {  // of a token beyond the last that of the last one is read
      int last = stop - 1 - here;
      const char *data = mask.data + here * mask.stride;
      if (mask.boolean)
#pragma unroll
        for (int t = 0; t < N; t++) x[t] = data[min(t, last) * mask.stride] ? x[t] : -INFINITY;
      else
#pragma unroll
        for (int t = 0; t < N; t++) x[t] = fmaf(*(const float *)(data + min(t, last) * mask.stride), LOG2E, x[t]);
    }
#pragma unroll
    for (int t = 0; t < N; t++) {
      bool in = here + t >= start && here + t < stop;
      x[t] = in ? x[t] : -INFINITY;
      scale[t / 2] &= in ? ~0u : t % 2 ? 0x0000FFFFu : 0xFFFF0000u;
    }
  }

  // The values of a tile whose scores are x; `first` is its first token. Restricted: see restrict_scores.
  __device__ __forceinline__ void add_tile(const uint32_t *tile, const Places &at, const ByteTable &values,
                                           float (&x)[TOKENS], bool restricted, int first, int start, int stop,
                                           float softcap, const RowMask &mask, int g, int c) {
    uint32_t scale[TOKENS / 2];
    const uint4 *from = (const uint4 *)(tile + at.value_scale + first_token(g) / 2);
#pragma unroll
    for (int i = 0; i < TOKENS / 8; i++) {
      uint4 v = from[i];
      scale[4 * i] = v.x, scale[4 * i + 1] = v.y, scale[4 * i + 2] = v.z, scale[4 * i + 3] = v.w;
    }
    float factor = row.factor, bias = row.bias;
    if (__builtin_expect(restricted, 0)) {
      restrict_scores(x, scale, first + c * BLOCK_LEN + first_token(g), start, stop, softcap, mask);
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
    if (__builtin_expect(__any_sync(~0u, most[0] > top + SLACK || scale_most > unit), 0)) raise(most[0], scale_most, c);
    float offset = restricted ? exponent_of_one() - top : shift;  // large ones cancel first
    uint32_t weight[LIMBS][4][2];
    weights(x, scale, factor, offset, g, weight);
    sum_values(tile, at, values, g, weight);
  }
};

}  // namespace cuda
}  // namespace kvq
