// encode of bfloat16 and float16 by tensor cores, 16 tokens of one head by one warp. Lane 4g + c has tokens g and g + 8
// and of each a quarter of the coordinates, two blocks of four of every word of 32:
//   d = 4 (8t + 2c + j) + i       t < D/32, j < 2, i < 4
// Products mix blocks, of each i apart, up to 32 of them at a time; their right factor holds signs and balance too, as
// the sum of two 16-bit matrices (relative error 2^-17; values need one, which is exact). What mixes the bits of i in a
// transform of D is part of the blocks of four, which are applied in registers.
//
// The count of instructions decides: 128 coordinates may take 140 of a warp if memory is to take half of the time. So
// bits are made as 0.0 and 1.0 by multiply-adds that saturate, and tensor cores gather them into words and add up the
// products that the scale needs; what it needs of the levels alone is counted in the words. There is a shuffle only
// where a sum of a token ends.
#pragma once

#include "encode_head.cuh"
#include "tiles_asm.cuh"

namespace kvq {
namespace cuda {
namespace halves {

// Coordinate i of block 8t + 2c + j of token g + 8r is y[i][t][2r + j], as an m16n8 product leaves it.
template <int DIM>
using Tile = float[4][DIM / 32][4];

// The 16 bytes of two blocks 8m + 2c and 8m + 2c + 1 of token g + 8r are those of slot 2m + r and this lane, which
// copies and reads them alone.
template <int DIM>
using Slots = uint4[DIM / 16][WARP];

// Starts to copy the tokens in `valid`; the others stay what they were.
template <int DIM>
__device__ __forceinline__ void copy_rows(const char *x, int row_bytes, int first, uint32_t valid, Slots<DIM> &slots) {
  int lane = lane_id(), g = lane / 4;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const char *row = x + (int64_t)row_bytes * (first + g + 8 * r) + 16 * (lane % 4);
    if (valid >> (g + 8 * r) & 1)
#pragma unroll
      for (int m = 0; m < DIM / 32; m++) copy_async<16>(&slots[2 * m + r][lane], row + 64 * m);
  }
}

// Coordinate i of two blocks.
__device__ __forceinline__ uint32_t pick(const uint4 &blocks, int i) {
  uint32_t first = i < 2 ? blocks.x : blocks.y, second = i < 2 ? blocks.z : blocks.w;
  return permute_bytes(first, second, i % 2 ? 0x7632 : 0x5410);
}

// Conditions on `always`, which is never negative, are true; the branches that they make keep the compiler from mixing
// what comes before and after, for which there are too few registers.
template <class Half, int DIM, int BITS, bool VALUES>
__device__ __forceinline__ void multiply(const Head<DIM, BITS, VALUES> &head, const uint4 *slots, Tile<DIM> &y) {
  using C = Cut<DIM>;
  constexpr int GROUP = VALUES ? 4 : 1;  // of i
  int lane = lane_id(), always = head.stop;
#pragma unroll
  for (int e = 0; e < DIM / 2; e++) y[e % 4][e / 16][e / 4 % 4] = 0;
#pragma unroll
  for (int at = 0; at < C::SPANS * C::STEPS; at++) {
    uint4 x[4];
#pragma unroll
    for (int m = 0; m < 4; m++) x[m] = slots[(4 * at + m) * WARP];
#pragma unroll
    for (int group = 0; group < 4; group += GROUP) {
      if (at % C::STEPS && always < 4 * at + group - DIM) continue;
#pragma unroll
      for (int i = group; i < group + GROUP; i++) {
        const uint4(*right)[WARP] = head.right + (at * 4 + i) * C::TILES / (VALUES ? 2 : 1);
        uint32_t a[4];
#pragma unroll
        for (int m = 0; m < 4; m++) a[m] = pick(x[m], i);
#pragma unroll
        for (int tile = 0; tile < C::TILES; tile++) {
          float(&sum)[4] = y[i][at / C::STEPS * C::TILES + tile];
          uint4 b = right[VALUES ? tile / 2 : tile][lane];
          if (!VALUES || tile % 2) mma_half<Half>(sum, a[0], a[1], a[2], a[3], b.z, b.w);
          if (!VALUES || tile % 2 == 0) mma_half<Half>(sum, a[0], a[1], a[2], a[3], b.x, b.y);
        }
      }
    }
  }
}

// Mixes the spans, then applies the blocks and takes away the centre; leaves no negative zero. Adds the squares of each
// token.
template <int DIM, int BITS, bool VALUES>
__device__ __forceinline__ void finish_rotation(const Head<DIM, BITS, VALUES> &head, Tile<DIM> &y,
                                                float (&squares)[2]) {
  using C = Cut<DIM>;
#pragma unroll
  for (int e = 0; e < 16 * C::TILES && C::SPANS == 2; e++) {
    float &first = y[e / 4 % 4][e / 16][e % 4], &second = y[e / 4 % 4][C::WORDS - C::TILES + e / 16][e % 4];
    float low = first + second;
    second = first - second, first = low;
  }
  int c = lane_id() % 4;
#pragma unroll
  for (int t = 0; t < C::WORDS; t++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      float v[2][4];
      float4 shift = VALUES ? make_float4(0, 0, 0, 0) : head.shift[t][j][c];
      float sum[4] = {shift.x, shift.y, shift.z, shift.w};
#pragma unroll
      for (int e = 0; e < 8; e++) v[e / 4][e % 4] = y[e % 4][t][2 * (e / 4) + j];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float4 row = head.blocks[t][j][i][c];
#pragma unroll
        for (int r = 0; r < 2; r++) {
          float z = fmaf(row.w, v[r][3], fmaf(row.z, v[r][2], fmaf(row.y, v[r][1], fmaf(row.x, v[r][0], sum[i]))));
          y[i][t][2 * r + j] = z, squares[r] = fmaf(z, z, squares[r]);
        }
      }
    }
}

// Sums over the coordinates that tensor cores make. Words: column 2t + h is half h of word t, from EXACT on, in which
// one is the last bit; those of signs count each coordinate as 1 or -1. Products of a token with itself are on the
// diagonal of the first eight tokens in dots[0], rows g, of the last eight in dots[1], rows g + 8.
constexpr float EXACT = 8388608;  // 2^23
template <int DIM, int BITS>
struct Sums {
  static constexpr int GROUPS = (DIM + 127) / 128;  // of four words
  float words[BITS][GROUPS][4], dots[2][4];

