// The kernel of encode by tensor cores, and where it writes.
#pragma once

#include "encode_tile.cuh"
#include "launch.h"

namespace kvq {
namespace cuda {
namespace halves {

// Pairs of fields of F bits: the even field of either register, or the odd one.
template <int F>
constexpr uint32_t EVEN_FIELDS = F == 1   ? 0x55555555
                                 : F == 2 ? 0x33333333
                                 : F == 4 ? 0x0f0f0f0f
                                          : 0x00ff00ff;
template <int F>
__device__ __forceinline__ uint32_t pair_even(uint32_t first, uint32_t second) {
  return (first & EVEN_FIELDS<F>) | (second & EVEN_FIELDS<F>) << F;
}
template <int F>
__device__ __forceinline__ uint32_t pair_odd(uint32_t first, uint32_t second) {
  return (first >> F & EVEN_FIELDS<F>) | (second & ~EVEN_FIELDS<F>);
}
// The same with the lane that differs in bit STEP of its number, of which the one with the bit keeps the odd fields.
template <int F, int STEP>
__device__ __forceinline__ uint32_t exchange(uint32_t own) {
  uint32_t other = __shfl_xor_sync(ALL_LANES, own, STEP);
  return lane_id() & STEP ? pair_odd<F>(other, own) : pair_even<F>(own, other);
}

// Keys: lanes c and c ^ 1 have the nibbles of the same words; each keeps one of two, or with D = 64 that of one token.
template <int DIM, int BITS>
__device__ __forceinline__ void store_keys(const Head<DIM, BITS, false> &head, int first, uint32_t valid,
                                           const Codes<DIM, BITS> (&codes)[2]) {
  int lane = lane_id(), c = lane % 4;
#pragma unroll
  for (int p = 0; p < BITS; p++) {
    int64_t stride = p == BITS - 1 ? head.sign_stride : head.mag_stride;
    uint32_t *plane = head.planes[p] + first * stride;
    if constexpr (DIM == 64) {
      uint32_t word = exchange<4, 1>(codes[0].plane[p][0] | codes[1].plane[p][0] << 4);
      int token = lane / 4 * 2 + c % 2;
      if (valid >> token & 1) plane[token * stride + c / 2] = word;
    } else {
#pragma unroll
      for (int t = 0; t < 2; t++) {
        int token = lane / 4 * 2 + t;
#pragma unroll
        for (int w = 0; w < DIM / 128; w++) {
          uint32_t word = exchange<4, 1>(codes[t].plane[p][w]);
          if (valid >> token & 1) plane[token * stride + c / 2 * (DIM / 64) + 2 * w + c % 2] = word;
        }
      }
    }
  }
}

// Values: 16 bits, one a token, of two coordinates in a half h of even[p][w] and of odd[p][w]. They are those of bits
// 2g + 16h and the next of the codes' words.
template <int DIM, int BITS>
struct Halves {
  static constexpr int WORDS = Codes<DIM, BITS>::WORDS;
  uint32_t even[BITS][WORDS], odd[BITS][WORDS];

