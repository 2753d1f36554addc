// The kernel of encode by tensor cores, of keys, of values or of both, and where it writes.
//
// Registers limit a multiprocessor to 16 warps: two blocks of threads of eight, so that few fill what a head needs. What a
// thread can find again, as its place, the count of tokens and where they lie, is not kept in registers meanwhile.
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
constexpr int PAIRS = WARPS / 2;
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
__device__ __forceinline__ void store_keys(const Head<DIM, BITS, false> &head, int at, int count, uint32_t lane,
                                           const Codes<DIM, BITS> &codes) {
  int c = lane % 4;
  at += lane / 4;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    uint32_t *to[BITS];
#pragma unroll
    for (int p = 0; p < BITS; p++)
      to[p] = (uint32_t *)(head.planes[p] + (uint64_t)(uint32_t)(at + 8 * r) * head.strides[p]) + c;
    if (c < DIM / 32 && is_there(at + 8 * r, count))
#pragma unroll
      for (int p = 0; p < BITS; p++)
#pragma unroll
        for (int group = 0; group < Sums<DIM, BITS>::GROUPS; group++) to[p][4 * group] = codes[r][p][group];
  }
}

// Bit F of the number of a bit of a byte becomes bit F of g, and the other way round.
template <int F>
__device__ __forceinline__ uint32_t exchange(uint32_t own, uint32_t lane) {
  constexpr uint32_t EVEN = F == 1 ? 0x55555555 : F == 2 ? 0x33333333 : 0x0f0f0f0f;
  bool odd = lane & 4 * F;
  uint32_t other = __shfl_xor_sync(ALL_LANES, __funnelshift_l(own, own, odd ? F : 32 - F), 4 * F);
  uint32_t mask = odd ? ~EVEN : EVEN;
  return (own & mask) | (other & ~mask);
}

// Values, of the block that begins at token `at`, before the first token if it has bits from earlier calls: 32 x 32 bits
// are transposed, bytes in registers and their bits between lanes, so that lane 4g + c has the words of coordinates
// 32 c + 8 r + g, r = 2 half and the next.
template <int DIM, int BITS>
__device__ __forceinline__ void store_values(const Head<DIM, BITS, true> &head, int at, int count,
                                             const Words<DIM, BITS> &words, int pair, int half, uint32_t lane) {
  constexpr int GROUPS = Sums<DIM, BITS>::GROUPS;
  uint32_t bytes = half ? 0x7362 : 0x5140, valid = valid_tokens(0, -at, count - at), kept = at < 0 ? ~(~0u << -at) : 0;
  uint32_t word[BITS][GROUPS][2], *to[BITS];
#pragma unroll
  for (int e = 0; e < BITS * GROUPS; e++) {
    uint2 first = words[e % BITS][e / BITS][pair][0][lane], last = words[e % BITS][e / BITS][pair][1][lane];
    uint32_t low = permute_bytes(first.x, first.y, bytes), high = permute_bytes(last.x, last.y, bytes);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      uint32_t x = permute_bytes(low, high, r ? 0x7632 : 0x5410);
      word[e % BITS][e / BITS][r] = exchange<4>(exchange<2>(exchange<1>(x, lane), lane), lane) & valid;
    }
  }
  if (!valid || lane % 4 >= DIM / 32) return;
#pragma unroll
  for (int p = 0; p < BITS; p++)
    to[p] = (uint32_t *)(head.planes[p] + (uint64_t)((uint32_t)(at + BLOCK_LEN - 1) / BLOCK_LEN) * head.strides[p]) +
            32 * (lane % 4) + 16 * half + lane / 4;
  if (kept)
#pragma unroll
    for (int e = 0; e < 2 * BITS * GROUPS; e++)
      word[e / 2 % BITS][e / 2 / BITS][e % 2] |= to[e / 2 % BITS][128 * (e / 2 / BITS) + 8 * (e % 2)] & kept;
#pragma unroll
  for (int e = 0; e < 2 * BITS * GROUPS; e++)
    to[e / 2 % BITS][128 * (e / 2 / BITS) + 8 * (e % 2)] = word[e / 2 % BITS][e / 2 / BITS][e % 2];
}

template <int DIM>
constexpr int CTAS = DIM == 256 ? 1 : 2;  // of a multiprocessor

