// The codebook as encode by tensor cores reads it, without a branch or a table look-up: the bits of a magnitude are
// decided from the top one down, and what the bits above choose, an edge or a value, is linear in each of them.
#pragma once

#include "halves.cuh"
#include "pack.cuh"

namespace kvq {
namespace cuda {
namespace halves {

// Of pairs of float16: sum of the coefficients whose bits are all set; bit b of the number of a coefficient belongs to
// flag b.
template <int FLAGS>
__device__ __forceinline__ uint32_t linear(const uint32_t *coefficients, const uint32_t *flags) {
  if constexpr (FLAGS == 0) return coefficients[0];
  if constexpr (FLAGS > 0)
    return fma_pair(flags[FLAGS - 1], linear<FLAGS - 1>(coefficients + (1 << (FLAGS - 1)), flags),
                    linear<FLAGS - 1>(coefficients, flags));
}

template <int BITS>
struct Book {
  static constexpr int FLAGS = BITS - 1, LEVELS = 1 << FLAGS;  // flag 0 is the top bit of the magnitude
  float edge[LEVELS];                                          // [2^depth + s]: of the edge that decides flag `depth`
  uint32_t value[LEVELS];  // [s], pairs of float16: of the level in half steps of the grid, which is exact
  int square[LEVELS];      // [s]: of the square of that level
  float half_step;

  // By one warp, of the level that each lane loaded.
  __device__ static float load(const float *levels) { return levels[lane_id() % LEVELS]; }
  __device__ void fill(float loaded) {
    auto level_of = [&](int magnitude) { return __shfl_sync(ALL_LANES, loaded, magnitude); };
    int lane = lane_id() % LEVELS, depth = lane < 2 ? 0 : lane < 4 ? 1 : 2, low = 0, magnitude = 0;
#pragma unroll
    for (int b = 0; b < FLAGS; b++) {
      if (lane >> b & 1) magnitude += 1 << (FLAGS - 1 - b);
      if (lane >> b & 1 && b < depth) low += 1 << (FLAGS - 1 - b);
    }
    int middle = low + (1 << (FLAGS - 1 - depth));
    float step = level_of(LEVELS - 1) * (1 / (2 * TOP_LEVEL)), level = rintf(__fdividef(level_of(magnitude), step));
    float middle_edge = (level_of(middle - 1) + level_of(middle)) / 2, squared = level * level;
#pragma unroll
    for (int b = 0; b < FLAGS; b++) {
      float other = __shfl_xor_sync(ALL_LANES, level, 1 << b);
      float other_edge = __shfl_xor_sync(ALL_LANES, middle_edge, 1 << b);
      float other_square = __shfl_xor_sync(ALL_LANES, squared, 1 << b);
      if (lane >> b & 1) level -= other, squared -= other_square;
      if (lane >> b & 1 && b < depth) middle_edge -= other_edge;
    }
    if (lane_id() >= LEVELS) return;
    edge[lane] = middle_edge, value[lane] = pair_of<__half>(level, level), square[lane] = (int)squared;
    if (lane == 0) half_step = step;
  }

  // The sum of the squares of the levels, in half steps, of all coordinates of these words, but for square[0] each.
  template <int GROUPS>
  __device__ __forceinline__ int squares(const uint32_t (&words)[BITS][GROUPS]) const {
    int sum = 0;
#pragma unroll
    for (int group = 0; group < GROUPS; group++)
#pragma unroll
      for (int s = 1; s < LEVELS; s++) {
        uint32_t all = ~0u;
#pragma unroll
        for (int b = 0; b < FLAGS; b++)
          if (s >> b & 1) all &= words[FLAGS - 1 - b][group];
        sum += square[s] * __popc(all);
      }
    return sum;
  }

  // Flag b of pair e of absolute values, as a pair of 0 or 1; of a NaN 0.
  __device__ __forceinline__ static uint32_t decide(int b, uint32_t sizes, const uint32_t (&edge)[LEVELS],
                                                    const uint32_t (&flags)[FLAGS][4], int e) {
    uint32_t above[FLAGS];
#pragma unroll
    for (int k = 0; k < b; k++) above[k] = flags[k][e];
    if (b == 0) return above_pair(sizes, linear<0>(edge + 1, above));
    if (b == 1 && FLAGS > 1) return above_pair(sizes, linear < FLAGS<2 ? 0 : 1>(edge + (2 & LEVELS - 1), above));
    return above_pair(sizes, linear < FLAGS<3 ? 0 : 2>(edge + (4 & LEVELS - 1), above));
  }
};

}  // namespace halves
}  // namespace cuda
}  // namespace kvq
