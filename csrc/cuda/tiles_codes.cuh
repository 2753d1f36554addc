// A tile of packed tokens: its words are copied to shared memory one tile ahead and unfolded to halves from there.
//
// Code values are in steps of the codebook (layout.h), exact halves. Two byte tables, of the upper and the lower
// halves' bytes, give four codes in two permutations. Consecutive lanes write consecutive rows, whose pitch is an odd
// number of 16 bytes: no bank conflicts.
#pragma once

#include "rows.cuh"
#include "tiles.h"
#include "tiles_asm.cuh"

namespace kvq {
namespace cuda {
namespace tiles {

// Halves of the codebook of `bits` bits, in steps.
struct HalfTable {
  uint32_t low[2], high[2];
};

__device__ __forceinline__ float step_of(const Store &s) {
  return __ldg(s.level_data + (1 << (s.bits - 1)) - 1) * (1 / TOP_LEVEL);
}

__device__ inline HalfTable half_table(const Store &s) {
  HalfTable table = {{0, 0}, {0, 0}};
  int half = 1 << (s.bits - 1);
  float by = 1 / step_of(s);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    float level = __ldg(s.level_data + i % half) * by;
    bool negative = s.bits < MAX_BITS && i >= half;  // four bits: magnitudes only, the sign is added later
    uint32_t x = __half_as_ushort(__float2half_rn(negative ? -level : level));
    table.low[i / 4] |= (x & 0xFF) << (8 * (i % 4)), table.high[i / 4] |= (x >> 8) << (8 * (i % 4));
  }
  return table;
}

// The 32 places of a word; `sign` and `mag` point at its planes, `stride` words apart.
//
// A table is indexed by a nibble: magnitude bits with the sign above them, or three magnitude bits. `index[phase]`
// holds those of codes phase, 4 + phase, .. 28 + phase, and a byte permutation takes four of them at a time.
template <int BITS>
__device__ __forceinline__ void unfold_word(const uint32_t *sign_at, const uint32_t *mag, int stride,
                                            const HalfTable &table, __half *to) {
  constexpr uint32_t EVEN = 0x55555555u, PAIRS = 0x33333333u, BIT = 0x11111111u;
  uint32_t sign = *sign_at, first = mag[0], second = BITS == 2 ? sign : mag[stride];
  uint32_t third = BITS == 3 ? sign : BITS == 4 ? mag[2 * stride] : 0;
  uint32_t even = (first & EVEN) | (second << 1 & ~EVEN), odd = (first >> 1 & EVEN) | (second & ~EVEN);
  uint32_t index[4] = {even & PAIRS, odd & PAIRS, even >> 2 & PAIRS, odd >> 2 & PAIRS};
  if constexpr (BITS > 2)
    index[0] |= third << 2 & 4 * BIT, index[1] |= third << 1 & 4 * BIT, index[2] |= third & 4 * BIT,
        index[3] |= third >> 1 & 4 * BIT;
#pragma unroll
  for (int phase = 0; phase < 4; phase++) {
    uint32_t halves[4], negative = BITS == 4 ? sign >> phase & BIT : 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      uint32_t low = permute_bytes(table.low[0], table.low[1], index[phase] >> (16 * i));
      uint32_t high = permute_bytes(table.high[0], table.high[1], index[phase] >> (16 * i));
      if constexpr (BITS == 4) high ^= permute_bytes(0x8000u, 0, negative >> (16 * i));  // byte 1 if negative, else 0
      halves[2 * i] = permute_bytes(low, high, 0x5140u), halves[2 * i + 1] = permute_bytes(low, high, 0x7362u);
    }
    ((uint4 *)to)[phase] = make_uint4(halves[0], halves[1], halves[2], halves[3]);
  }
}

// The words of one kind of a tile: `unit_words` words a plane for each token (keys) or block of 32 tokens (values).
struct Words {
  const uint32_t *sign, *mag;  // of the head, in global memory
  int64_t sign_stride, mag_stride, plane_stride;
  int unit_words, planes;
  bool gapless;

