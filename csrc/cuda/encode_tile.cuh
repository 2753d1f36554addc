// encode of bfloat16 and float16 by tensor cores, 16 tokens of one head by one warp. Lane 4g + c has tokens 2g + t, t =
// 0 and 1, and of each a quarter of the coordinates,
//   d = (c / 2) D/2 + 8r + 4 (c % 2) + i       r = 0 .. D/16 - 1, i = 0 .. 3
// Mixing works on the bits of d. Those of c and i are mixed by an m16n8k16 product for each r, whose right factor holds
// signs and balance too, as the sum of two 16-bit matrices (relative error 2^-17; values need one, which is exact). The
// bits of r are mixed between registers, and so is a block of four.
//
// The count of instructions decides: 128 coordinates may take 140 of a warp if memory is to take half of the time. So
// there are hardly any shuffles, comparisons feed the sums and the words alike, and squares are counted from the words.
#pragma once

#include "encode_head.cuh"
#include "tiles_asm.cuh"

namespace kvq {
namespace cuda {
namespace halves {

// Transformed coordinates of a lane: token t, place r, i is y[r][i / 2][2 t + i % 2], as an m16n8 product leaves it.
template <int DIM>
using Tile = float[DIM / 16][2][4];

// Rows of the 16 tokens in shared memory, even tokens before odd ones, each 16 bytes longer than it need be: the eight
// that a product reads at once then lie in different banks.
template <int DIM>
constexpr int ROW_SIZE = DIM / 8 + 1;  // of uint4
constexpr __device__ int row_of(int token) { return token % 2 * (PART_LEN / 2) + token / 2; }

// Starts to copy the tokens in `valid`; the others stay what they were.
template <int DIM>
__device__ __forceinline__ void copy_rows(const char *x, int64_t row_bytes, int first, uint32_t valid, uint4 *rows) {
  int lane = lane_id();
#pragma unroll
  for (int n = 0; n < DIM / 16; n++) {
    int token = (n * WARP + lane) / (DIM / 8), j = (n * WARP + lane) % (DIM / 8);
    if (valid >> token & 1)
      copy_async<16>(rows + row_of(token) * ROW_SIZE<DIM> + j, x + row_bytes * (first + token) + 16 * j);
  }
}

// Adds the products at r of 16-bit rows with one right factor, or with both summands of each of two.
template <class Half, bool VALUES>
__device__ __forceinline__ void multiply_place(const uint32_t (&a)[4], const uint4 (&b)[2], float (&y)[2][4]) {
  if (VALUES) {
    mma_half<Half>(y[0], a[0], a[1], a[2], a[3], b[0].x, b[0].y);
    mma_half<Half>(y[1], a[0], a[1], a[2], a[3], b[0].z, b[0].w);
    return;
  }
#pragma unroll
  for (int n = 0; n < 2; n++) {
    mma_half<Half>(y[n], a[0], a[1], a[2], a[3], b[n].z, b[n].w);
    mma_half<Half>(y[n], a[0], a[1], a[2], a[3], b[n].x, b[n].y);
  }
}

// Mixes the bits of c and i.
template <int DIM, int BITS, bool VALUES>
__device__ __forceinline__ void multiply(const Head<DIM, BITS, VALUES> &head, const uint4 *rows, Tile<DIM> &y) {
  int lane = lane_id();
  const uint4 *row = rows + lane % PART_LEN * ROW_SIZE<DIM> + lane / PART_LEN * (DIM / 16);
#pragma unroll
  for (int r = 0; r < DIM / 16; r++) {
    uint32_t a[4];
    uint4 b[2];
    load_straight(a, row + r);
#pragma unroll
    for (int n = 0; n < 2; n++) {
      float4 shift = VALUES ? make_float4(0, 0, 0, 0) : head.shift[2 * r + n][lane % 4];
      y[r][n][0] = shift.x, y[r][n][1] = shift.y, y[r][n][2] = shift.z, y[r][n][3] = shift.w;
      b[n] = VALUES ? head.right[r][lane] : head.right[2 * r + n][lane];
    }
    if (head.dtype == BFLOAT16)
      multiply_place<__nv_bfloat16, VALUES>(a, b, y[r]);
    else
      multiply_place<__half, VALUES>(a, b, y[r]);
  }
}

// Mixes the bits of r, then applies the blocks; leaves no negative zero.
template <int DIM>
__device__ __forceinline__ void finish_rotation(const float4 (&blocks)[DIM / 16][4][4], Tile<DIM> &y) {
#pragma unroll
  for (int half = 1; half < DIM / 16; half *= 2)
#pragma unroll
    for (int r = 0; r < DIM / 16; r++)
      if (!(r & half))
#pragma unroll
        for (int i = 0; i < 8; i++) {
          float low = y[r][i / 4][i % 4], high = y[r | half][i / 4][i % 4];
          y[r][i / 4][i % 4] = low + high;
          y[r | half][i / 4][i % 4] = low - high;
        }
  int c = lane_id() % 4;
#pragma unroll
  for (int r = 0; r < DIM / 16; r++) {
    float4 row[4];
#pragma unroll
    for (int i = 0; i < 4; i++) row[i] = blocks[r][i][c];
#pragma unroll
    for (int t = 0; t < 2; t++) {
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; i++) v[i] = y[r][i / 2][2 * t + i % 2];
#pragma unroll
      for (int i = 0; i < 4; i++)
        y[r][i / 2][2 * t + i % 2] =
            fmaf(row[i].w, v[3], fmaf(row[i].z, v[2], fmaf(row[i].y, v[1], fmaf(row[i].x, v[0], 0.0f))));
    }
  }
}

// Planes of the codes of one token in one lane, magnitude bits first, the sign last. Coordinate r, i is bit
// 8 (r % 4) + 4 (r / 4 % 2) + i of word r / 8, so that two lanes together have the words of keys.
template <int DIM, int BITS>
struct Codes {
  static constexpr int WORDS = DIM < 128 ? 1 : DIM / 128;
  uint32_t plane[BITS][WORDS];
};
constexpr int place_of_bit(int bit, int word) { return bit / 8 + bit / 4 % 2 * 4 + 8 * word; }

// Of the nodes at one depth, the one that the bits above lead to.
template <int DEPTH, int NODES>
__device__ __forceinline__ float pick(const float (&table)[NODES], bool top, bool second) {
  if constexpr (DEPTH == 1) return top ? table[2] : table[1];
  if constexpr (DEPTH == 2) return top ? (second ? table[6] : table[5]) : (second ? table[4] : table[3]);
}

// Codes of token t; returns <|x|, value> of this lane. `edges` are those of the tree times the root mean square.
template <int DIM, int BITS>
__device__ __forceinline__ float quantise(const Tile<DIM> &y, int t, const Tree<BITS> &tree,
                                          const float (&edges)[Tree<BITS>::NODES], Codes<DIM, BITS> &codes) {
  float sum = 0, top_sum = 0, low_sum = 0, steps[Tree<BITS>::NODES];
#pragma unroll
  for (int node = 0; node < Tree<BITS>::NODES; node++) steps[node] = *(volatile const float *)&tree.step[node];  // once
#pragma unroll
  for (int w = 0; w < Codes<DIM, BITS>::WORDS; w++) {
    uint32_t word[BITS] = {};
#pragma unroll
    for (int at = 31; at >= 0; at--) {
      int r = place_of_bit(at, w), i = at % 4;
      uint32_t &sign = word[BITS - 1];
      if (r >= DIM / 16) {
        if (i == 0) sign <<= 4;
        continue;
      }
      float x = y[r][i / 2][2 * t + i % 2], a = fabsf(x);
      sign = (uint32_t)(((uint64_t)sign << 32 | __float_as_uint(x)) >> 31);
      sum += a;
      bool top = a > edges[0], second = false;
      if (top) word[BITS - 2] |= 1u << at, top_sum += a;
      if constexpr (BITS >= 3) {
        second = a > pick<1>(edges, top, false);
        float step = pick<1>(steps, top, false);
        if (second) word[BITS - 3] |= 1u << at, low_sum = fmaf(a, step, low_sum);
      }
      if constexpr (BITS == 4) {
        bool third = a > pick<2>(edges, top, second);
        float step = pick<2>(steps, top, second);
        if (third) word[0] |= 1u << at, low_sum = fmaf(a, step, low_sum);
      }
    }
#pragma unroll
    for (int p = 0; p < BITS; p++) codes.plane[p][w] = word[p];
  }
  return fmaf(tree.least, sum, fmaf(steps[0], top_sum, low_sum));
}

// Sum of the squares of the code values of one token in one lane.
template <int DIM, int BITS>
__device__ __forceinline__ float sum_squares(const Tree<BITS> &tree, const Codes<DIM, BITS> &codes) {
  float square = tree.least * tree.least * (DIM / 4);
#pragma unroll
  for (int node = 0; node < Tree<BITS>::NODES; node++) {
    int depth = node < 1 ? 0 : node < 3 ? 1 : 2, prefix = node + 1 - (1 << depth), count = 0;
#pragma unroll
    for (int w = 0; w < Codes<DIM, BITS>::WORDS; w++) {
      uint32_t word = codes.plane[BITS - 2 - depth][w];
#pragma unroll
      for (int above = 0; above < depth; above++) {
        uint32_t other = codes.plane[BITS - 2 - above][w];
        word &= prefix >> (depth - 1 - above) & 1 ? other : ~other;
      }
      count += __popc(word);
    }
    square = fmaf(tree.square_step[node], (float)count, square);
  }
  return square;
}

// Over the four lanes of a token.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(ALL_LANES, x, 1);
  return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

// Codes of both tokens; returns the scale of token c % 2.
template <int DIM, int BITS>
__device__ __forceinline__ float encode_tile(const Tile<DIM> &y, const Tree<BITS> &tree, int rule,
                                             Codes<DIM, BITS> (&codes)[2]) {
  bool second = lane_id() % 2;
  float norms[2], dots[2], squares[2];
#pragma unroll
  for (int t = 0; t < 2; t++) {
    float norm = 0, edges[Tree<BITS>::NODES];
#pragma unroll
    for (int m = 0; m < DIM / 4; m++) {
      float x = y[m / 4][m % 4 / 2][2 * t + m % 2];
      norm = fmaf(x, x, norm);
    }
    norm = sqrtf(quad_sum(norm));
    float rms = norm * inverse_root<DIM>(), clamped = fmaxf(rms, 1e-30f);
#pragma unroll
    for (int node = 0; node < Tree<BITS>::NODES; node++) edges[node] = tree.edge[node] * clamped;
    dots[t] = quad_sum(quantise<DIM, BITS>(y, t, tree, edges, codes[t]));
    squares[t] = quad_sum(sum_squares<DIM, BITS>(tree, codes[t]));
    norms[t] = norm;
  }
  float norm = second ? norms[1] : norms[0], dot = second ? dots[1] : dots[0];
  return scale_of(rule, norm, norm * inverse_root<DIM>(), dot, second ? squares[1] : squares[0]);
}

}  // namespace halves
}  // namespace cuda
}  // namespace kvq
