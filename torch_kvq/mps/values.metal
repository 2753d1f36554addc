// Weighted sums of packed values. A block is 32 tokens, which is one word of each coordinate; codes of keys that are the
// values too (MLA latents, kShared) are packed along the coordinates instead.
constant constexpr uint kValuePlanes = (kShared ? kKeyBits : kValueBits) - 1;
constant constexpr uint kValueLevels = 1 << kValuePlanes;

// Words of one head: `unit` and `mag_unit` words from one token (keys) or block (values) to the next.
struct Words {
  device const uint* sign;
  device const uint* mag;
  long unit, mag_unit, plane;
};

inline float shared_value(thread const Words& words, long token, uint i, thread const float* level) {
  const uint word = i / kWidth;
  uint mags[kValuePlanes];
  for (uint p = 0; p < kValuePlanes; ++p) {
    mags[p] = words.mag[token * words.mag_unit + p * words.plane + word];
  }
  return code_value<kValuePlanes>(level, words.sign[token * words.unit + word], mags, i % kWidth);
}

// sum[r] += weights[r * stride + t] * value(code) of coordinate i, over the tokens t of a block.
inline void add_block(
    thread const Words& words, long block, uint i, threadgroup const float* weights, uint stride, thread const float* level,
    thread float* sum) {
  uint signs = 0;
  uint mags[kValuePlanes];
  if (!kShared) {
    signs = words.sign[block * words.unit + i];
    for (uint p = 0; p < kValuePlanes; ++p) {
      mags[p] = words.mag[block * words.mag_unit + p * words.plane + i];
    }
  }
  for (uint t = 0; t < kWidth; ++t) {
    const float value = kShared ? shared_value(words, block * kWidth + t, i, level)
                                : code_value<kValuePlanes>(level, signs, mags, t);
    for (uint r = 0; r < kRows; ++r) {
      sum[r] += weights[r * stride + t] * value;
    }
  }
}

// The same for the coordinates `begin`, `begin + step`, .. of a thread: sum[k * kRows + r] of its k-th.
inline void add_coordinates(
    thread const Words& words, long block, uint begin, uint step, threadgroup const float* weights, uint stride,
    thread const float* level, thread float* sum) {
  for (uint k = 0; begin + k * step < kValueDim; ++k) {
    add_block(words, block, begin + k * step, weights, stride, level, sum + k * kRows);
  }
}
