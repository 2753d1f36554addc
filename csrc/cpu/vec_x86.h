// The transpose of small squares, for AVX2 and AVX-512 alike.
#pragma once

INLINE void transpose_square(const float *x, int64_t ldx, float *y, int64_t ldy) {  // 8 x 8
  __m256 r[8], t[8];
  for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(x + i * ldx);
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {  // r[i + c] holds columns c and c + 4 of rows i .. i + 3
      r[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
      r[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0xee);
    }
  for (int c = 0; c < 4; c++) {
    _mm256_storeu_ps(y + c * ldy, _mm256_permute2f128_ps(r[c], r[c + 4], 0x20));
    _mm256_storeu_ps(y + (c + 4) * ldy, _mm256_permute2f128_ps(r[c], r[c + 4], 0x31));
  }
}
