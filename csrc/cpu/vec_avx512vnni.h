// Vectors of avx512 and dot products of 16-bit integers: AVX-512 VNNI.
#pragma once

#include "vec_avx512.h"

#define KVQ_WORD_DOTS  // body_words.h has what it needs

INLINE U lookup_words(U table, U codes) {  // 32 entries of 16 bits by the low 5 bits of each half lane
  return _mm512_permutexvar_epi16(codes, table);
}
INLINE U dot_words(U sum, U a, U b) { return _mm512_dpwssd_epi32(sum, a, b); }
INLINE U rounded(F x) { return _mm512_cvtps_epi32(x); }

// e^x for x <= 0 to 3e-6: 2^n 2^f with the series of 2^f to f^5; 0 below -138. NaN stays NaN.
INLINE F exp_weights(F x) {
  F t = _mm512_max_ps(splat(-200.0f), x * splat(1.44269504f));
  F n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = t - n;
  F p = fma(f, splat(1.33335581e-3f), splat(9.61812911e-3f));
  p = fma(p, f, splat(5.55041087e-2f));
  p = fma(p, f, splat(0.240226507f));
  p = fma(p, f, splat(0.693147181f));
  return _mm512_scalef_ps(fma(p, f, splat(1.0f)), n);
}