  __device__ __forceinline__ void gather(const Codes<DIM, BITS> (&codes)[2]) {
#pragma unroll
    for (int p = 0; p < BITS; p++)
#pragma unroll
      for (int w = 0; w < WORDS; w++) {
        uint32_t first = codes[0].plane[p][w], second = codes[1].plane[p][w];
        even[p][w] = exchange<8, 16>(exchange<4, 8>(exchange<2, 4>(pair_even<1>(first, second))));
        odd[p][w] = exchange<8, 16>(exchange<4, 8>(exchange<2, 4>(pair_odd<1>(first, second))));
      }
  }
};

// Words of a block from the halves of its first and of its last 16 tokens. Bits of tokens in `kept` stay.
template <int DIM, int BITS>
__device__ __forceinline__ void store_values(const Head<DIM, BITS, true> &head, int block, uint32_t kept,
                                             uint32_t valid, const Halves<DIM, BITS> &first,
                                             const Halves<DIM, BITS> &last) {
  int g = lane_id() / 4, c = lane_id() % 4;
#pragma unroll
  for (int p = 0; p < BITS; p++) {
    int64_t stride = p == BITS - 1 ? head.sign_stride : head.mag_stride;
    uint32_t *plane = head.planes[p] + block * stride;
#pragma unroll
    for (int k = 0; k < 2 * Halves<DIM, BITS>::WORDS; k++) {
      int w = k / 2, bit = 2 * g + k % 2 * 16, r = place_of_bit(bit, w);
      if (r >= DIM / 16) continue;
      uint2 *to = (uint2 *)(plane + c / 2 * (DIM / 2) + 8 * r + 4 * (c % 2) + bit % 4), word;
      uint32_t half = k % 2 ? 0x7632 : 0x5410;
      word.x = permute_bytes(first.even[p][w], last.even[p][w], half) & valid;
      word.y = permute_bytes(first.odd[p][w], last.odd[p][w], half) & valid;
      if (kept) word.x |= to->x & kept, word.y |= to->y & kept;
      *to = word;
    }
  }
}

// All that a block of threads shares.
template <int DIM, int BITS, bool VALUES>
struct Shared {
  Head<DIM, BITS, VALUES> head;
  Halves<DIM, BITS> halves[2][VALUES ? WARPS<DIM> * WARP : 1];  // of each thread, of both parts of a block
  uint4 rows[WARPS<DIM>][PART_LEN * ROW_SIZE<DIM>];
};

// Part i of those that a warp has from `block` on, the first of which is in the store's block first_block: 16 tokens,
// of which those in `valid` are to be written, one bit each.
struct Part {
  int first;
  uint32_t valid;
  __device__ __forceinline__ Part(int first_block, int start, int stop, int i, int warps) {
    int block = first_block + i / 2 * warps;
    first = block * BLOCK_LEN + i % 2 * PART_LEN;
    valid = valid_tokens(block, start, stop) >> (i % 2 * PART_LEN) & 0xffff;
  }
};

// Encodes part i, whose rows have been asked for, and asks for those of the next. Not inlined, as the compiler then
// would keep the addresses of all that is read here in registers, which there are too few of.
template <int DIM, int BITS, bool VALUES>
__device__ __attribute__((noinline)) void encode_part(int first_block, int i) {
  extern __shared__ uint4 memory[];
  Shared<DIM, BITS, VALUES> &shared = *(Shared<DIM, BITS, VALUES> *)memory;
  Head<DIM, BITS, VALUES> &head = shared.head;
  uint4 *rows = shared.rows[warp_id()];
  Tile<DIM> y;
  Codes<DIM, BITS> codes[2];
  wait_copies();
  __syncwarp();
  multiply(head, rows, y);
  __syncwarp();
  Part next(first_block, head.start, head.stop, i + 1, WARPS<DIM>);
  copy_rows<DIM>(head.x, head.x_bytes, next.first - head.start, next.valid, rows);
  finish_rotation<DIM>(head.blocks, y);
  float scale = encode_tile<DIM, BITS>(y, head.tree, head.rule, codes);
  Part part(first_block, head.start, head.stop, i, WARPS<DIM>);
  int lane = lane_id(), token = lane / 4 * 2 + lane % 2;
  if (lane % 4 < 2 && part.valid >> token & 1) head.scales[part.first + token] = __float2half_rn(scale);
  if constexpr (VALUES)
    shared.halves[i % 2][threadIdx.x].gather(codes);
  else
    store_keys<DIM, BITS>(head, part.first, part.valid, codes);
}

// A warp takes blocks_per_warp blocks of 32 tokens of one head in two parts each. Tokens that are not there cost time
// but are neither read nor written.
template <int DIM, int BITS, bool VALUES>
__global__ void __launch_bounds__(WARPS<DIM> *WARP, DIM == 64 ? 5 : 4)
    encode(const __grid_constant__ Coding c, int ctas_per_head, int blocks_per_warp) {
  extern __shared__ uint4 memory[];
  Shared<DIM, BITS, VALUES> &shared = *(Shared<DIM, BITS, VALUES> *)memory;
  Head<DIM, BITS, VALUES> &head = shared.head;
  uint32_t index = blockIdx.x / ctas_per_head;
  fill(c, index / (uint32_t)c.heads, index % (uint32_t)c.heads, head);
  int first_block = (int)(blockIdx.x % ctas_per_head) * blocks_per_warp * WARPS<DIM> + warp_id();
  first_block += (int)(c.start / BLOCK_LEN);
  int i = Part(first_block, head.start, head.stop, 0, WARPS<DIM>).valid ? 0 : 1;
  Part part(first_block, head.start, head.stop, i, WARPS<DIM>);
  copy_rows<DIM>(head.x, head.x_bytes, part.first - head.start, part.valid, shared.rows[warp_id()]);
#pragma unroll 1
  for (; i < 2 * blocks_per_warp; i++) {
    int block = first_block + i / 2 * WARPS<DIM>;
    uint32_t valid = valid_tokens(block, head.start, head.stop);
    if (!valid) return;
    if (valid >> (i % 2 * PART_LEN) & 0xffff) encode_part<DIM, BITS, VALUES>(first_block, i);
    if constexpr (VALUES)
      if (i % 2)
        store_values<DIM, BITS>(head, block, valid_tokens(block, 0, head.start), valid, shared.halves[0][threadIdx.x],
                                shared.halves[1][threadIdx.x]);
  }
}

template <int DIM, int BITS>
void launch(const Coding &c, int num_multiprocessors, cudaStream_t stream) {
  int64_t heads = c.batch * c.heads, waves = heads * c.blocks / (16 * num_multiprocessors);
  int blocks_per_warp = waves < 8 ? 1 : waves < 16 ? 2 : 4;
  int ctas_per_head = (int)ceil_div(c.blocks, WARPS<DIM> * blocks_per_warp);
  unsigned grid = (unsigned)(heads * ctas_per_head);
  int threads = WARPS<DIM> * WARP;
  constexpr int key_bytes = sizeof(Shared<DIM, BITS, false>), value_bytes = sizeof(Shared<DIM, BITS, true>);
  static_assert(key_bytes <= 48 << 10 && value_bytes <= 48 << 10, "more needs an attribute of the kernel");
  if (c.along_tokens)
    encode<DIM, BITS, true><<<grid, threads, value_bytes, stream>>>(c, ctas_per_head, blocks_per_warp);
  else
    encode<DIM, BITS, false><<<grid, threads, key_bytes, stream>>>(c, ctas_per_head, blocks_per_warp);
}

template <int DIM>
void launch(const Coding &c, int num_multiprocessors, cudaStream_t stream) {
  if (c.store.bits == 2) launch<DIM, 2>(c, num_multiprocessors, stream);
  if (c.store.bits == 3) launch<DIM, 3>(c, num_multiprocessors, stream);
  if (c.store.bits == 4) launch<DIM, 4>(c, num_multiprocessors, stream);
}

}  // namespace halves
}  // namespace cuda
}  // namespace kvq