  __device__ __forceinline__ Sums() {
#pragma unroll
    for (int e = 0; e < BITS * GROUPS * 4; e++)
      words[e / 4 / GROUPS][e / 4 % GROUPS][e % 4] = e / 4 / GROUPS < BITS - 1 ? EXACT : EXACT + 65535;
#pragma unroll
    for (int e = 0; e < 8; e++) dots[e / 4][e % 4] = 0;
  }

  // Bits of plane p of word 4 group + c of token g + 8 r.
  __device__ __forceinline__ uint32_t word(int p, int group, int r) const {
    uint32_t low = __float_as_uint(words[p][group][2 * r]), high = __float_as_uint(words[p][group][2 * r + 1]);
    if (p < BITS - 1) return permute_bytes(low, high, 0x5410);
    return ~((low >> 1 & 0xffff) | (high << 15 & 0xffff0000));
  }

  // The element of token g or g + 8, that of the first in even lanes.
  __device__ __forceinline__ static float diagonal(const float (&x)[2][4]) {
    int g = lane_id() / 4, from = 4 * g + g / 2;
    float first = __shfl_sync(ALL_LANES, g % 2 ? x[0][1] : x[0][0], from);
    float second = __shfl_sync(ALL_LANES, g % 2 ? x[1][3] : x[1][2], from);
    return lane_id() % 2 ? second : first;
  }
};

// Adds all coordinates. Those of token g + 8r times by[r] are in units of the root mean square over SHARP.
template <int DIM, int BITS>
__device__ __forceinline__ void quantise(const Tile<DIM> &y, const float (&by)[2], const Book<BITS> &book,
                                         const uint4 (&pack)[Cut<DIM>::COLUMNS][WARP], int always,
                                         Sums<DIM, BITS> &sums) {
  constexpr int FLAGS = Book<BITS>::FLAGS, LEVELS = Book<BITS>::LEVELS;
  float edge[LEVELS];
  uint32_t level[LEVELS];
#pragma unroll
  for (int s = 0; s < LEVELS; s++)  // once
    edge[s] = *(volatile const float *)&book.edge[s], level[s] = *(volatile const uint32_t *)&book.value[s];
#pragma unroll
  for (int t = 0; t < DIM / 32; t++) {
    if (always < t - DIM) continue;  // as in multiply
    uint4 bits = pack[t % 4][lane_id()];
#pragma unroll
    for (int half = 0; half < 2; half++) {  // i = 2 half and the next
      uint32_t low = half ? bits.z : bits.x, high = half ? bits.w : bits.y;
      uint32_t both[4], sign[4], value[4], flags[FLAGS][4];
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float x = y[2 * half + e / 2][t][e % 2 * 2], z = y[2 * half + e / 2][t][e % 2 * 2 + 1];
        both[e] = pair_of<__half>(x, z), sign[e] = and_or(both[e], 0x80008000, 0x3c003c00);
        uint32_t flag[FLAGS];
        Book<BITS>::decide_both(x, z, by[e % 2], edge, flag);
#pragma unroll
        for (int b = 0; b < FLAGS; b++) flags[b][e] = flag[b];
      }
      mma_half<__half>(sums.words[FLAGS][t / 4], sign[0], sign[1], sign[2], sign[3], low, high);
#pragma unroll
      for (int b = 0; b < FLAGS; b++)
        mma_half<__half>(sums.words[FLAGS - 1 - b][t / 4], flags[b][0], flags[b][1], flags[b][2], flags[b][3], low,
                         high);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        uint32_t flag[FLAGS];
#pragma unroll
        for (int b = 0; b < FLAGS; b++) flag[b] = flags[b][e];
        value[e] = linear<FLAGS>(level, flag), both[e] &= 0x7fff7fff;
      }
#pragma unroll
      for (int r = 0; r < 2; r++)
        mma_half<__half>(sums.dots[r], value[0], value[1], value[2], value[3], both[r], both[2 + r]);
    }
  }
}