  __device__ __forceinline__ Words(const Store &s, int64_t b, int64_t h, int unit_words, bool gapless)
      : sign(s.sign + b * s.sign_stride[0] + h * s.sign_stride[1]),
        mag(s.mag + b * s.mag_stride[0] + h * s.mag_stride[1]),
        sign_stride(s.sign_stride[2]),
        mag_stride(s.mag_stride[2]),
        plane_stride(s.mag_stride[3]),
        unit_words(unit_words),
        planes(s.bits - 1),
        gapless(gapless) {}

  // Starts the copy of units first .. first + count into [capacity units][W] sign words, then [..][planes][W].
  template <int THREADS>
  __device__ __forceinline__ void copy(int first, int count, int capacity, uint32_t *to, int thread) const {
    uint32_t *to_mag = to + capacity * unit_words;
    int words = count * unit_words;
    if (gapless) {  // whole pieces of 16 bytes: capacities are multiples of 32 tokens
      const uint32_t *from = sign + (int64_t)first * unit_words, *from_mag = mag + (int64_t)first * unit_words * planes;
      for (int i = 4 * thread; i < words; i += 4 * THREADS) copy_async<16>(to + i, from + i);
      for (int i = 4 * thread; i < words * planes; i += 4 * THREADS) copy_async<16>(to_mag + i, from_mag + i);
      return;
    }
#pragma unroll 1
    for (int i = thread; i < words; i += THREADS) {
      int unit = i / unit_words, w = i % unit_words;
      copy_async<4>(to + i, sign + (first + unit) * sign_stride + w);
#pragma unroll 1
      for (int p = 0; p < planes; p++)
        copy_async<4>(to_mag + (unit * planes + p) * unit_words + w,
                      mag + (first + unit) * mag_stride + p * plane_stride + w);
    }
  }
};

// Keys [places of tokens, places of coordinates], rows `pitch` halves apart.
template <int BITS, int TOKENS, int THREADS>
__device__ __forceinline__ void unfold_keys(const uint32_t *words, int num_words, const HalfTable &table, __half *to,
                                            int pitch, int thread) {
  const uint32_t *mag = words + TOKENS * num_words;
  for (int i = thread; i < TOKENS * num_words; i += THREADS) {
    int place = i % TOKENS, w = i / TOKENS, token = code_of(place);
    unfold_word<BITS>(words + token * num_words + w, mag + token * (BITS - 1) * num_words + w, num_words, table,
                      to + place * pitch + 32 * w);
  }
}

// Values transposed: [coordinates, places of tokens].
template <int BITS, int TOKENS, int THREADS>
__device__ __forceinline__ void unfold_values(const uint32_t *words, int dim, const HalfTable &table, __half *to,
                                              int pitch, int thread) {
  const uint32_t *mag = words + TOKENS / BLOCK_LEN * dim;
#pragma unroll
  for (int block = 0; block < TOKENS / BLOCK_LEN; block++)
    for (int i = thread; i < dim; i += THREADS)
      unfold_word<BITS>(words + block * dim + i, mag + block * (BITS - 1) * dim + i, dim, table,
                        to + i * pitch + BLOCK_LEN * block);
}

template <int TOKENS, int THREADS>
__device__ __forceinline__ void unfold_keys(int bits, const uint32_t *words, int num_words, const HalfTable &table,
                                            __half *to, int pitch, int thread) {
  if (bits == 2) unfold_keys<2, TOKENS, THREADS>(words, num_words, table, to, pitch, thread);
  if (bits == 3) unfold_keys<3, TOKENS, THREADS>(words, num_words, table, to, pitch, thread);
  if (bits == 4) unfold_keys<4, TOKENS, THREADS>(words, num_words, table, to, pitch, thread);
}
template <int TOKENS, int THREADS>
__device__ __forceinline__ void unfold_values(int bits, const uint32_t *words, int dim, const HalfTable &table,
                                              __half *to, int pitch, int thread) {
  if (bits == 2) unfold_values<2, TOKENS, THREADS>(words, dim, table, to, pitch, thread);
  if (bits == 3) unfold_values<3, TOKENS, THREADS>(words, dim, table, to, pitch, thread);
  if (bits == 4) unfold_values<4, TOKENS, THREADS>(words, dim, table, to, pitch, thread);
}

}  // namespace tiles
}  // namespace cuda
}  // namespace kvq
