// Scores of exact keys [kDim] against kRows rows of queries: one lane a key.
inline void score_exact(device const Exact* key, threadgroup const float* query, thread float* score) {
  for (uint r = 0; r < kRows; ++r) {
    score[r] = 0.0f;
  }
  for (uint i = 0; kTable != kWeights && i < kDim; ++i) {
    const float x = float(key[i]);
    for (uint r = 0; r < kRows; ++r) {
      score[r] += query[r * kPadded + i] * x;
    }
  }
}
