// Vectors of avx512 and dot products of 16-bit integers: AVX-512 VNNI.
#pragma once

#include "vec_avx512.h"

#define KVQ_WORD_DOTS  // body_words.h has what it needs

INLINE U lookup_words(U table, U codes) {  // 32 entries of 16 bits by the low 5 bits of each half lane
  return _mm512_permutexvar_epi16(codes, table);
}
INLINE U dot_words(U sum, U a, U b) { return _mm512_dpwssd_epi32(sum, a, b); }
INLINE F floats_of_words(U x) { return _mm512_cvtepi32_ps(x); }
INLINE U rounded(F x) { return _mm512_cvtps_epi32(x); }
INLINE U or_words(U a, U b) { return _mm512_or_si512(a, b); }
