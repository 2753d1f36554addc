// Scalar conversions of 16-bit floats, rounding to nearest, ties to even.
#pragma once

INLINE uint32_t word_of(float x) {
  uint32_t w;
  __builtin_memcpy(&w, &x, 4);
  return w;
}
INLINE float float_of(uint32_t w) {
  float x;
  __builtin_memcpy(&x, &w, 4);
  return x;
}

INLINE float from_bfloat16(uint16_t h) { return float_of((uint32_t)h << 16); }
INLINE uint16_t to_bfloat16(float x) {
  uint32_t w = word_of(x);
  return (uint16_t)((w + 0x7fff + ((w >> 16) & 1)) >> 16);
}

INLINE float from_float16(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  if (exponent == 0) return float_of(sign | word_of((float)mantissa * 0x1p-24f));
  return float_of(sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13);
}
INLINE uint16_t to_float16(float x) {
  uint32_t w = word_of(x), sign = (w >> 16) & 0x8000, a = w & 0x7fffffff;
  if (a > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (a >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
  // Below 2^-14 the sum with 0.5, whose last place is 2^-24, rounds to multiples of the smallest float16.
  if (a < 0x38800000) return (uint16_t)(sign | (word_of(float_of(a) + 0.5f) - word_of(0.5f)));
  return (uint16_t)(sign | ((a - (112u << 23) + 0xfff + ((a >> 13) & 1)) >> 13));
}
