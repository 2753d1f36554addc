// A tile of the packed body in shared memory: 128 tokens, that is 4 blocks of 32, of one key/value head.
//
// Lane c of four (lane = 4 g + c) works on block c throughout: it has scores of that block's tokens and whole words of
// its values. Blocks are padded so that the lanes' reads fall into different banks.
#pragma once

#include "decode_codes.cuh"
#include "decode_args.h"

namespace kvq {
namespace cuda {

constexpr int WARPS = 4, THREADS = 32 * WARPS;
__host__ __device__ constexpr int larger(int x, int y) { return x > y ? x : y; }

constexpr int TILE_BLOCKS = 4, TILE_LEN = TILE_BLOCKS * BLOCK_LEN;

// Padding of block i, in units of 4 words, so that eight lanes of two tokens (`stride` words apart) and four blocks
// read eight different units of the 32 banks.
__host__ __device__ constexpr int key_pad(int stride, int i) {
  return stride / 4 % 8 == 2 || stride / 4 % 8 == 6 ? (i & 1) + 4 * (i >> 1) : stride / 4 % 8 == 4 ? i : 2 * i;
}

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

  static __device__ __forceinline__ int key_sign(int block) {
    return KEY_SIGN + block * BLOCK_LEN * WORDS + 4 * key_pad(WORDS, block);
  }
  static __device__ __forceinline__ int key_mag(int block) {
    return KEY_MAG + block * BLOCK_LEN * MAG_STRIDE + 4 * key_pad(MAG_STRIDE, block);
  }
  static __device__ __forceinline__ int value_sign(int block) { return VALUE_SIGN + block * (VDIM + VALUE_PAD); }
  static __device__ __forceinline__ int value_mag(int block) {
    return VALUE_MAG + block * ((VBITS - 1) * VDIM + MAG_PAD);
  }
};

// One (sequence, head) of the stores, and the copies of its tiles by a warp: 16 bytes a lane and instruction.
template <class L, int KBITS, int VBITS, int VDIM>
struct TileSource {
  const char *key_sign, *key_mag, *value_sign, *value_mag, *key_scale, *value_scale;  // of this lane
  int num_blocks;                                                                     // that hold tokens

  __device__ __forceinline__ TileSource(const DecodeArgs &a, int b, int h, int lane) {
    const StoreArgs &k = a.keys, &v = a.values;
    auto of = [=](const auto *data, const int *stride) {
      return (const char *)(data + (int64_t)b * stride[0] + (int64_t)h * stride[1]) + 16 * lane;
    };
    key_sign = of(k.sign, k.sign_stride), key_mag = of(k.mag, k.mag_stride), key_scale = of(k.scale, k.scale_stride);
    value_sign = of(v.sign, v.sign_stride), value_mag = of(v.mag, v.mag_stride);
    value_scale = of(v.scale, v.scale_stride);
    num_blocks = (a.length + BLOCK_LEN - 1) / BLOCK_LEN;
  }
  // Has the addresses ready here.
  __device__ __forceinline__ void hold() {
    cuda::hold(key_sign), cuda::hold(key_mag), cuda::hold(key_scale);
    cuda::hold(value_sign), cuda::hold(value_mag), cuda::hold(value_scale);
  }

  // Up to four blocks of WORDS words each from `from` to `shared` + to(block), a place in words.
  template <int WORDS, class Place>
  static __device__ __forceinline__ void copy_blocks(const char *from, uint32_t shared, Place to, int blocks,
                                                     int lane) {
    constexpr int UNITS = WORDS / 4, EACH = UNITS / 32;
    if (UNITS % 32 == 0 && blocks == TILE_BLOCKS) {
#pragma unroll
      for (int i = 0; i < TILE_BLOCKS * EACH; i++)
        start_copy(shared + 4 * to(i / EACH) + 512 * (i % EACH) + 16 * lane, from + 512 * i);
    } else {
#pragma unroll 1
      for (int i = lane; i < blocks * UNITS; i += 32)
        start_copy(shared + 4 * to(i / UNITS) + 16 * (i % UNITS), from + 16 * (i - lane));
    }
  }
  static __device__ __forceinline__ void copy_scales(const char *from, uint32_t shared, int blocks, int lane) {
    if (lane < 4 * blocks) start_copy(shared + 16 * lane, from);
  }

  // Start the copies of a tile's keys or values to an address in shared memory; the caller commits them.
  __device__ __forceinline__ void start_keys(int tile, uint32_t shared, int lane) const {
    constexpr int SIGN = BLOCK_LEN * L::WORDS, MAG = BLOCK_LEN * L::MAG_STRIDE;
    int blocks = min(num_blocks - tile * TILE_BLOCKS, TILE_BLOCKS);
    copy_blocks<SIGN>(advanced(key_sign, tile, 16 * SIGN), shared, L::key_sign, blocks, lane);
    copy_blocks<MAG>(advanced(key_mag, tile, 16 * MAG), shared, L::key_mag, blocks, lane);
    copy_scales(advanced(key_scale, tile, 2 * TILE_LEN), shared + 4 * L::KEY_SCALE, blocks, lane);
  }
  __device__ __forceinline__ void start_values(int tile, uint32_t shared, int lane) const {
    constexpr int MAG = (VBITS - 1) * VDIM;
    int blocks = min(num_blocks - tile * TILE_BLOCKS, TILE_BLOCKS);
    copy_blocks<VDIM>(advanced(value_sign, tile, 16 * VDIM), shared, L::value_sign, blocks, lane);
    copy_blocks<MAG>(advanced(value_mag, tile, 16 * MAG), shared, L::value_mag, blocks, lane);
    copy_scales(advanced(value_scale, tile, 2 * TILE_LEN), shared + 4 * L::VALUE_SCALE, blocks, lane);
  }
};

}  // namespace cuda
}  // namespace kvq
