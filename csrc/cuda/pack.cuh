// Bit planes of a store and codes: where the words lie, the 32 x 32 bit transpose between the orders of keys and of
// values, and the codebook.
#pragma once

#include "rows.cuh"

namespace kvq {
namespace cuda {

// Words of magnitude bit `plane`, or of the sign if plane is bits - 1, so that plane p is bit p of the code; `at` is a
// token of keys, a block of values.
__device__ inline uint32_t *plane_at(const Store &s, int64_t batch, int64_t head, int64_t at, int plane) {
  if (plane == s.bits - 1) return s.sign + batch * s.sign_stride[0] + head * s.sign_stride[1] + at * s.sign_stride[2];
  return s.mag + batch * s.mag_stride[0] + head * s.mag_stride[1] + at * s.mag_stride[2] + plane * s.mag_stride[3];
}

__device__ inline uint16_t *scales_at(const Store &s, int64_t batch, int64_t head) {
  return s.scale + batch * s.scale_stride[0] + head * s.scale_stride[1];
}

// Null if the store has none.
__device__ inline const float *centre_at(const Store &s, int64_t batch, int64_t head) {
  return s.centre ? s.centre + batch * s.centre_stride[0] + head * s.centre_stride[1] : nullptr;
}
__device__ inline const float *balance_at(const Store &s, int64_t batch, int64_t head) {
  return s.balance ? s.balance + batch * s.balance_stride[0] + head * s.balance_stride[1] : nullptr;
}

// Tokens of a block of 32 that lie in [start, stop), one bit each.
template <class Index>
__device__ inline uint32_t valid_tokens(Index block, Index start, Index stop) {
  Index low = start - block * BLOCK_LEN, high = stop - block * BLOCK_LEN;
  uint32_t from = low <= 0 ? ~0u : low >= BLOCK_LEN ? 0u : ~0u << low;
  uint32_t to = high >= BLOCK_LEN ? ~0u : high <= 0 ? 0u : ~(~0u << high);
  return from & to;
}

// Bit i of the word of lane t becomes bit t of the word of lane i.
__device__ inline uint32_t transpose_bits(uint32_t word, int lane) {
  uint32_t low = 0x0000ffff;
#pragma unroll
  for (int step = WARP / 2; step; step /= 2) {
    uint32_t other = __shfl_xor_sync(ALL_LANES, word, step);
    word = lane & step ? (word & ~low) | ((other >> step) & low) : (word & low) | ((other & low) << step);
    low ^= low << (step / 2);
  }
  return word;
}

// Levels and the edges between them, for any number of bits: unused edges are infinite.
struct Codebook {
  float level[MAX_LEVELS], edge[MAX_LEVELS - 1];

  __device__ explicit Codebook(const Store &s) {
    int count = 1 << (s.bits - 1);
#pragma unroll
    for (int k = 0; k < MAX_LEVELS; k++) level[k] = k < count ? s.level_data[k] : 0;
#pragma unroll
    for (int k = 0; k + 1 < MAX_LEVELS; k++) edge[k] = k + 1 < count ? (level[k + 1] + level[k]) / 2 : INFINITY;
  }

  // The number of edges below a >= 0, and its level; 0 of a NaN.
  __device__ int magnitude(float a, float &value) const {
    int m = 0;
    value = level[0];
#pragma unroll
    for (int k = 0; k + 1 < MAX_LEVELS; k++) {
      bool above = a > edge[k];
      m += above;
      value = above ? level[k + 1] : value;
    }
    return m;
  }

  // The float32 value of a code, sign above magnitude.
  __device__ float value(int code, int bits) const {
    int half = 1 << (bits - 1), magnitude = code & (half - 1);
    float v = level[0];
#pragma unroll
    for (int k = 1; k < MAX_LEVELS; k++) v = magnitude == k ? level[k] : v;
    return code & half ? -v : v;
  }
};

// The one scale of a vector from |x|, its root mean square, <|x|, value> and |value|^2. 0 for a zero vector and for one
// with a NaN.
__device__ inline float scale_of(int rule, float norm, float rms, float dot, float square) {
  const float eps = 1e-30f, largest = 65504;
  float root = square * rsqrtf(fmaxf(square, eps));
  float by = rule == MATCHED ? root : rule == UNBIASED ? fmaxf(dot, eps) : rule == MSE ? square : 1;
  float scale = rule == MATCHED ? norm : rule == UNBIASED ? norm * norm : rule == MSE ? dot : rms;
  scale = __fdividef(scale, by);
  scale = scale < largest ? scale : largest;
  return norm > 0 ? scale : 0;
}

}  // namespace cuda
}  // namespace kvq
