// Vectors of sixteen floats: AVX-512 F, BW, VL, DQ.
#pragma once

typedef __m512 F;
typedef __m512i U;
typedef __mmask16 M;

constexpr int LANES = 16, VECS = 2, MAX_ROWS = 8;

INLINE F splat(float x) { return _mm512_set1_ps(x); }
INLINE U splat_word(uint32_t x) { return _mm512_set1_epi32((int)x); }
INLINE F zero() { return _mm512_setzero_ps(); }
INLINE F load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void store(float *p, F x) { _mm512_storeu_ps(p, x); }
INLINE U load_words(const uint32_t *p) { return _mm512_loadu_si512(p); }
INLINE void store_words(uint32_t *p, U x) { _mm512_storeu_si512(p, x); }
INLINE U as_words(F x) { return _mm512_castps_si512(x); }
INLINE F as_floats(U x) { return _mm512_castsi512_ps(x); }

INLINE U add_words(U a, U b) { return _mm512_add_epi32(a, b); }
INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
INLINE M greater(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
INLINE F select(M m, F a, F b) { return _mm512_mask_blend_ps(m, b, a); }
INLINE F maximum(F a, F b) { return _mm512_max_ps(a, b); }
INLINE F absolute(F x) { return _mm512_abs_ps(x); }
INLINE F square_root(F x) { return _mm512_sqrt_ps(x); }
INLINE uint32_t lane_bits(M m) { return m; }
INLINE F floats_of_words(U x) { return _mm512_cvtepi32_ps(x); }
INLINE U and_words(U a, U b) { return _mm512_and_si512(a, b); }
INLINE F settled(F x) {  // rounded now: no product of this and no sum of that become one operation
  __asm__("" : "+v"(x));
  return x;
}
INLINE void store_lanes(float *p, F x, uint32_t lanes) {  // these lanes side by side, then junk up to a whole vector
  store(p, _mm512_maskz_compress_ps((__mmask16)lanes, x));
}
INLINE float reduce_add(F x) { return _mm512_reduce_add_ps(x); }
INLINE float reduce_max(F x) { return _mm512_reduce_max_ps(x); }

template <int N>
INLINE U shift(U x) {  // to the right, or to the left if N is negative
  if constexpr (N > 0) return _mm512_srli_epi32(x, N);
  if constexpr (N < 0) return _mm512_slli_epi32(x, -N);
  return x;
}
INLINE U pick(uint32_t mask, U a, U b) { return _mm512_ternarylogic_epi32(splat_word(mask), a, b, 0xca); }

// Set bits of a lane: counted() in the four bytes of a lane, of which sums below 256 may be taken, and their total.
#if defined(KVQ_COUNT_WORDS)
INLINE U counted(U x) { return _mm512_popcnt_epi32(x); }
INLINE U total_count(U x) { return x; }
#else
INLINE U counted(U x) {
  const U table = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4));
  const U low = splat_word(0x0f0f0f0f);
  U a = _mm512_shuffle_epi8(table, and_words(x, low)), b = _mm512_shuffle_epi8(table, and_words(shift<4>(x), low));
  return _mm512_add_epi8(a, b);
}
INLINE U total_count(U x) {
  return _mm512_madd_epi16(_mm512_maddubs_epi16(x, _mm512_set1_epi8(1)), _mm512_set1_epi16(1));
}
#endif

struct Book {
  F table;
};
INLINE Book make_book(const float *table) { return {load(table)}; }
template <int BITS>
INLINE F lookup(const Book &book, U codes) {  // the shuffle reads the low 4 bits of each lane
  return _mm512_permutexvar_ps(codes, book.table);
}

INLINE F load_bfloat16(const uint16_t *p) {
  return as_floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
INLINE void store_bfloat16(uint16_t *p, F x) {  // to nearest, ties to even
  U w = as_words(x);
  U odd = _mm512_and_si512(_mm512_srli_epi32(w, 16), splat_word(1));
  w = _mm512_srli_epi32(_mm512_add_epi32(w, _mm512_add_epi32(odd, splat_word(0x7fff))), 16);
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(w));
}
INLINE F load_float16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE void store_float16(uint16_t *p, F x) {
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

// Up to 4 words of WORD_ROWS rows: y[w][row] = x[row][w]. Lane l of r[j] is row 4l + j, so lanes end in order.
constexpr int WORD_ROWS = 16;
INLINE void transpose_words(const uint32_t *x, int64_t ldx, int words, uint32_t *y, int64_t ldy) {
  __mmask8 mask = (__mmask8)((1 << words) - 1);
  __m512i r[4], out[4];
  for (int j = 0; j < 4; j++) {
    r[j] = _mm512_castsi128_si512(_mm_maskz_loadu_epi32(mask, x + j * ldx));
    r[j] = _mm512_inserti32x4(r[j], _mm_maskz_loadu_epi32(mask, x + (4 + j) * ldx), 1);
    r[j] = _mm512_inserti32x4(r[j], _mm_maskz_loadu_epi32(mask, x + (8 + j) * ldx), 2);
    r[j] = _mm512_inserti32x4(r[j], _mm_maskz_loadu_epi32(mask, x + (12 + j) * ldx), 3);
  }
  __m512i low0 = _mm512_unpacklo_epi32(r[0], r[1]), low1 = _mm512_unpacklo_epi32(r[2], r[3]);
  __m512i high0 = _mm512_unpackhi_epi32(r[0], r[1]), high1 = _mm512_unpackhi_epi32(r[2], r[3]);
  out[0] = _mm512_unpacklo_epi64(low0, low1), out[1] = _mm512_unpackhi_epi64(low0, low1);
  out[2] = _mm512_unpacklo_epi64(high0, high1), out[3] = _mm512_unpackhi_epi64(high0, high1);
  for (int w = 0; w < words; w++) _mm512_storeu_si512(y + w * ldy, out[w]);
}

// N words of 32 tokens that lie side by side: y[w][token] = x[token][w]. Halves that hold the words with an even and
// with an odd number are parted log2(N) times.
#define KVQ_UNTANGLE
template <int N>
INLINE void untangle_vectors(U *x) {
  if constexpr (N > 1) {
    const U step = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    U even[N / 2], odd[N / 2];
    UNROLL_FOR (int i = 0; i < N / 2; i++) {
      even[i] = _mm512_permutex2var_epi32(x[2 * i], step, x[2 * i + 1]);
      odd[i] = _mm512_permutex2var_epi32(x[2 * i], add_words(step, splat_word(1)), x[2 * i + 1]);
    }
    untangle_vectors<N / 2>(even);
    untangle_vectors<N / 2>(odd);
    UNROLL_FOR (int i = 0; i < N / 2; i++) x[2 * i] = even[i], x[2 * i + 1] = odd[i];
  }
}
template <int N>
INLINE void untangle_words(const uint32_t *x, uint32_t *y) {
  for (int t = 0; t < 32; t += LANES) {
    U words[N];
    UNROLL_FOR (int i = 0; i < N; i++) words[i] = load_words(x + t * N + i * LANES);
    untangle_vectors<N>(words);
    UNROLL_FOR (int i = 0; i < N; i++) store_words(y + i * 32 + t, words[i]);
  }
}
INLINE bool untangle(const uint32_t *x, int64_t stride, int words, uint32_t *y) {  // false: not done
  if (stride != words) return false;
  if (words == 1) untangle_words<1>(x, y);
  if (words == 2) untangle_words<2>(x, y);
  if (words == 4) untangle_words<4>(x, y);
  if (words == 8) untangle_words<8>(x, y);
  return words == 1 || words == 2 || words == 4 || words == 8;
}
