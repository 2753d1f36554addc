// Keys of a selection against rows, one lane a key. The rows of a selection are those of its query heads, up to kRows of
// which share a threadgroup; keys and values are rows of a tensor or of a packed store, both packed along the coordinates.
struct Keys {
  device const Exact* exact;  // unless kPackedKeys
  device const uint* sign;
  device const uint* mag;
  device const half* scale;
  device const float* bias;  // of the first row
  long exact_unit, sign_unit, mag_unit, plane;
};

// The keys of one head.
template <typename T>
inline Keys keys_of(
    device const Exact* exact, device const uint* sign, device const uint* mag, device const half* scale,
    device const float* bias, constant T& sizes, long batch, long head) {
  return {exact + batch * sizes.keys[0] + head * sizes.keys[1],
          sign + batch * sizes.key_sign[0] + head * sizes.key_sign[1],
          mag + batch * sizes.key_mag[0] + head * sizes.key_mag[1],
          scale + batch * sizes.key_scale[0] + head * sizes.key_scale[1],
          bias, sizes.keys[2], sizes.key_sign[2], sizes.key_mag[2], sizes.key_mag[3]};
}

// Logits of the key of `token`; `rows`: how many rows there are from the first on.
inline void score_selected(
    thread const Keys& keys, long token, long rows, threadgroup const float* query, thread const float* level,
    thread float* score) {
  if (!kPackedKeys) {
    score_exact(keys.exact + token * keys.exact_unit, query, score);
    return;
  }
  score_key(keys.sign + token * keys.sign_unit, keys.mag + token * keys.mag_unit, keys.plane, query, level, score);
  const float scale = float(keys.scale[token]);
  for (uint r = 0; r < kRows; ++r) {
    score[r] = r < rows ? score[r] * scale + keys.bias[r] : 0.0f;
  }
}
