// From bit planes to bytes: one 32-bit word of every plane of 32 codes becomes four times eight bytes.
//
// Phase j of a word holds codes 4n + j, n = 0 .. 7: those bits are one a nibble apart, so that three planes shifted and
// masked are at once the selector of a byte permutation, whose table holds the eight signed levels. Levels are n + 1/2
// steps (layout.h): the byte of a code is n, or ~n = -n - 1 for a negative one, half a step below its value.
#pragma once

#include "kvq/layout.h"
#include "decode_asm.cuh"

namespace kvq {
namespace cuda {

constexpr uint32_t NIBBLES = 0x11111111u;

// Bytes of the codebook of `bits` bits, and the step; made by a whole warp from the levels that its lanes read before.
struct ByteTable {
  uint32_t low, high;
  uint32_t four, limb;  // 4 and 256, which the compiler does not know: it would shift
  float step;
  static __device__ __forceinline__ float level_of(const float *levels, int bits, int lane) {
    return levels[lane & ((1 << (bits - 1)) - 1)];
  }
  static __device__ __forceinline__ float step_of(const float *levels, int bits) {
    return levels[(1 << (bits - 1)) - 1] * (1.0f / TOP_LEVEL);
  }
  __device__ __forceinline__ ByteTable(float level, int bits, int lane) {
    int half = 1 << (bits - 1), i = lane & 7;
    step = __shfl_sync(~0u, level, half - 1) * (1.0f / TOP_LEVEL);
    int n = (int)floorf(__fdividef(level, step));
    if (bits < MAX_BITS && i >= half) n = ~n;  // four bits: magnitudes only, the sign flips the byte
    uint32_t word = (n & 0xFFu) << (8 * (i & 3));
    word |= __shfl_xor_sync(~0u, word, 1);
    word |= __shfl_xor_sync(~0u, word, 2);
    low = __shfl_sync(~0u, word, 0), high = __shfl_sync(~0u, word, 4);
    four = __popc(__ballot_sync(~0u, lane < 4)), limb = __reduce_add_sync(~0u, 8u);
  }
};

// The three bits of every code of a word as selectors of a byte permutation, four bits each. Phase p holds the codes
// 4 n + p, the first four of them in the lower half of its word.
struct Selectors {
  uint32_t of_phase[4];
};

template <int BITS>
struct Planes {
  uint32_t sign, mag[BITS - 1];

  // Shifts to the left are products where that takes one instruction, of a pipe that has less to do.
  __device__ __forceinline__ Selectors selectors(const ByteTable &t) const {
    const uint32_t even = 0x55555555u, pair = 0x33333333u;
    Selectors s;
    if constexpr (BITS == 2) {
      uint32_t u0 = select_bits(mag[0], sign << 1, even), u1 = select_bits(mag[0] >> 1, sign, even);
      s.of_phase[0] = u0 & pair, s.of_phase[1] = u1 & pair, s.of_phase[2] = u0 >> 2 & pair,
      s.of_phase[3] = u1 >> 2 & pair;
    } else {
      uint32_t u0 = select_bits(mag[0], mag[1] << 1, even), u1 = select_bits(mag[0] >> 1, mag[1], even);
      uint32_t top = BITS == 3 ? sign : mag[BITS - 2], t0 = top & even, t1 = top >> 1 & even;
      s.of_phase[0] = select_bits(u0, t0 * t.four, pair), s.of_phase[2] = select_bits(u0 >> 2, t0, pair);
      s.of_phase[1] = select_bits(u1, t1 * t.four, pair), s.of_phase[3] = select_bits(u1 >> 2, t1, pair);
    }
    return s;
  }

  // The selector of one phase that is known at run time only.
  __device__ __forceinline__ uint32_t selector(int phase) const {
    uint32_t s = (mag[0] >> phase) & NIBBLES;
    if constexpr (BITS == 2) return s | (((sign >> phase) & NIBBLES) << 1);
    uint32_t top = BITS == 3 ? sign : mag[BITS - 2];
    return s | (((mag[BITS > 2] >> phase) & NIBBLES) << 1) | (((top >> phase) & NIBBLES) << 2);
  }

  // Bytes of codes n = 0 .. 3 and 4 .. 7 of a phase.
  __device__ __forceinline__ void bytes(const ByteTable &t, uint32_t selector, int phase, uint32_t &b0,
                                        uint32_t &b1) const {
    b0 = permute_bytes(t.low, t.high, selector), b1 = permute_bytes(t.low, t.high, selector >> 16);
    if constexpr (BITS == 4) {
      uint32_t negative = ((sign >> phase) & NIBBLES) << 2;  // picks byte 4, all ones
      b0 ^= permute_bytes(0, ~0u, negative), b1 ^= permute_bytes(0, ~0u, negative >> 16);
    }
  }
};

}  // namespace cuda
}  // namespace kvq
