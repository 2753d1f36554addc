// The tokens of a tile, and their columns in masks, scores and weights.
#pragma once

#include "tiles_shape.cuh"

namespace kvq {
namespace cuda {
namespace tiles {

constexpr float LOG2_E = 1.4426950408889634f;  // logits are in base 2

struct Tokens {
  bool packed;
  int first, from, to;    // token of place 0; those from .. to count
  int num_sinks, length;  // of the call

  __device__ __forceinline__ int token(int place) const { return first + (packed ? code_of(place) : place); }
  __device__ __forceinline__ bool has(int token) const { return token >= from && token < to; }
  __device__ __forceinline__ int clamped(int token) const { return min(max(token, from), to - 1); }
  __device__ __forceinline__ int64_t column(int token) const {
    if (packed) return (int64_t)num_sinks + token;
    return token < num_sinks ? token : (int64_t)token + length;
  }
};

}  // namespace tiles
}  // namespace cuda
}  // namespace kvq
