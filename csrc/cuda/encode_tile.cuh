// encode of bfloat16 and float16 by tensor cores, 16 tokens of one head by one warp. Lane 4g + c has tokens g and g + 8
// and of each a quarter of the coordinates, two blocks of four of every word of 32:
//   d = 4 (8t + 2c + j) + i       t < D/32, j < 2, i < 4
// Products mix blocks, of each i apart, up to 32 of them at a time; their right factor holds signs and balance too, as
// the sum of two 16-bit matrices (relative error 2^-17; values need one, which is exact), their sums begin with what
// the centre becomes. What mixes the bits of i in a transform of D is part of the blocks of four, which products apply
// too.
//
// Sums of the first products become float16, two in a register, in units of a power of two where they would not fit. As
// vectors are 16-bit numbers themselves, that moves a code to its neighbour only where the coordinate lies at the edge,
// within some 2^-9 of the root mean square: .06 % of the codes of 3 bits, and the squared error stays what it was.
//
// Instructions and their latencies decide, not memory. So bits are made as 0.0 and 1.0 by comparisons of pairs, and
// tensor cores gather them into words and add up the products that the scale needs; what it needs of the levels alone
// is counted in the words. There is a shuffle only where a sum of a token ends.
#pragma once

#include "encode_head.cuh"
#include "tiles_asm.cuh"

