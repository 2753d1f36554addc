// Codes and scale of one vector, by one simdgroup: centred, balanced, rotated, normed to unit variance, each coordinate to
// the nearest level (torch_kvq/ops/reference.py: quantise). A lane keeps the codes of coordinates lane, lane + 32, ...
constant constexpr uint kPlanes = kBits - 1;
constant constexpr uint kLevels = 1 << kPlanes;
constant constexpr float kLeast = 1e-30f;
constant constexpr float kLargestHalf = 65504.0f;

enum ScaleRule { kNorm, kMatched, kUnbiased, kMse };

inline uint magnitude_of(float x, thread const float* level) {
  uint magnitude = 0;
  for (uint k = 1; k < kLevels; ++k) {
    magnitude += fabs(x) > 0.5f * (level[k - 1] + level[k]) ? 1 : 0;
  }
  return magnitude;
}

inline float scale_of(long rule, float norm, float rms, float dot_value, float square) {
  if (rule == kNorm) {
    return rms;
  }
  if (rule == kMatched) {
    return norm / sqrt(square);
  }
  return rule == kUnbiased ? norm * norm / max(dot_value, kLeast) : dot_value / square;
}

// Rotates v in place and returns the scale; code[k] is sign << kPlanes | magnitude of coordinate lane + 32 k.
inline half quantise_vector(
    threadgroup float* v, thread const Rotation& rotation, thread const float* level, long rule, thread uint* code, uint lane) {
  rotate_vector(v, rotation, false, lane);
  float sum = 0.0f;
  for (uint i = lane; i < kDim; i += kWidth) {
    sum += v[i] * v[i];
  }
  const float norm = sqrt(simd_sum(sum));
  const float rms = norm * rsqrt(float(kDim));
  float dot_value = 0.0f;
  float square = 0.0f;
  for (uint k = 0; k < kPerLane; ++k) {
    const uint i = lane + k * kWidth;
    const float unit = i < kDim ? v[i] / max(rms, kLeast) : 0.0f;
    const uint magnitude = magnitude_of(unit, level);
    code[k] = (unit < 0.0f ? kLevels : 0u) | magnitude;
    if (i < kDim) {
      dot_value += fabs(unit) * level[magnitude];
      square += level[magnitude] * level[magnitude];
    }
  }
  dot_value = simd_sum(dot_value) * rms;
  square = simd_sum(square);
  const float scale = norm > 0.0f ? scale_of(rule, norm, rms, dot_value, square) : 0.0f;
  return half(min(scale, kLargestHalf));
}
