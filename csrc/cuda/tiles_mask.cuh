// Masks in the tiles: which tiles need one, its copy to shared memory, and what it does to logits.
#pragma once

#include "rows.cuh"
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

// The mask of a tile, as bits [rows, places] of a bool one. Rows and tokens that do not count read others'.
template <class S>
__device__ __forceinline__ void copy_mask(const bool *mask, int64_t step, const Tokens &tokens, const int64_t *offsets,
                                          uint32_t *bits, int thread) {
  int lane = thread % WARP, warp = thread / WARP;
#pragma unroll
  for (int word = 0; word < S::MASK_WORDS; word++) {
    int64_t column = tokens.column(tokens.clamped(tokens.token(32 * word + lane))) * step;
#pragma unroll 8
    for (int r = warp; r < S::ROWS; r += S::THREADS / WARP) {
      uint32_t attended = __ballot_sync(ALL_LANES, mask[offsets[r] + column]);
      if (lane == 0) bits[r * S::MASK_WORDS + word] = attended;
    }
  }
}

// The same of a float32 mask, times log2(e).
template <class S>
__device__ __forceinline__ void copy_mask(const float *mask, int64_t step, const Tokens &tokens, const int64_t *offsets,
                                          float *bias, int thread) {
  int t = thread % S::TOKENS, place = tokens.packed ? place_of(t) : t;
  int64_t column = tokens.column(tokens.clamped(tokens.first + t)) * step;
#pragma unroll 8
  for (int r = thread / S::TOKENS; r < S::ROWS; r += S::THREADS / S::TOKENS)
    bias[r * S::BIAS_PITCH + place] = mask[offsets[r] + column] * LOG2_E;
}

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

// Logits with the mask of the tile in shared memory, at the warp's first row; `place` is the warp's first.
template <class S>
__device__ __forceinline__ void mask_scores(float (&x)[S::ROW_TILES][S::TOKEN_TILES][4], const uint32_t *bits,
                                            int place, int g, int c) {
#pragma unroll
  for (int m = 0; m < S::ROW_TILES; m++)
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int n = 0; n < S::TOKEN_TILES; n++) {
        int at = place + 8 * n;
        uint32_t attended = bits[(16 * m + 8 * i + g) * S::MASK_WORDS + at / 32] >> (at % 32 + 2 * c);
        if (!(attended & 1)) x[m][n][2 * i] = -INFINITY;
        if (!(attended & 2)) x[m][n][2 * i + 1] = -INFINITY;
      }
}
template <class S>
__device__ __forceinline__ void mask_scores(float (&x)[S::ROW_TILES][S::TOKEN_TILES][4], const float *bias, int place,
                                            int g, int c) {
#pragma unroll
  for (int m = 0; m < S::ROW_TILES; m++)
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int n = 0; n < S::TOKEN_TILES; n++) {
        float2 by = *(const float2 *)(bias + (16 * m + 8 * i + g) * S::BIAS_PITCH + place + 8 * n + 2 * c);
        x[m][n][2 * i] += by.x, x[m][n][2 * i + 1] += by.y;
      }
}

}  // namespace tiles
}  // namespace cuda
}  // namespace kvq
