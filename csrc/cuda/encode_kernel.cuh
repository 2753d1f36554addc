// The kernel of encode by tensor cores, of keys, of values or of both, and where it writes.
#pragma once

#include <algorithm>

#include "encode_tile.cuh"
#include "launch.h"
#include "launches.cuh"

namespace kvq {
namespace cuda {
namespace halves {

// Blocks of threads share the 32-token blocks of a head evenly. In each, pairs of warps take turns; each warp of a pair
// encodes 16 tokens of its block.
constexpr int PAIRS = WARPS / 2, TURN_LEN = WARPS * PART_LEN;
struct Plan {
  int ctas;                          // of all heads
  int ctas_per_head, share, longer;  // of a head; blocks of each, and how many of them have one more
};

// Words of tokens g and g + 8 of the first part of the block of each pair, then of its last part, of each lane.
template <int DIM, int BITS>
using Words = uint2[BITS][Sums<DIM, BITS>::GROUPS][PAIRS][2][WARP];

// All that a block of threads shares. Words are those of this round and of the last one, which may still be read.
template <int DIM, int BITS, bool VALUES>
struct Shared {
  Head<DIM, BITS, VALUES> head;
  Slots<DIM> slots[WARPS];
  uint2 words[VALUES ? 2 * sizeof(Words<DIM, BITS>) / sizeof(uint2) : 1];
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
    planes[p] = head.planes[p] + (uint64_t)(uint32_t)(first + g) * strides[p];
    hold(planes[p]), planes[p] += 4 * c;
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
// words of coordinates 32 c + 8 r + g, r = 2 half and the next. Bits of tokens in `kept` stay. All lanes exchange bits
// before any of them leaves.
template <int DIM, int BITS>
__device__ __forceinline__ void store_values(const Head<DIM, BITS, true> &head, int block,
                                             const Words<DIM, BITS> &words, int pair, int half, uint32_t valid,
                                             uint32_t kept) {
  constexpr int GROUPS = Sums<DIM, BITS>::GROUPS;
  uint32_t bytes = half ? 0x7362 : 0x5140, word[BITS][GROUPS][2], *to[BITS];
  int lane = lane_id(), g = lane / 4, c = lane % 4;
#pragma unroll
  for (int p = 0; p < BITS; p++)
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      uint2 first = words[p][group][pair][0][lane], last = words[p][group][pair][1][lane];
      uint32_t low = permute_bytes(first.x, first.y, bytes), high = permute_bytes(last.x, last.y, bytes);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        uint32_t both = permute_bytes(low, high, r ? 0x7632 : 0x5410);
        word[p][group][r] = exchange<4>(exchange<2>(exchange<1>(both))) & valid;
      }
    }
  if (!valid || c >= DIM / 32) return;
  auto each = [&](auto use) {
#pragma unroll
    for (int p = 0; p < BITS; p++)
#pragma unroll
      for (int group = 0; group < GROUPS; group++)
#pragma unroll
        for (int r = 0; r < 2; r++) use(word[p][group][r], to[p] + 128 * group + 8 * r);
  };
#pragma unroll
  for (int p = 0; p < BITS; p++)
    to[p] = (uint32_t *)(head.planes[p] + (uint64_t)(uint32_t)block * head.strides[p]) + 32 * c + 16 * half + g;
  if (kept) each([&](uint32_t &x, const uint32_t *from) { x |= *from & kept; });
  each([](uint32_t x, uint32_t *at) { *at = x; });
}

// 16 tokens of a head, from token `first` of the store on, of which those in `valid` are to be written, one bit each;
// its upper half means nothing.
struct Part {
  int first;
  uint32_t valid;
};

// The first `count` of 32 tokens, one bit each; none if it is negative.
__device__ __forceinline__ uint32_t first_tokens(int count) { return ~__funnelshift_lc(0, ~0u, count > 0 ? count : 0); }

// Encodes a part, whose rows have been asked for; finds the next part of the warp and asks for its rows. Not before
// products have mixed this one, which take all registers. Returns the words.
template <int DIM, int BITS, bool VALUES>
__device__ __forceinline__ void encode_part(const Head<DIM, BITS, VALUES> &head, Slots<DIM> &slots, const Part &part,
                                            Part &next, Codes<DIM, BITS> &codes) {
  Tile<DIM> y;
  wait_copies();
  Mixed mixed = mix(head, slots[0] + lane_id(), part.valid, y);
  next.first = opaque(part.first) + TURN_LEN, next.valid = first_tokens(head.stop - next.first);
  copy_rows<DIM>(head.x, head.x_bytes, next.first - head.start, next.valid, slots);
  finish_rotation(head, y);
  float scale = encode_tile<DIM, BITS>(head, y, mixed, codes);
  int lane = lane_id(), token = lane / 4 + lane % 2 * 8;
  if (lane % 4 < 2 && part.valid >> token & 1) head.scales[part.first + token] = __float2half_rn(scale);
}

template <int DIM>
constexpr int CTAS = DIM == 256 ? 2 : 4;  // of a multiprocessor
// Of a block of a pair of keys, where values take VALUE_COST: the shares of the card that were fastest.
template <int DIM>
constexpr int KEY_COST = DIM == 256   ? 10
                         : DIM == 128 ? 9
                                      : 8;
constexpr int VALUE_COST = 8;

// What one block of threads does of all that `c` asks for. Tokens that are not there cost time but are neither read nor
// written.
template <int DIM, int BITS, bool VALUES>
__device__ __forceinline__ void encode_share(const Coding &c, const Plan &plan, uint32_t number, uint4 *memory) {
  Shared<DIM, BITS, VALUES> &shared = *(Shared<DIM, BITS, VALUES> *)memory;
  Head<DIM, BITS, VALUES> &head = shared.head;
  auto *words = (Words<DIM, BITS> *)shared.words;
  uint32_t index = number / plan.ctas_per_head, heads = (uint32_t)c.heads, batch = index / heads;
  uint32_t of_batch = index % heads;
  int start = (int)c.start, pair = warp_id() / 2, half = warp_id() % 2, own = warp_id() * PART_LEN;
  int cta = (int)(number % plan.ctas_per_head), more = cta < plan.longer ? cta : plan.longer;
  int block = start / BLOCK_LEN + cta * plan.share + more, end = (block + plan.share + (cta < plan.longer)) * BLOCK_LEN;
  int all = (int)(c.start + c.tokens), stop = end < all ? end : all;
  Part part = {block * BLOCK_LEN + own, 0};
  part.valid = valid_tokens(0, start - part.first, stop - part.first);
  Parameters<DIM, BITS, VALUES> parameters;
  parameters.load(c, batch, of_batch);
  copy_rows<DIM>(row_at(c.x, batch, of_batch, 0), (int)(2 * c.x.stride[2]), part.first - start, part.valid,
                 shared.slots[warp_id()]);
  if (threadIdx.x == 0) head.stop = stop;
  parameters.fill(c, batch, of_batch, head);
#pragma unroll 1
  while (VALUES ? part.first - own < stop : part.first < stop) {  // warps of a pair wait for each other, if of values
    Part next;
    Codes<DIM, BITS> codes;
    encode_part(head, shared.slots[warp_id()], part, next, codes);
    if constexpr (VALUES) {
      Words<DIM, BITS> &of_turn = words[(uint32_t)part.first / TURN_LEN % 2];
#pragma unroll
      for (int e = 0; e < BITS * Sums<DIM, BITS>::GROUPS; e++)
        of_turn[e % BITS][e / BITS][pair][half][lane_id()] =
            make_uint2(codes[0][e % BITS][e / BITS], codes[1][e % BITS][e / BITS]);
      sync_pair(pair);
      int block = (int)((uint32_t)part.first / BLOCK_LEN);
      uint32_t kept = first_tokens(start - block * BLOCK_LEN), valid = first_tokens(stop - block * BLOCK_LEN) & ~kept;
      store_values(head, block, of_turn, pair, half, valid, kept);
    } else {
      store_keys<DIM, BITS>(head, part.first, part.valid, codes);
    }
    part = next;
  }
}

// Keys and values in one launch, so that a multiprocessor has warps of both, and there is one ramp and one tail.
template <int DIM, int BITS>
__global__ void __launch_bounds__(THREADS, CTAS<DIM>)
    encode(const __grid_constant__ Coding keys, const __grid_constant__ Plan key_plan,
           const __grid_constant__ Coding values, const __grid_constant__ Plan value_plan) {
  extern __shared__ uint4 memory[];
  wait_for_kernels_ahead();
  let_next_kernel_begin();
  if (blockIdx.x < key_plan.ctas)
    encode_share<DIM, BITS, false>(keys, key_plan, blockIdx.x, memory);
  else
    encode_share<DIM, BITS, true>(values, value_plan, blockIdx.x - key_plan.ctas, memory);
}

// Of a coding that may be absent.
inline int64_t heads_of(const Coding *c) { return c ? c->batch * c->heads : 0; }
inline Plan plan_of(const Coding *c, int64_t fit) {
  if (!c) return {};
  int64_t most = ceil_div(c->blocks, PAIRS), ctas = fit < 1 ? 1 : fit < most ? fit : most;
  return {(int)(heads_of(c) * ctas), (int)ctas, (int)(c->blocks / ctas), (int)(c->blocks % ctas)};
}

// One or a few rounds of as many blocks of threads as there is room for, what ends first. Heads of keys and of values
// get what they take of it.
template <int DIM>
void make_plans(const Coding *keys, const Coding *values, int64_t resident, Plan (&best)[2]) {
  constexpr int64_t COST[2] = {KEY_COST<DIM>, VALUE_COST};
  constexpr int64_t FILL = VALUE_COST, MOST_ROUNDS = 4, UNIT = 64;  // FILL: of a head's parameters
  const Coding *of[2] = {keys, values};
  int64_t least = INT64_MAX, all = COST[0] * heads_of(keys) + COST[1] * heads_of(values);
  for (int64_t rounds = 1; rounds <= MOST_ROUNDS; rounds++) {
    int64_t left = rounds * resident, longest = 0;
    Plan plans[2] = {};
    for (int i = 1; i >= 0; i--) {
      if (!of[i]) continue;
      plans[i] = plan_of(of[i], i == 0 ? left / heads_of(keys) : COST[1] * rounds * resident / all);
      left -= plans[i].ctas;
      int64_t turns = ceil_div(UNIT * of[i]->blocks, plans[i].ctas_per_head * PAIRS);
      longest = std::max<int64_t>(longest, COST[i] * turns);
    }
    int64_t time = ceil_div(plans[0].ctas + plans[1].ctas, resident) * (longest + UNIT * FILL);
    if (time < least) least = time, best[0] = plans[0], best[1] = plans[1];
  }
}

template <int DIM, int BITS>
void launch(const Coding *keys, const Coding *values, int num_multiprocessors, cudaStream_t stream) {
  constexpr int KEY_BYTES = sizeof(Shared<DIM, BITS, false>), VALUE_BYTES = sizeof(Shared<DIM, BITS, true>);
  int bytes = std::max(keys ? KEY_BYTES : 0, values ? VALUE_BYTES : 0);
  Plan plans[2];
  make_plans<DIM>(keys, values, CTAS<DIM> * num_multiprocessors, plans);
  launch_behind(encode<DIM, BITS>, dim3((unsigned)(plans[0].ctas + plans[1].ctas)), THREADS, bytes, stream,
                keys ? *keys : Coding{}, plans[0], values ? *values : Coding{}, plans[1]);
}

template <int DIM>
void launch(const Coding *keys, const Coding *values, int num_multiprocessors, cudaStream_t stream) {
  int bits = (keys ? keys : values)->store.bits;
  if (bits == 2) launch<DIM, 2>(keys, values, num_multiprocessors, stream);
  if (bits == 3) launch<DIM, 3>(keys, values, num_multiprocessors, stream);
  if (bits == 4) launch<DIM, 4>(keys, values, num_multiprocessors, stream);
}

}  // namespace halves
}  // namespace cuda
}  // namespace kvq
