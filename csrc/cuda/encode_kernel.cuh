// The kernel of encode by tensor cores, and where it writes.
#pragma once

#include "encode_tile.cuh"
#include "launch.h"

namespace kvq {
namespace cuda {
namespace halves {

// What a block of threads does: warps take blocks_per_warp blocks of 32 tokens each, in two parts of 16; or, where that
// is 0 because there are few, two warps take the parts of one block.
struct Plan {
  int ctas_per_head, blocks_per_warp;
  __host__ __device__ int cta_blocks() const { return blocks_per_warp ? blocks_per_warp * WARPS : WARPS / 2; }
};

// Words of tokens g and g + 8 of the first parts of blocks, of each thread, then of their last parts.
constexpr int THREADS = WARPS * WARP;
template <int DIM, int BITS>
using Words = uint2[BITS][Sums<DIM, BITS>::GROUPS][2 * THREADS];

// All that a block of threads shares.
template <int DIM, int BITS, bool VALUES>
struct Shared {
  Head<DIM, BITS, VALUES> head;
  Slots<DIM> slots[WARPS];
  uint2 words[VALUES ? sizeof(Words<DIM, BITS>) / sizeof(uint2) : 1];
};

// Keys: lane 4g + c has words c of tokens g and g + 8, with D = 256 also words 4 + c.
template <int DIM, int BITS>
__device__ __forceinline__ void store_keys(const Head<DIM, BITS, false> &head, int first, uint32_t valid,
                                           const Codes<DIM, BITS> &codes) {
  int g = lane_id() / 4, c = lane_id() % 4;
  char *planes[BITS];
  uint32_t strides[BITS];
#pragma unroll
  for (int p = 0; p < BITS; p++) {
    strides[p] = head.strides[p];
    planes[p] = head.planes[p] + 4 * c + (uint64_t)(uint32_t)(first + g) * strides[p];
  }
#pragma unroll
  for (int r = 0; r < 2; r++)
    if (c < DIM / 32 && valid >> (g + 8 * r) & 1)
#pragma unroll
      for (int p = 0; p < BITS; p++)
#pragma unroll
        for (int group = 0; group < Sums<DIM, BITS>::GROUPS; group++)
          *(uint32_t *)(planes[p] + 8 * r * strides[p] + 16 * group) = codes[r][p][group];
}

// Bit F of the number of a bit of a byte becomes bit F of g, and the other way round.
template <int F>
__device__ __forceinline__ uint32_t exchange(uint32_t own) {
  constexpr uint32_t EVEN = F == 1 ? 0x55555555 : F == 2 ? 0x33333333 : 0x0f0f0f0f;
  bool odd = lane_id() & 4 * F;
  uint32_t other = __shfl_xor_sync(ALL_LANES, __funnelshift_l(own, own, odd ? F : 32 - F), 4 * F);
  uint32_t mask = odd ? ~EVEN : EVEN;
  return (own & mask) | (other & ~mask);
}

// Values: 32 x 32 bits are transposed, bytes in registers and their bits between lanes, so that lane 4g + c has the
// words of coordinates 32 c + 8 r + g. Bits of tokens in `kept` stay. Planes p with p % of == which.
template <int DIM, int BITS>
__device__ __forceinline__ void store_values(const Head<DIM, BITS, true> &head, int block,
                                             const Words<DIM, BITS> &words, int slot, uint32_t valid, int which,
                                             int of) {
  uint32_t kept = valid_tokens(block, 0, head.start);
  int g = lane_id() / 4, c = lane_id() % 4;
#pragma unroll
  for (int p = 0; p < BITS; p++) {
    if (p % of != which) continue;
    uint32_t *plane = (uint32_t *)(head.planes[p] + (uint64_t)(uint32_t)block * head.strides[p]) + 32 * c + g;
#pragma unroll
    for (int group = 0; group < Sums<DIM, BITS>::GROUPS; group++) {
      uint2 first = words[p][group][slot], last = words[p][group][THREADS + slot];
      uint32_t pairs[4] = {permute_bytes(first.x, first.y, 0x5140), permute_bytes(last.x, last.y, 0x5140),
                           permute_bytes(first.x, first.y, 0x7362), permute_bytes(last.x, last.y, 0x7362)};
#pragma unroll
      for (int r = 0; r < 4; r++) {
        uint32_t word = permute_bytes(pairs[r / 2 * 2], pairs[r / 2 * 2 + 1], r % 2 ? 0x7632 : 0x5410);
        word = exchange<4>(exchange<2>(exchange<1>(word))) & valid;
        uint32_t *to = plane + 128 * group + 8 * r;
        if (c >= DIM / 32) continue;
        *to = kept ? word | (*to & kept) : word;
      }
    }
  }
}

// 16 tokens of a head, from token `first` of the store on, of which those in `valid` are to be written, one bit each.
struct Part {
  int first;
  uint32_t valid;
};
// Half `i % 2` of a block, of which the tokens in `valid` are to be written.
__device__ __forceinline__ Part part_of(int block, int i, uint32_t valid) {
  return {block * BLOCK_LEN + i % 2 * PART_LEN, valid >> i % 2 * PART_LEN & 0xffff};
}

// Encodes a part, whose rows have been asked for, and asks for those of the next, whose bits of valid tokens are the
// upper ones. Words of values go to the slot. Not inlined, as the compiler then would keep the addresses of all that is
// read here in registers, which there are too few of.
template <int DIM, int BITS, bool VALUES>
__device__ __attribute__((noinline)) void encode_part(int first, int first_of_next, uint32_t valid, int slot) {
  extern __shared__ uint4 memory[];
  Shared<DIM, BITS, VALUES> &shared = *(Shared<DIM, BITS, VALUES> *)memory;
  Head<DIM, BITS, VALUES> &head = shared.head;
  Slots<DIM> &slots = shared.slots[threadIdx.x / WARP];
  const uint4 *own = slots[0] + lane_id();
  Tile<DIM> y;
  wait_copies();
  if (head.dtype == BFLOAT16)
    multiply<__nv_bfloat16>(head, own, y);
  else
    multiply<__half>(head, own, y);
  copy_rows<DIM>(head.x, head.x_bytes, first_of_next - head.start, valid >> PART_LEN, slots);
  Codes<DIM, BITS> codes;
  float scale = encode_tile<DIM, BITS>(head, y, codes);
  int lane = lane_id(), token = lane / 4 + lane % 2 * 8;
  if (lane % 4 < 2 && valid >> token & 1) head.scales[first + token] = __float2half_rn(scale);
  if constexpr (VALUES) {
    Words<DIM, BITS> &words = *(Words<DIM, BITS> *)shared.words;
#pragma unroll
    for (int p = 0; p < BITS; p++)
#pragma unroll
      for (int group = 0; group < Sums<DIM, BITS>::GROUPS; group++)
        words[p][group][slot] = make_uint2(codes[0][p][group], codes[1][p][group]);
  } else {
    store_keys<DIM, BITS>(head, first, valid, codes);
  }
}

template <int DIM>
constexpr int CTAS = DIM == 64 ? 5 : DIM == 128 ? 4 : 2;  // of a multiprocessor

// Tokens that are not there cost time but are neither read nor written.
template <int DIM, int BITS, bool VALUES>
__global__ void __launch_bounds__(THREADS, CTAS<DIM>)
    encode(const __grid_constant__ Coding c, const __grid_constant__ Plan plan) {
  extern __shared__ uint4 memory[];
  Shared<DIM, BITS, VALUES> &shared = *(Shared<DIM, BITS, VALUES> *)memory;
  Head<DIM, BITS, VALUES> &head = shared.head;
  Words<DIM, BITS> &words = *(Words<DIM, BITS> *)shared.words;
  uint32_t index = blockIdx.x / plan.ctas_per_head, heads = (uint32_t)c.heads, batch = index / heads;
  uint32_t of_batch = index % heads;
  int warp = warp_id(), start = (int)c.start, stop = (int)(c.start + c.tokens), shares = plan.blocks_per_warp ? 1 : 2;
  int block = start / BLOCK_LEN + (int)(blockIdx.x % plan.ctas_per_head) * plan.cta_blocks() + warp / shares;
  uint32_t valid = valid_tokens(block, start, stop);
  const char *x = row_at(c.x, batch, of_batch, 0);
  int i = shares == 2 ? warp % 2 : valid & 0xffff ? 0 : 1, end = shares == 2 ? i + 1 : 2 * plan.blocks_per_warp;
  Part part = part_of(block, i, valid);
  copy_rows<DIM>(x, (int)(2 * c.x.stride[2]), part.first - start, part.valid, shared.slots[warp]);
  if (threadIdx.x == 0) {
    head.x = x, head.scales = (__half *)scales_at(c.store, batch, of_batch), head.x_bytes = (int)(2 * c.x.stride[2]);
    head.start = start, head.stop = stop, head.rule = c.rule, head.dtype = c.x.dtype;
  }
  fill(c, batch, of_batch, head);
  if (shares == 2) {
    int slot = warp / 2 * WARP + lane_id();
    if (part.valid) encode_part<DIM, BITS, VALUES>(part.first, part.first, part.valid, i * THREADS + slot);
    if constexpr (VALUES) {
      __syncthreads();
      if (valid) store_values<DIM, BITS>(head, block, words, slot, valid, i, 2);
    }
    return;
  }
#pragma unroll 1
  for (; i < end && valid; i++) {
    int block_of_next = block + i % 2 * WARPS;
    uint32_t valid_of_next = i + 1 == end ? 0 : i % 2 ? valid_tokens(block_of_next, start, stop) : valid;
    Part next = part_of(block_of_next, i + 1, valid_of_next);
    if (part.valid)
      encode_part<DIM, BITS, VALUES>(part.first, next.first, part.valid | next.valid << PART_LEN,
                                     i % 2 * THREADS + (int)threadIdx.x);
    if constexpr (VALUES)
      if (i % 2) store_values<DIM, BITS>(head, block, words, threadIdx.x, valid, 0, 1);
    part = next, valid = valid_of_next, block = block_of_next;
  }
}

template <int DIM, int BITS, bool VALUES>
void launch(const Coding &c, int num_multiprocessors, cudaStream_t stream) {
  constexpr int bytes = sizeof(Shared<DIM, BITS, VALUES>);
  int64_t heads = c.batch * c.heads, resident = CTAS<DIM> * WARPS * num_multiprocessors;
  Plan plan = {0, 2 * heads * c.blocks <= resident ? 0 : (int)ceil_div(heads * c.blocks, resident)};
  plan.ctas_per_head = (int)ceil_div(c.blocks, plan.cta_blocks());
  auto kernel = encode<DIM, BITS, VALUES>;
  if (bytes > 48 << 10) cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  kernel<<<(unsigned)(heads * plan.ctas_per_head), THREADS, bytes, stream>>>(c, plan);
}

template <int DIM, int BITS>
void launch(const Coding &c, int num_multiprocessors, cudaStream_t stream) {
  if (c.along_tokens)
    launch<DIM, BITS, true>(c, num_multiprocessors, stream);
  else
    launch<DIM, BITS, false>(c, num_multiprocessors, stream);
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
