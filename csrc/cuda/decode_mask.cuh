// What changes a score of the decode kernels before the softmax: a mask, a cap.
#pragma once

#include "decode_asm.cuh"

namespace kvq {
namespace cuda {

constexpr float LOG2E = 1.4426950408889634f, NO_SCORE = -1e30f;

// Which tokens a row may see; columns of the mask are counted from the first packed token.
struct RowMask {
  const char *data;  // null without a mask
  int64_t stride;    // bytes
  bool boolean;
  __device__ __forceinline__ float add(float x, int token) const {
    if (boolean) return data[token * stride] ? x : -INFINITY;
    return fmaf(*(const float *)(data + token * stride), LOG2E, x);
  }
};

// x and the result are times log2 e: cap tanh(x / cap) = cap (1 - 2 / (1 + exp(2 x / cap))).
__device__ __forceinline__ float soft_capped(float x, float cap) {
  return cap * LOG2E * (1.0f - __fdividef(2.0f, 1.0f + fast_exp2(__fdividef(2.0f * x, cap))));
}

// Scores times log2 e from x, which is still without factor and bias: soft-cap, mask, and the tokens that do not count:
// before `start`, from `stop` on. N tokens, each STEP behind the one before, from `here` on.
template <int STEP, int N>
__device__ __forceinline__ void restrict_scores(float (&x)[N], uint32_t (&scale)[N / 2], float factor, float bias,
                                                int here, int start, int stop, float softcap, const RowMask &mask) {
#pragma unroll
  for (int t = 0; t < N; t++) x[t] = fmaf(x[t], factor, bias);
  if (softcap > 0)
#pragma unroll
    for (int t = 0; t < N; t++) x[t] = soft_capped(x[t], softcap);
  if (mask.data) {  // of a token beyond the last that of the last one is read
    int last = stop - 1 - here;
    const char *data = mask.data + here * mask.stride;
    if (mask.boolean)
#pragma unroll
      for (int t = 0; t < N; t++) x[t] = data[min(STEP * t, last) * mask.stride] ? x[t] : -INFINITY;
    else
#pragma unroll
      for (int t = 0; t < N; t++) x[t] = fmaf(*(const float *)(data + min(STEP * t, last) * mask.stride), LOG2E, x[t]);
  }
#pragma unroll
  for (int t = 0; t < N; t++) {
    bool in = here + STEP * t >= start && here + STEP * t < stop;
    x[t] = in ? x[t] : -INFINITY;
    scale[t / 2] &= in ? ~0u : t % 2 ? 0x0000FFFFu : 0xFFFF0000u;
  }
}

}  // namespace cuda
}  // namespace kvq
