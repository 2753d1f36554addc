// Pairs of 16-bit floats as one word, the first in the low half.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace kvq {
namespace cuda {

template <class T>
__device__ __forceinline__ uint32_t pair_of(float x, float y);
template <>
__device__ __forceinline__ uint32_t pair_of<__half>(float x, float y) {
  __half2 pair = __floats2half2_rn(x, y);
  return *(uint32_t *)&pair;
}
template <>
__device__ __forceinline__ uint32_t pair_of<__nv_bfloat16>(float x, float y) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return *(uint32_t *)&pair;
}
template <class T>
__device__ __forceinline__ float2 floats_of_pair(uint32_t pair);
template <>
__device__ __forceinline__ float2 floats_of_pair<__half>(uint32_t pair) {
  return __half22float2(*(const __half2 *)&pair);
}
template <>
__device__ __forceinline__ float2 floats_of_pair<__nv_bfloat16>(uint32_t pair) {
  return __bfloat1622float2(*(const __nv_bfloat162 *)&pair);
}

// a b + c of pairs of float16, rounded once.
__device__ __forceinline__ uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
  __half2 sum = __hfma2(*(const __half2 *)&a, *(const __half2 *)&b, *(const __half2 *)&c);
  return *(uint32_t *)&sum;
}

// 1 where a > b, else 0, of pairs of float16.
__device__ __forceinline__ uint32_t above_pair(uint32_t a, uint32_t b) {
  __half2 above = __hgt2(*(const __half2 *)&a, *(const __half2 *)&b);
  return *(uint32_t *)&above;
}

}  // namespace cuda
}  // namespace kvq
