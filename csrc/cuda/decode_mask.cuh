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

}  // namespace cuda
}  // namespace kvq
