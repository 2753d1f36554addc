// Vectors of eight floats: AVX2, FMA, F16C.
#pragma once

typedef __m256 F;
typedef __m256i U;
typedef __m256 M;  // lane mask, 0 or all ones

constexpr int LANES = 8, VECS = 2, MAX_ROWS = 4;

INLINE F splat(float x) { return _mm256_set1_ps(x); }
INLINE U splat_word(uint32_t x) { return _mm256_set1_epi32((int)x); }
INLINE F zero() { return _mm256_setzero_ps(); }
INLINE F load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void store(float *p, F x) { _mm256_storeu_ps(p, x); }
INLINE U load_words(const uint32_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE void store_words(uint32_t *p, U x) { _mm256_storeu_si256((__m256i *)p, x); }
INLINE U as_words(F x) { return _mm256_castps_si256(x); }
INLINE F as_floats(U x) { return _mm256_castsi256_ps(x); }

INLINE U add_words(U a, U b) { return _mm256_add_epi32(a, b); }
INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
INLINE M greater(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
INLINE F select(M m, F a, F b) { return _mm256_blendv_ps(b, a, m); }
INLINE F maximum(F a, F b) { return _mm256_max_ps(a, b); }
INLINE F absolute(F x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
INLINE F square_root(F x) { return _mm256_sqrt_ps(x); }
INLINE uint32_t lane_bits(M m) { return (uint32_t)_mm256_movemask_ps(m); }
INLINE F floats_of_words(U x) { return _mm256_cvtepi32_ps(x); }
INLINE U and_words(U a, U b) { return _mm256_and_si256(a, b); }
INLINE F settled(F x) {  // rounded now: no product of this and no sum of that become one operation
  __asm__("" : "+x"(x));
  return x;
}

struct LaneOrders {  // the lanes of each set, side by side
  uint64_t order[256];
};
constexpr LaneOrders make_lane_orders() {
  LaneOrders x = {};
  for (int lanes = 0; lanes < 256; lanes++)
    for (int lane = 0, at = 0; lane < 8; lane++)
      if (lanes >> lane & 1) x.order[lanes] |= (uint64_t)lane << 8 * at++;
  return x;
}
static constexpr LaneOrders LANE_ORDERS = make_lane_orders();
INLINE void store_lanes(float *p, F x, uint32_t lanes) {  // these lanes side by side, then junk up to a whole vector
  U order = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)&LANE_ORDERS.order[lanes]));
  store(p, _mm256_permutevar8x32_ps(x, order));
}
INLINE float reduce_add(F x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
INLINE float reduce_max(F x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

template <int N>
INLINE U shift(U x) {  // to the right, or to the left if N is negative
  if constexpr (N > 0) return _mm256_srli_epi32(x, N);
  if constexpr (N < 0) return _mm256_slli_epi32(x, -N);
  return x;
}
INLINE U pick(uint32_t mask, U a, U b) {
  return _mm256_xor_si256(b, _mm256_and_si256(_mm256_xor_si256(a, b), splat_word(mask)));
}

// Set bits of a lane: counted() in its four bytes, of which sums below 256 may be taken, and their total.
INLINE U counted(U x) {
  const U table = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4));
  const U low = splat_word(0x0f0f0f0f);
  U a = _mm256_shuffle_epi8(table, and_words(x, low)), b = _mm256_shuffle_epi8(table, and_words(shift<4>(x), low));
  return _mm256_add_epi8(a, b);
}
INLINE U total_count(U x) {
  return _mm256_madd_epi16(_mm256_maddubs_epi16(x, _mm256_set1_epi8(1)), _mm256_set1_epi16(1));
}

struct Book {
  F table;
};
INLINE Book make_book(const float *table) { return {load(table)}; }
template <int BITS>
INLINE F lookup(const Book &book, U codes) {
  // The shuffle reads the low 3 bits: the whole code of 2 or 3 bits, the magnitude of 4 bits, whose sign is bit 3.
  F x = _mm256_permutevar8x32_ps(book.table, codes);
  if constexpr (BITS == 4) x = _mm256_xor_ps(x, _mm256_and_ps(as_floats(shift<-28>(codes)), _mm256_set1_ps(-0.0f)));
  return x;
}

INLINE F load_bfloat16(const uint16_t *p) {
  return as_floats(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
INLINE void store_bfloat16(uint16_t *p, F x) {  // to nearest, ties to even
  U w = as_words(x);
  U odd = _mm256_and_si256(_mm256_srli_epi32(w, 16), splat_word(1));
  w = _mm256_srli_epi32(_mm256_add_epi32(w, _mm256_add_epi32(odd, splat_word(0x7fff))), 16);
  _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}
INLINE F load_float16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE void store_float16(uint16_t *p, F x) {
  _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

// Up to 4 words of WORD_ROWS rows: y[w][row] = x[row][w].
constexpr int WORD_ROWS = 4;
INLINE void transpose_words(const uint32_t *x, int64_t ldx, int words, uint32_t *y, int64_t ldy) {
  __m128i mask = _mm_cmpgt_epi32(_mm_set1_epi32(words), _mm_setr_epi32(0, 1, 2, 3)), r[4], out[4];
  for (int i = 0; i < 4; i++) r[i] = _mm_maskload_epi32((const int *)(x + i * ldx), mask);
  __m128i low0 = _mm_unpacklo_epi32(r[0], r[1]), low1 = _mm_unpacklo_epi32(r[2], r[3]);
  __m128i high0 = _mm_unpackhi_epi32(r[0], r[1]), high1 = _mm_unpackhi_epi32(r[2], r[3]);
  out[0] = _mm_unpacklo_epi64(low0, low1), out[1] = _mm_unpackhi_epi64(low0, low1);
  out[2] = _mm_unpacklo_epi64(high0, high1), out[3] = _mm_unpackhi_epi64(high0, high1);
  for (int w = 0; w < words; w++) _mm_storeu_si128((__m128i *)(y + w * ldy), out[w]);
}
