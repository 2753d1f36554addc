// Scores of packed keys against kRows rows of queries: one lane a key, whose words it reads once for all rows.
constant constexpr uint kKeyPlanes = kKeyBits - 1;
constant constexpr uint kKeyLevels = 1 << kKeyPlanes;

// score[r] = query[r] . value(code) of the key whose words start at sign and mag; `plane` words from one plane to the next.
inline void score_key(
    device const uint* sign, device const uint* mag, long plane, threadgroup const float* query, thread const float* level,
    thread float* score) {
  for (uint r = 0; r < kRows; ++r) {
    score[r] = 0.0f;
  }
  for (uint w = 0; w < kPadded / kWidth; ++w) {
    const uint signs = sign[w];
    uint mags[kKeyPlanes];
    for (uint p = 0; p < kKeyPlanes; ++p) {
      mags[p] = mag[p * plane + w];
    }
    for (uint i = 0; i < kWidth; ++i) {
      const float value = code_value<kKeyPlanes>(level, signs, mags, i);
      for (uint r = 0; r < kRows; ++r) {
        score[r] += query[r * kPadded + w * kWidth + i] * value;
      }
    }
  }
}
