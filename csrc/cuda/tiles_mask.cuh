// Masks in the tiles: which tiles need one, its copy to shared memory, and what it does to logits.
#pragma once

#include "tiles_tokens.cuh"

namespace kvq {
namespace cuda {
namespace tiles {

// The kinds (tiles_mask.cu) that concern a CTA's rows, whose query tokens may wrap to the next member of the group.
__device__ __forceinline__ MaskBlocks mask_blocks_of(const Plan &plan, int b, int h, int row, int rows) {
  int queries = (int)plan.a.queries, first_member = row / queries;
  int members = (row + rows - 1) / queries - first_member + 1;
  int first = row % queries, last = first + rows - 1, past = last - queries, from = first / MASK_QUERIES;
  int count = past < 0 ? last / MASK_QUERIES - from + 1 : plan.mask_blocks - from + past / MASK_QUERIES + 1;
  int64_t batch = plan.mask_batches == 1 ? 0 : b, head = plan.mask_heads == 1 ? 0 : h * plan.a.group + first_member;
  return {(batch * plan.mask_heads + head) * plan.mask_blocks, plan.mask_heads == 1 ? 1 : members, from,
          count < plan.mask_blocks ? count : plan.mask_blocks};
}

// What the mask does to these rows in tile `index`.
__device__ __forceinline__ MaskKind kind_in(const Plan &plan, const MaskBlocks &blocks, int index) {
  const MaskKind *kinds = plan.mask_kinds + blocks.first * plan.num_tiles + index;
  bool none = true, all = true;
  for (int member = 0; member < blocks.members; member++)
    for (int i = 0, block = blocks.from; i < blocks.count; i++, block++) {
      if (block == plan.mask_blocks) block = 0;
      MaskKind kind = kinds[(int64_t)(member * plan.mask_blocks + block) * plan.num_tiles];
      none &= kind == NONE, all &= kind == ALL;
    }
  return none ? NONE : all ? ALL : MIXED;
}

// What an element of a mask adds to a logit.
__device__ __forceinline__ __half bias_of(uint8_t attended) { return __float2half_rn(attended ? 0 : -INFINITY); }
__device__ __forceinline__ float bias_of(float added) { return added * LOG2_E; }

// The mask, of T, of a tile as biases [rows, places]; rows and tokens that do not count read others'.
template <class S, class T, class Bias>
__device__ __forceinline__ void copy_mask(const Mask &mask, const Tokens &tokens, const int64_t *offsets, Bias *bias,
                                          int thread) {
  int t = thread % S::TOKENS, place = tokens.packed ? place_of(t) : t;
  int64_t column = tokens.column(tokens.clamped(tokens.first + t)) * mask.stride[3];
#pragma unroll 8
  for (int r = thread / S::TOKENS; r < S::ROWS; r += S::THREADS / S::TOKENS)
    bias[r * S::mask_pitch(sizeof(Bias)) + place] = bias_of(((const T *)mask.data)[offsets[r] + column]);
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

// Logits of the tokens that do not count.
template <class S>
__device__ __forceinline__ void cut_scores(float (&x)[S::ROW_TILES][S::TOKEN_TILES][4], const Tokens &tokens, int place,
                                           int c) {
#pragma unroll
  for (int n = 0; n < S::TOKEN_TILES; n++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      bool has = tokens.has(tokens.token(place + 8 * n + 2 * c + j));
#pragma unroll
      for (int m = 0; m < S::ROW_TILES; m++)
#pragma unroll
        for (int i = 0; i < 4; i += 2) x[m][n][i + j] = has ? x[m][n][i + j] : -INFINITY;
    }
}

// Logits with the mask of the tile in shared memory, `bias` at the warp's first row and place; -inf hides a NaN.
template <class S, class T>
__device__ __forceinline__ void mask_scores(float (&x)[S::ROW_TILES][S::TOKEN_TILES][4], const T *bias, int g, int c) {
#pragma unroll
  for (int m = 0; m < S::ROW_TILES; m++)
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int n = 0; n < S::TOKEN_TILES; n++) {
        float by = to_float(bias[(16 * m + 8 * (i / 2) + g) * S::mask_pitch(sizeof(T)) + 8 * n + 2 * c + i % 2]);
        x[m][n][i] = by == -INFINITY ? by : x[m][n][i] + by;
      }
}

}  // namespace tiles
}  // namespace cuda
}  // namespace kvq
