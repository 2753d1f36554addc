// A tile of the packed body in shared memory: 128 tokens, that is 4 blocks of 32, of one key/value head.
//
// Lane 4 g + c reads keys of half block g, 16 tokens, and whole words of the values of block c. Both are padded so that
// the lanes' reads fall into different banks.
#pragma once

#include "decode_codes.cuh"
#include "decode_args.h"

namespace kvq {
namespace cuda {

constexpr int WARPS = 4, THREADS = 32 * WARPS;
__host__ __device__ constexpr int larger(int x, int y) { return x > y ? x : y; }

constexpr int TILE_BLOCKS = 4, TILE_LEN = TILE_BLOCKS * BLOCK_LEN;
constexpr int TILE_HALVES = 2 * TILE_BLOCKS, HALF_LEN = BLOCK_LEN / 2;

template <int KBITS, int VBITS, int DIM, int VDIM>
struct TileLayout {  // all in words
  static constexpr int WORDS = (DIM + 31) / 32, MAG_STRIDE = (KBITS - 1) * WORDS;
  static constexpr int VALUE_PAD = (8 + 32 - VDIM % 32) % 32, MAG_PAD = (8 + 32 - (VBITS - 1) * VDIM % 32) % 32;
  static constexpr int KEY_SIGN = 0, KEY_MAG = KEY_SIGN + TILE_LEN * WORDS + 32;
  static constexpr int VALUE_SIGN = KEY_MAG + TILE_LEN * MAG_STRIDE + 32;
  static constexpr int VALUE_MAG = VALUE_SIGN + TILE_BLOCKS * (VDIM + VALUE_PAD);
  static constexpr int KEY_SCALE = VALUE_MAG + TILE_BLOCKS * ((VBITS - 1) * VDIM + MAG_PAD);
  static constexpr int VALUE_SCALE = KEY_SCALE + TILE_LEN / 2, SIZE = VALUE_SCALE + TILE_LEN / 2;
  static_assert(SIZE % 4 == 0, "tiles are copied in units of 16 bytes");

  // Eight half blocks begin in eight different units of 4 words of the 32 banks.
  static __device__ __forceinline__ int key_sign(int half) { return KEY_SIGN + half * (HALF_LEN * WORDS + 4); }
  static __device__ __forceinline__ int key_mag(int half) { return KEY_MAG + half * (HALF_LEN * MAG_STRIDE + 4); }
  static __device__ __forceinline__ int value_sign(int block) { return VALUE_SIGN + block * (VDIM + VALUE_PAD); }
  static __device__ __forceinline__ int value_mag(int block) {
    return VALUE_MAG + block * ((VBITS - 1) * VDIM + MAG_PAD);
  }
};

// Where lane (g, c) reads of a tile that lies at word `from`: keys of half block g, values of block c, scales of tokens
// `first` and on.
template <class L>
struct TilePlaces {
  int key_sign, key_mag, key_scale, value_sign, value_mag, value_scale;
  __device__ __forceinline__ TilePlaces(int from, int g, int c, int first)
      : key_sign(from + L::key_sign(g)),
        key_mag(from + L::key_mag(g)),
        key_scale(from + L::KEY_SCALE + first / 2),
        value_sign(from + L::value_sign(c)),
        value_mag(from + L::value_mag(c)),
        value_scale(from + L::VALUE_SCALE + first / 2) {}
  __device__ __forceinline__ void hold() {
    cuda::hold(key_sign), cuda::hold(key_mag), cuda::hold(key_scale);
    cuda::hold(value_sign), cuda::hold(value_mag), cuda::hold(value_scale);
  }
};

// One (sequence, head) of the stores, and the copies of its tiles by a warp: 16 bytes a lane and instruction, of
// scales 8.
template <class L, int KBITS, int VBITS, int VDIM>
struct TileSource {
  const char *key_sign, *key_mag, *value_sign, *value_mag, *key_scale, *value_scale;  // of this lane
  int num_blocks, stop, whole;  // blocks that hold tokens; tiles below `stop` are copied, below `whole` without gaps

