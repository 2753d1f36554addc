// The codebook as encode by tensor cores reads it, without a branch or a table look-up: the bits of a magnitude are
// decided from the top one down, and what the bits above choose, an edge or a value, is linear in each of them.
#pragma once

#include "halves.cuh"
#include "pack.cuh"

namespace kvq {
namespace cuda {
namespace halves {

constexpr float SHARP = 1.152921504606847e18f;  // 2^60: times this, any difference of two floats near 1 exceeds 1

// Sum of the coefficients whose bits are all set; bit b of the number of a coefficient belongs to flag b.
template <int FLAGS>
__device__ __forceinline__ float linear(const float *coefficients, const float *flags) {
  if constexpr (FLAGS == 0) return coefficients[0];
  if constexpr (FLAGS > 0)
    return fmaf(flags[FLAGS - 1], linear<FLAGS - 1>(coefficients + (1 << (FLAGS - 1)), flags),
                linear<FLAGS - 1>(coefficients, flags));
}
// The same of pairs of float16.
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
  float edge[LEVELS];      // [2^depth + s], negative, times SHARP: of the edge that decides flag `depth`
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
    float step = level_of(LEVELS - 1) / (2 * TOP_LEVEL), level = rintf(level_of(magnitude) / step);
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
    edge[lane] = -SHARP * middle_edge, value[lane] = pair_of<__half>(level, level), square[lane] = (int)squared;
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

  // The flags of two numbers as pairs. `by` is SHARP over the root mean square.
  __device__ __forceinline__ static void decide_both(float x, float y, float by, const float (&edge)[LEVELS],
                                                     uint32_t (&flags)[FLAGS]) {
    float flag_x[FLAGS], flag_y[FLAGS];
    decide<0>(fabsf(x), by, edge, flag_x), decide<0>(fabsf(y), by, edge, flag_y);
#pragma unroll
    for (int b = 0; b < FLAGS; b++) flags[b] = pair_of<__half>(flag_x[b], flag_y[b]);
  }

  // Flags are 0 or 1, those of a NaN 0.
  template <int DEPTH>
  __device__ __forceinline__ static void decide(float size, float by, const float (&edge)[LEVELS],
                                                float (&flags)[FLAGS]) {
    if constexpr (DEPTH < FLAGS) {
      flags[DEPTH] = __saturatef(fmaf(size, by, linear<DEPTH>(edge + (1 << DEPTH), flags)));
      decide<DEPTH + 1>(size, by, edge, flags);
    }
  }
};

}  // namespace halves
}  // namespace cuda
}  // namespace kvq
