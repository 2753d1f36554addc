// Vectors of four floats: the Advanced SIMD of every AArch64.
#pragma once

typedef float32x4_t F;
typedef uint32x4_t U;
typedef uint32x4_t M;  // lane mask, 0 or all ones

constexpr int LANES = 4, VECS = 2, MAX_ROWS = 8;

INLINE F splat(float x) { return vdupq_n_f32(x); }
INLINE U splat_word(uint32_t x) { return vdupq_n_u32(x); }
INLINE F zero() { return splat(0); }
INLINE F load(const float *p) { return vld1q_f32(p); }
INLINE void store(float *p, F x) { vst1q_f32(p, x); }
INLINE U load_words(const uint32_t *p) { return vld1q_u32(p); }
INLINE void store_words(uint32_t *p, U x) { vst1q_u32(p, x); }
INLINE U as_words(F x) { return vreinterpretq_u32_f32(x); }
INLINE F as_floats(U x) { return vreinterpretq_f32_u32(x); }

INLINE U add_words(U a, U b) { return vaddq_u32(a, b); }
INLINE F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
INLINE M greater(F a, F b) { return vcgtq_f32(a, b); }
INLINE F select(M m, F a, F b) { return vbslq_f32(m, a, b); }
INLINE F maximum(F a, F b) { return select(greater(a, b), a, b); }  // vmaxq would let NaN win
INLINE F absolute(F x) { return vabsq_f32(x); }
INLINE F square_root(F x) { return vsqrtq_f32(x); }
INLINE uint32_t lane_bits(M m) { return vaddvq_u32(vandq_u32(m, U{1, 2, 4, 8})); }
INLINE F floats_of_words(U x) { return vcvtq_f32_u32(x); }
INLINE U and_words(U a, U b) { return vandq_u32(a, b); }
INLINE F settled(F x) {  // rounded now: no product of this and no sum of that become one operation
  __asm__("" : "+w"(x));
  return x;
}
INLINE void store_lanes(float *p, F x, uint32_t lanes) {  // these lanes side by side
  for (; lanes; lanes &= lanes - 1) *p++ = x[__builtin_ctz(lanes)];
}
// Set bits of a lane: counted() in its four bytes, of which sums below 256 may be taken, and their total.
INLINE U counted(U x) { return vreinterpretq_u32_u8(vcntq_u8(vreinterpretq_u8_u32(x))); }
INLINE U total_count(U x) { return vpaddlq_u16(vpaddlq_u8(vreinterpretq_u8_u32(x))); }
INLINE float reduce_add(F x) { return vaddvq_f32(x); }
INLINE float reduce_max(F x) { return vmaxnmvq_f32(x); }

template <int N>
INLINE U shift(U x) {  // to the right, or to the left if N is negative
  if constexpr (N > 0) return vshrq_n_u32(x, N);
  if constexpr (N < 0) return vshlq_n_u32(x, -N);
  return x;
}
INLINE U pick(uint32_t mask, U a, U b) { return vbslq_u32(splat_word(mask), a, b); }

// Byte j of the 8 floats of the lower half of the table, at 8j: the byte shuffle reads 32 bytes at once, and an index
// is the code in three bits and j in the two above.
struct Book {
  uint8x16x2_t bytes;
};
INLINE Book make_book(const float *table) {
  uint8_t bytes[32];
  for (int i = 0; i < 32; i++) bytes[i] = (uint8_t)(word_of(table[i % 8]) >> 8 * (i / 8));
  return {{{vld1q_u8(bytes), vld1q_u8(bytes + 16)}}};
}
template <int BITS>
INLINE F lookup(const Book &book, U codes) {
  const uint8x16_t first = {0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12};
  const uint8x16_t index = vreinterpretq_u8_u32(splat_word(0x18100800));
  uint8x16_t at = vbslq_u8(vdupq_n_u8(7), vqtbl1q_u8(vreinterpretq_u8_u32(codes), first), index);
  U x = vreinterpretq_u32_u8(vqtbl2q_u8(book.bytes, at));
  if constexpr (BITS == 4) x = pick(0x80000000u, shift<-28>(codes), x);  // the lower half of 4 bits is positive
  return as_floats(x);
}

INLINE F load_bfloat16(const uint16_t *p) { return as_floats(vshll_n_u16(vld1_u16(p), 16)); }
INLINE void store_bfloat16(uint16_t *p, F x) {  // to nearest, ties to even
  U w = as_words(x), odd = vandq_u32(vshrq_n_u32(w, 16), splat_word(1));
  vst1_u16(p, vshrn_n_u32(vaddq_u32(w, vaddq_u32(odd, splat_word(0x7fff))), 16));
}
INLINE F load_float16(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INLINE void store_float16(uint16_t *p, F x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }

INLINE void transpose_lanes(const U (&r)[4], U (&out)[4]) {
  U low0 = vzip1q_u32(r[0], r[2]), low1 = vzip1q_u32(r[1], r[3]);
  U high0 = vzip2q_u32(r[0], r[2]), high1 = vzip2q_u32(r[1], r[3]);
  out[0] = vzip1q_u32(low0, low1), out[1] = vzip2q_u32(low0, low1);
  out[2] = vzip1q_u32(high0, high1), out[3] = vzip2q_u32(high0, high1);
}
INLINE void transpose_square(const float *x, int64_t ldx, float *y, int64_t ldy) {  // 8 x 8
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 8; j += 4) {
      U r[4], out[4];
      for (int k = 0; k < 4; k++) r[k] = as_words(load(x + (i + k) * ldx + j));
      transpose_lanes(r, out);
      for (int k = 0; k < 4; k++) store(y + (j + k) * ldy + i, as_floats(out[k]));
    }
}

INLINE U load_few_words(const uint32_t *p, int words) {  // 1 to 4, and zeros
  if (words == 4) return vld1q_u32(p);
  if (words == 1) return vsetq_lane_u32(*p, splat_word(0), 0);
  U x = vcombine_u32(vld1_u32(p), vdup_n_u32(0));
  return words == 3 ? vld1q_lane_u32(p + 2, x, 2) : x;
}

// Up to 4 words of WORD_ROWS rows: y[w][row] = x[row][w].
constexpr int WORD_ROWS = 4;
INLINE void transpose_words(const uint32_t *x, int64_t ldx, int words, uint32_t *y, int64_t ldy) {
  U r[4], out[4];
  for (int i = 0; i < 4; i++) r[i] = load_few_words(x + i * ldx, words);
  transpose_lanes(r, out);
  for (int w = 0; w < words; w++) store_words(y + w * ldy, out[w]);
}