// Over the four lanes of a token: of token g in even lanes, of g + 8 in odd ones; x[r] is the lane's part of g + 8r.
template <class T>
__device__ __forceinline__ T quad_sum(const T (&x)[2]) {
  bool odd = lane_id() % 2;
  T sum = (odd ? x[1] : x[0]) + __shfl_xor_sync(ALL_LANES, odd ? x[0] : x[1], 1);
  return sum + __shfl_xor_sync(ALL_LANES, sum, 2);
}
// Both of what even and odd lanes have.
__device__ __forceinline__ void share(float x, float (&both)[2]) {
  float other = __shfl_xor_sync(ALL_LANES, x, 1);
  both[0] = lane_id() % 2 ? other : x, both[1] = lane_id() % 2 ? x : other;
}

// The square root of a sum of squares, nearly; finite, of a NaN a NaN.
__device__ __forceinline__ float root(float x) {
  x = x > 3e38f ? 3e38f : x;
  return x * rsqrtf(fmaxf(x, 1.2e-38f));
}

// Words of codes: bits of plane p of word 4 group + c of token g + 8 r.
template <int DIM, int BITS>
using Codes = uint32_t[2][BITS][Sums<DIM, BITS>::GROUPS];

// Codes of both tokens; returns the scale of token g, in even lanes, or g + 8.
template <int DIM, int BITS, bool VALUES>
__device__ __forceinline__ float encode_tile(const Head<DIM, BITS, VALUES> &head, Tile<DIM> &y,
                                             Codes<DIM, BITS> &codes) {
  float parts[2] = {0, 0}, by[2], step = head.book.half_step, back = step;
  finish_rotation(head, y, parts);
  float norm = root(quad_sum(parts)), clamped = fmaxf(norm * Cut<DIM>::INVERSE_ROOT, 1e-30f);
  if (!__all_sync(ALL_LANES, clamped > 1.0f / 256 && clamped < 1024)) {  // float16 would not hold the coordinates
    uint32_t exponent = __float_as_uint(clamped) >> 23;
    exponent = exponent < 253 ? exponent : 253;
    float power = __uint_as_float((254 - exponent) << 23), powers[2];
    clamped *= power, back *= __uint_as_float(exponent << 23);
    share(power, powers);
#pragma unroll
    for (int e = 0; e < DIM / 2; e++) y[e % 4][e / 16][e / 4 % 4] *= powers[e / 8 % 2];
  }
  share(__fdividef(SHARP, clamped), by);
  Sums<DIM, BITS> sums;
  quantise<DIM, BITS>(y, by, head.book, head.pack, head.stop, sums);
#pragma unroll
  for (int e = 0; e < 2 * BITS * sums.GROUPS; e++)
    codes[e % 2][e / 2 / sums.GROUPS][e / 2 % sums.GROUPS] = sums.word(e / 2 / sums.GROUPS, e / 2 % sums.GROUPS, e % 2);
  float dot = sums.diagonal(sums.dots) * back, square = 0;
  if (head.rule == MATCHED || head.rule == MSE) {
    int squares[2] = {head.book.squares(codes[0]), head.book.squares(codes[1])};
    square = (float)(quad_sum(squares) + DIM * head.book.square[0]) * (step * step);
  }
  return scale_of(head.rule, norm, norm * Cut<DIM>::INVERSE_ROOT, dot, square);
}

}  // namespace halves
}  // namespace cuda
}  // namespace kvq