namespace kvq {
namespace cuda {
namespace halves {

// Coordinates i of blocks 8t + 2c and 8t + 2c + 1 of token g + 8r are y[i][t][r], a pair of float16.
template <int DIM>
using Tile = uint32_t[4][DIM / 32][2];

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
    const char *row = x + (int64_t)row_bytes * (first + g + 8 * r);
    hold(row), row += 16 * (lane % 4);
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

// Mixes the blocks of each span, times by[r] if SCALED, powers of two, of token g + 8r. Adds their squares.
template <class Half, bool SCALED, int DIM, int BITS, bool VALUES>
__device__ __forceinline__ void mix(const Head<DIM, BITS, VALUES> &head, const uint4 *slots, const float (&by)[2],
                                    Tile<DIM> &z, float (&squares)[2]) {
  using C = Cut<DIM>;
  int lane = lane_id();
  float sums[4] = {};
#pragma unroll
  for (int span = 0; span < C::SPANS; span++) {
    uint4 x[C::STEPS][4];
#pragma unroll
    for (int m = 0; m < 4 * C::STEPS; m++) x[m / 4][m % 4] = slots[(4 * C::STEPS * span + m) * WARP];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float sum[C::TILES][4];
#pragma unroll
      for (int tile = 0; tile < C::TILES; tile++) {
        float4 shift = VALUES ? make_float4(0, 0, 0, 0) : head.shift[i][span * C::TILES + tile][lane % 4];
        sum[tile][0] = shift.x, sum[tile][1] = shift.y, sum[tile][2] = shift.z, sum[tile][3] = shift.w;
      }
#pragma unroll
      for (int step = 0; step < C::STEPS; step++) {
        int at = span * C::STEPS + step;
        uint32_t a[4];
#pragma unroll
        for (int m = 0; m < 4; m++) a[m] = pick(x[step][m], i);
#pragma unroll
        for (int summand = head.SUMMANDS - 1; summand >= 0; summand--) {
          uint4 b = head.right[summand][at * 4 + i][lane];
#pragma unroll
          for (int tile = 0; tile < C::TILES; tile++) {
            uint32_t flip = step & tile / 2 ? 0x80008000 : 0;
            mma_half<Half>(sum[tile], a[0], a[1], a[2], a[3], (tile % 2 ? b.z : b.x) ^ flip,
                           (tile % 2 ? b.w : b.y) ^ flip);
          }
        }
      }
      if (SCALED)
#pragma unroll
        for (int e = 0; e < 4 * C::TILES; e++) sum[e / 4][e % 4] *= by[e % 4 / 2];
#pragma unroll
      for (int e = 0; e < 4 * C::TILES; e++) sums[e % 4] = fmaf(sum[e / 4][e % 4], sum[e / 4][e % 4], sums[e % 4]);
#pragma unroll
      for (int e = 0; e < 2 * C::TILES; e++)
        z[i][span * C::TILES + e / 2][e % 2] = pair_of<__half>(sum[e / 2][e % 2 * 2], sum[e / 2][e % 2 * 2 + 1]);
    }
  }
  squares[0] = sums[0] + sums[1], squares[1] = sums[2] + sums[3];
}

// Mixes the spans, then applies the blocks; leaves no negative zero.
template <int DIM, int BITS, bool VALUES>
__device__ __forceinline__ void finish_rotation(const Head<DIM, BITS, VALUES> &head, Tile<DIM> &y) {
  using C = Cut<DIM>;
  constexpr uint32_t ONE = 0x3c003c00, MINUS_ONE = 0xbc00bc00;
#pragma unroll
  for (int e = 0; e < 8 * C::TILES && C::SPANS == 2; e++) {
    uint32_t &first = y[e / 2 % 4][e / 8][e % 2], &second = y[e / 2 % 4][C::WORDS - C::TILES + e / 8][e % 2];
    uint32_t low = fma_pair(first, ONE, second);
    second = fma_pair(second, MINUS_ONE, first), first = low;
  }
#pragma unroll
  for (int t = 0; t < C::WORDS; t++) {
    uint32_t of[4][2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint4 b = head.blocks[t][i][lane_id()];
      of[i][0] = of[i][1] = 0;
      mma_half_pairs(of[i], y[0][t][0], y[0][t][1], y[1][t][0], y[1][t][1], b.x, b.y);
      mma_half_pairs(of[i], y[2][t][0], y[2][t][1], y[3][t][0], y[3][t][1], b.z, b.w);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) y[i][t][0] = of[i][0], y[i][t][1] = of[i][1];
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
    int g = lane_id() / 4;
    float first = __shfl_sync(ALL_LANES, g % 2 ? x[0][1] : x[0][0], g / 2, 4);
    float second = __shfl_sync(ALL_LANES, g % 2 ? x[1][3] : x[1][2], g / 2, 4);
    return lane_id() % 2 ? second : first;
  }
};

// Adds all coordinates; edges of token g + 8r are edge[r].
template <int DIM, int BITS>
__device__ __forceinline__ void quantise(const Tile<DIM> &y, const uint32_t (&edge)[2][Book<BITS>::LEVELS],
                                         const Book<BITS> &book, const uint4 (&pack)[Cut<DIM>::COLUMNS][WARP],
                                         Sums<DIM, BITS> &sums) {
  constexpr int FLAGS = Book<BITS>::FLAGS, LEVELS = Book<BITS>::LEVELS;
  uint32_t level[LEVELS];
#pragma unroll
  for (int s = 0; s < LEVELS; s++) level[s] = *(volatile const uint32_t *)&book.value[s];  // once
#pragma unroll
  for (int t = 0; t < DIM / 32; t++) {
    uint4 bits = pack[t % 4][lane_id()];
#pragma unroll
    for (int half = 0; half < 2; half++) {  // i = 2 half and the next
      uint32_t low = half ? bits.z : bits.x, high = half ? bits.w : bits.y;
      uint32_t size[4], sign[4], value[4], flags[FLAGS][4];
#pragma unroll
      for (int e = 0; e < 4; e++) {
        uint32_t both = y[2 * half + e / 2][t][e % 2];
        sign[e] = and_or(both, 0x80008000, 0x3c003c00), size[e] = both & 0x7fff7fff;
      }
      mma_half<__half>(sums.words[FLAGS][t / 4], sign[0], sign[1], sign[2], sign[3], low, high);
#pragma unroll
      for (int b = 0; b < FLAGS; b++) {
#pragma unroll
        for (int e = 0; e < 4; e++) flags[b][e] = Book<BITS>::decide(b, size[e], edge[e % 2], flags, e);
        mma_half_k8(sums.words[FLAGS - 1 - b][t / 4], flags[b][0], flags[b][1], low);
        mma_half_k8(sums.words[FLAGS - 1 - b][t / 4], flags[b][2], flags[b][3], high);
      }
#pragma unroll
      for (int e = 0; e < 4; e++) {
        uint32_t flag[FLAGS];
#pragma unroll
        for (int b = 0; b < FLAGS; b++) flag[b] = flags[b][e];
        value[e] = linear<FLAGS>(level, flag);
      }
#pragma unroll
      for (int r = 0; r < 2; r++)
        mma_half<__half>(sums.dots[r], value[0], value[1], value[2], value[3], size[r], size[2 + r]);
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

// Norms from the squares of mixed coordinates, as what follows only turns them: of token g, in even lanes, or g + 8.
template <int DIM>
__device__ __forceinline__ float norm_of(const float (&squares)[2]) {
  constexpr float GAIN = 2 * MIXED * Cut<DIM>::INVERSE_ROOT * (Cut<DIM>::SPANS == 2 ? 1.41421356f : 1);
  return GAIN * root(quad_sum(squares));
}
// Whether coordinates of that norm, and all that is made of them, are float16.
template <int DIM>
__device__ __forceinline__ bool fits_float16(float norm) {
  constexpr float SMALLEST = 1.0f / 2048, LARGEST = 1024;
  float rms = norm * Cut<DIM>::INVERSE_ROOT;
  return rms > SMALLEST && rms < LARGEST;
}

struct Mixed {
  float norm, unit;
};

// Mixes where a token does not fit: the slots become mixed coordinates in units, powers of two, of each token.
template <int DIM, int BITS, bool VALUES>
__device__ __attribute__((noinline)) Mixed mix_any(const Head<DIM, BITS, VALUES> &head, uint4 *slots) {
  constexpr int MOST_TRIES = 3, WIDE = 64;  // squares may be out of float32, that many times
  Tile<DIM> z;
  float squares[2], by[2] = {1, 1}, unit = 1, norm;
#pragma unroll 1
  for (int tried = 0;; tried++) {
    if (head.dtype == BFLOAT16)
      mix<__nv_bfloat16, true>(head, slots, by, z, squares);
    else
      mix<__half, true>(head, slots, by, z, squares);
    norm = norm_of<DIM>(squares);
    if (tried == MOST_TRIES || __all_sync(ALL_LANES, fits_float16<DIM>(norm))) break;
    int exponent = (int)(__float_as_uint(norm) >> 23 & 255) - 127;
    exponent = exponent < -WIDE ? -WIDE : exponent < WIDE ? exponent : WIDE;
    unit *= __uint_as_float((uint32_t)(127 + exponent) << 23);
    unit = unit < 0x1p-126f ? 0x1p-126f : unit < 0x1p126f ? unit : 0x1p126f;
    share(__uint_as_float((254u << 23) - __float_as_uint(unit)), by);  // 1 / unit
  }
#pragma unroll
  for (int e = 0; e < DIM / 16; e++)
    slots[e * WARP] = make_uint4(z[e % 2 * 2][e / 2][0], z[e % 2 * 2][e / 2][1], z[e % 2 * 2 + 1][e / 2][0],
                                 z[e % 2 * 2 + 1][e / 2][1]);
  return {norm, unit};
}

// Mixed coordinates of 16 tokens, of which those in `valid` count: in units of the head's unit times that of each
// token, which is of token g, in even lanes, or g + 8, as the norm.
template <int DIM, int BITS, bool VALUES>
__device__ __forceinline__ Mixed mix(const Head<DIM, BITS, VALUES> &head, uint4 *slots, uint32_t valid, Tile<DIM> &z) {
  float squares[2];
  const float by[2] = {1, 1};
  if (head.dtype == BFLOAT16)
    mix<__nv_bfloat16, false>(head, slots, by, z, squares);
  else
    mix<__half, false>(head, slots, by, z, squares);
  Mixed mixed = {norm_of<DIM>(squares), 1};
  bool counts = valid >> (lane_id() / 4 + lane_id() % 2 * 8) & 1;
  if (__all_sync(ALL_LANES, fits_float16<DIM>(mixed.norm) || !counts)) return mixed;
  mixed = mix_any(head, slots);
#pragma unroll
  for (int e = 0; e < DIM / 16; e++) {
    uint4 x = slots[e * WARP];
    z[e % 2 * 2][e / 2][0] = x.x, z[e % 2 * 2][e / 2][1] = x.y;
    z[e % 2 * 2 + 1][e / 2][0] = x.z, z[e % 2 * 2 + 1][e / 2][1] = x.w;
  }
  return mixed;
}

// Codes of both tokens; returns the scale of token g, in even lanes, or g + 8, as `mixed` has norm and unit.
template <int DIM, int BITS, bool VALUES>
__device__ __forceinline__ float encode_tile(const Head<DIM, BITS, VALUES> &head, const Tile<DIM> &y,
                                             const Mixed &mixed, Codes<DIM, BITS> &codes) {
  constexpr int LEVELS = Book<BITS>::LEVELS;
  float rms[2], step = head.book.half_step, unit = head.unit * mixed.unit;
  share(fmaxf(mixed.norm * Cut<DIM>::INVERSE_ROOT, __fdividef(1e-30f, unit)), rms);
  uint32_t edges[2][LEVELS];
#pragma unroll
  for (int s = 1; s < LEVELS; s++) {
    float edge = head.book.edge[s];
#pragma unroll
    for (int r = 0; r < 2; r++) edges[r][s] = pair_of<__half>(edge * rms[r], edge * rms[r]);
  }
  Sums<DIM, BITS> sums;
  quantise<DIM, BITS>(y, edges, head.book, head.pack, sums);
#pragma unroll
  for (int e = 0; e < 2 * BITS * sums.GROUPS; e++)
    codes[e % 2][e / 2 / sums.GROUPS][e / 2 % sums.GROUPS] = sums.word(e / 2 / sums.GROUPS, e / 2 % sums.GROUPS, e % 2);
  float dot = sums.diagonal(sums.dots) * step * unit, square = 0;
  float norm = mixed.norm * unit;
  if (head.rule == MATCHED || head.rule == MSE) {
    int squares[2] = {head.book.squares(codes[0]), head.book.squares(codes[1])};
    square = (float)(quad_sum(squares) + DIM * head.book.square[0]) * (step * step);
  }
  return scale_of(head.rule, norm, norm * Cut<DIM>::INVERSE_ROOT, dot, square);
}

}  // namespace halves
}  // namespace cuda
}  // namespace kvq