  __device__ __forceinline__ TileSource(const DecodeArgs &a, int b, int h, int stop, int lane) : stop(stop) {
    const StoreArgs &k = a.keys, &v = a.values;
    auto of = [=](const auto *data, const int *stride, int unit = 16) {
      return (const char *)(data + (int64_t)b * stride[0] + (int64_t)h * stride[1]) + unit * lane;
    };
    key_sign = of(k.sign, k.sign_stride), key_mag = of(k.mag, k.mag_stride), key_scale = of(k.scale, k.scale_stride, 8);
    value_sign = of(v.sign, v.sign_stride), value_mag = of(v.mag, v.mag_stride);
    value_scale = of(v.scale, v.scale_stride, 8);
    num_blocks = (a.length + BLOCK_LEN - 1) / BLOCK_LEN, whole = min(stop, num_blocks / TILE_BLOCKS);
  }
  // Has the addresses ready here.
  __device__ __forceinline__ void hold() {
    cuda::hold(key_sign), cuda::hold(key_mag), cuda::hold(key_scale);
    cuda::hold(value_sign), cuda::hold(value_mag), cuda::hold(value_scale);
  }

  // The first `count` of PIECES pieces of a tile, of WORDS words each, from `from` to `shared` + to(piece), a place in
  // words; pieces lie evenly apart.
  template <int PIECES, int WORDS, class Place>
  static __device__ __forceinline__ void copy_tile(const char *from, uint32_t shared, Place to, int lane) {
    constexpr int UNITS = WORDS / 4;
    if constexpr (PIECES * UNITS % 32 != 0) {
      copy_pieces<WORDS>(from, shared, to, PIECES, lane);
    } else {
      if constexpr (UNITS % 32 != 0 && 32 % UNITS != 0) cuda::hold(lane);  // places are not kept in registers
#pragma unroll
      for (int i = 0; i < PIECES * UNITS; i += 32)
        if constexpr (UNITS % 32 == 0)
          start_copy(shared + 4 * to(i / UNITS) + 16 * (i % UNITS) + 16 * lane, from + 16 * i);
        else if constexpr (32 % UNITS == 0)
          start_copy(shared + 4 * to(i / UNITS) + 4 * (to(lane / UNITS) - to(0)) + 16 * (lane % UNITS), from + 16 * i);
        else
          start_copy(shared + 4 * to((i + lane) / UNITS) + 16 * ((i + lane) % UNITS), from + 16 * i);
    }
  }
  template <int WORDS, class Place>
  static __device__ __forceinline__ void copy_pieces(const char *from, uint32_t shared, Place to, int count, int lane) {
    constexpr int UNITS = WORDS / 4;
#pragma unroll 1
    for (int i = lane; i < count * UNITS; i += 32)
      start_copy(shared + 4 * to(i / UNITS) + 16 * (i % UNITS), from + 16 * (i - lane));
  }

  // PIECES of SIGN words of signs and MAG of magnitudes.
  template <int PIECES, int SIGN, int MAG, class SignPlace, class MagPlace>
  __device__ __forceinline__ void start(int tile, const char *sign, const char *mag, const char *scale, uint32_t shared,
                                        SignPlace sign_to, MagPlace mag_to, int scale_to, int lane) const {
    uint32_t scales = shared + 4 * scale_to + 8 * lane;
    sign = advanced(sign, tile, 4 * PIECES * SIGN), mag = advanced(mag, tile, 4 * PIECES * MAG);
    scale = advanced(scale, tile, 2 * TILE_LEN);
    if (__builtin_expect(tile < whole, 1)) {
      copy_tile<PIECES, SIGN>(sign, shared, sign_to, lane), copy_tile<PIECES, MAG>(mag, shared, mag_to, lane);
      start_copy_of_8(scales, scale);
    } else if (tile < stop) {
      int blocks = num_blocks - tile * TILE_BLOCKS, count = blocks * (PIECES / TILE_BLOCKS);
      copy_pieces<SIGN>(sign, shared, sign_to, count, lane), copy_pieces<MAG>(mag, shared, mag_to, count, lane);
      if (lane < 8 * blocks) start_copy_of_8(scales, scale);
    }
  }

  // Start the copies of a tile's keys or values, if it is below `stop`, to an address in shared memory; the caller
  // commits them.
  __device__ __forceinline__ void start_keys(int tile, uint32_t shared, int lane) const {
    start<TILE_HALVES, HALF_LEN * L::WORDS, HALF_LEN * L::MAG_STRIDE>(tile, key_sign, key_mag, key_scale, shared,
                                                                      L::key_sign, L::key_mag, L::KEY_SCALE, lane);
  }
  __device__ __forceinline__ void start_values(int tile, uint32_t shared, int lane) const {
    start<TILE_BLOCKS, VDIM, (VBITS - 1) * VDIM>(tile, value_sign, value_mag, value_scale, shared, L::value_sign,
                                                 L::value_mag, L::VALUE_SCALE, lane);
  }
};

}  // namespace cuda
}  // namespace kvq
