// Queries and weights as integers of 16 and 15 bits, whose upper and lower bytes (limbs) are multiplied one by one.
#pragma once

#include "decode_asm.cuh"

namespace kvq {
namespace cuda {

constexpr float QUERY_TOP = 32512.0f;      // of a query: 127 * 256
constexpr float WEIGHT_TOP_LOG2 = 13.99f;  // of a weight at the maximum when it was taken: just below 2 ** 14

// Step and place of query coordinate d among the bytes of a row: [step][lane c][8 codes n].
template <int DIM>
struct QueryMap {
  static constexpr int WORDS = (DIM + 31) / 32, QUADS = WORDS / 4, ROW_BYTES = 32 * WORDS;
  static __host__ __device__ constexpr int byte_of(int d) {
    int word = d / 32, n = d % 32 / 4, phase = d % 4;
    int step = word < 4 * QUADS ? 4 * (word / 4) + phase : word, c = word < 4 * QUADS ? word % 4 : phase;
    return 32 * step + 8 * c + n;
  }
};

// What a row of queries is besides its bytes: factor of the integer scores, q . centre (both times log2 e), half the
// sum of its integers.
struct RowInfo {
  float factor, bias;
  int half_sum;
};

// Fractions that are added before a weight is cut to an integer, spread evenly over `count` tokens, so that
// weights below one unit are lost on none but counted on some: sums stay unbiased.
__host__ __device__ constexpr float fraction_of(int token, int count) {
  return ((float)(token * 11 % count) + 0.5f) / (float)count;
}

// The float WEIGHT_ZERO + w has w's whole part in bits 8 to 22: its limbs are bytes 2 and 1.
constexpr float WEIGHT_ZERO = 32768.0f;

// The upper bytes of two weights in the lower half, their lower bytes in the upper half.
__device__ __forceinline__ uint32_t two_of_both(float x, float y) {
  return permute_bytes(__float_as_uint(x), __float_as_uint(y), 0x5162u);
}

// The upper (limb 0) or lower bytes of the weights x [0], [step], [2 step] and [3 step].
__device__ __forceinline__ uint32_t four_bytes(const float *x, int limb, int step = 4) {
  uint32_t two = limb == 0 ? 0x0062u : 0x0051u;
  uint32_t low = permute_bytes(__float_as_uint(x[0]), __float_as_uint(x[step]), two);
  uint32_t high = permute_bytes(__float_as_uint(x[2 * step]), __float_as_uint(x[3 * step]), two);
  return permute_bytes(low, high, 0x5410u);
}

}  // namespace cuda
}  // namespace kvq