// A turn encodes rows that the last one asked for, and asks for the next. Tokens are counted from the first of the
// call; those that are not there, some of the first block among them, cost time but are neither read nor written.
template <int DIM, int BITS, bool VALUES>
__device__ __forceinline__ void encode_share(const Coding &c, const Plan &plan, uint32_t number, uint4 *memory) {
  constexpr int GROUPS = Sums<DIM, BITS>::GROUPS, TURN = PAIRS * BLOCK_LEN;
  Shared<DIM, BITS, VALUES> &shared = *(Shared<DIM, BITS, VALUES> *)memory;
  Head<DIM, BITS, VALUES> &head = shared.head;
  auto *turns_words = (Words<DIM, BITS> *)shared.words;
  uint32_t index = number / plan.ctas_per_head, heads = (uint32_t)c.heads, batch = index / heads;
  uint32_t of_batch = index % heads;
  int cta = (int)(number % plan.ctas_per_head), more = cta < plan.longer ? cta : plan.longer;
  int block = cta * plan.share + more, end = block + plan.share + (cta < plan.longer);
  int before = (int)c.start % BLOCK_LEN, turn = block * BLOCK_LEN - before;
  int count = min((int)c.tokens, end * BLOCK_LEN - before);
  Parameters<DIM, BITS, VALUES> parameters;
  parameters.load(c, batch, of_batch);
  copy_rows<DIM>(row_at(c.x, batch, of_batch, 0), (uint32_t)(2 * c.x.stride[2]), turn + PART_LEN * warp_id(), count,
                 lane_id(), shared.slots[warp_id()]);
  parameters.fill(c, batch, of_batch, count, head);
#pragma unroll 1
  for (; turn < count; turn += TURN) {
    Place here(turn);
    Tile<DIM> y;
    wait_copies();
    Mixed mixed = rotate(head, shared.slots[here.warp][0] + here.lane, turn, here.lane, y);
    Place next(turn + TURN);
    copy_rows<DIM>(head.x, head.x_bytes, next.first, head.count, next.lane, shared.slots[next.warp]);
    Sums<DIM, BITS> sums;
    quantise_tile(head, y, mixed, next.lane, sums);
    Place at(turn);
    float dot = sums.diagonal(sums.dots, at.lane);
    Codes<DIM, BITS> codes;
#pragma unroll
    for (int e = 0; e < 2 * BITS * GROUPS; e++)
      codes[e % 2][e / 2 / GROUPS][e / 2 % GROUPS] = sums.word(e / 2 / GROUPS, e / 2 % GROUPS, e % 2);
    Words<DIM, BITS> &words = turns_words[(turn & TURN) != 0];
    int pair = (int)at.warp / 2, half = (int)at.warp % 2;
    count = head.count;
    if constexpr (VALUES) {
#pragma unroll
      for (int e = 0; e < BITS * GROUPS; e++)
        words[e % BITS][e / BITS][pair][half][at.lane] =
            make_uint2(codes[0][e % BITS][e / BITS], codes[1][e % BITS][e / BITS]);
    } else {
      store_keys<DIM, BITS>(head, at.first, count, at.lane, codes);
    }
    __half *to = head.scales + at.first + at.token;
    float scale = scale_of_tile<DIM, BITS>(head, mixed, dot, codes, at.lane);
    if (at.lane % 4 < 2 && is_there(at.first + at.token, count)) *to = __float2half_rn(scale);
    if constexpr (VALUES) {
      sync_two_warps(pair);
      store_values(head, at.first - half * PART_LEN, count, words, pair, half, at.lane);
    }
  }
}

// Keys and values in one launch, so that a multiprocessor has warps of both, and there is one ramp and one tail.
template <int DIM, int BITS>
__global__ void __launch_bounds__(THREADS, CTAS<DIM>)
    encode(const __grid_constant__ Coding keys, const __grid_constant__ Plan key_plan,
           const __grid_constant__ Coding values, const __grid_constant__ Plan value_plan) {
  extern __shared__ uint4 memory[];
  wait_for_kernels_ahead();
  if (key_plan.share <= PAIRS && value_plan.share <= PAIRS) let_next_kernel_begin();
  if (blockIdx.x < key_plan.ctas)
    encode_share<DIM, BITS, false>(keys, key_plan, blockIdx.x, memory);
  else
    encode_share<DIM, BITS, true>(values, value_plan, blockIdx.x - key_plan.ctas, memory);
}

// Of a coding that may be absent.
inline int64_t heads_of(const Coding *c) { return c ? c->batch * c->heads : 0; }
inline Plan plan_of(const Coding *c, int64_t ctas) {
  if (!c) return {};
  int64_t most = ceil_div(c->blocks, PAIRS);
  ctas = ctas < 1 ? 1 : ctas < most ? ctas : most;
  return {(int)(heads_of(c) * ctas), (int)ctas, (int)(c->blocks / ctas), (int)(c->blocks % ctas)};
}
inline int64_t turns_of(const Coding *c, const Plan &plan, int64_t unit) {
  return c ? ceil_div(unit * c->blocks, plan.ctas_per_head * PAIRS) : 0;
}

// One or a few rounds of as many blocks of threads as there is room for, what ends first. Heads of keys and of values
// get as many each, keys the odd one, as they take longer.
inline void make_plans(const Coding *keys, const Coding *values, int64_t resident, Plan (&best)[2]) {
  constexpr int64_t FILL = 40, UNIT = 64, MOST_ROUNDS = 4;  // FILL: of a head's parameters, a turn of a pair being UNIT
  int64_t least = INT64_MAX, key_heads = heads_of(keys), value_heads = heads_of(values);
  for (int64_t rounds = 1; rounds <= MOST_ROUNDS; rounds++) {
    int64_t even = rounds * resident / (key_heads + value_heads), left = rounds * resident - even * value_heads;
    Plan plans[2] = {plan_of(keys, key_heads ? left / key_heads : 0), plan_of(values, even)};
    int64_t turns = std::max(turns_of(keys, plans[0], UNIT), turns_of(values, plans[1], UNIT));
    int64_t time = ceil_div(plans[0].ctas + plans[1].ctas, resident) * (turns + FILL);
    if (time < least) least = time, best[0] = plans[0], best[1] = plans[1];
  }
}

template <int DIM, int BITS>
void launch(const Coding *keys, const Coding *values, int num_multiprocessors, cudaStream_t stream) {
  constexpr int KEY_BYTES = sizeof(Shared<DIM, BITS, false>), VALUE_BYTES = sizeof(Shared<DIM, BITS, true>);
  int bytes = std::max(keys ? KEY_BYTES : 0, values ? VALUE_BYTES : 0);
  Plan plans[2];
  make_plans(keys, values, CTAS<DIM> * num_multiprocessors, plans);
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
