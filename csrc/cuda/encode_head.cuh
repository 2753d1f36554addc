// What encode by tensor cores needs to know of one head: the factors of the products, the blocks, what the centre
// becomes, the codebook, and where things lie. All of it is in shared memory, because registers limit the kernel.
#pragma once

#include "encode_book.cuh"
#include "mma.cuh"

namespace kvq {
namespace cuda {
namespace halves {

constexpr int PART_LEN = 16;  // tokens of one product
constexpr int WARPS = 4;      // of a block of threads

// Blocks of four coordinates: one product mixes SPAN of them in STEPS steps of 16 and makes TILES times 8. There are as
// many words of 32 coordinates as groups of 8 blocks.
template <int DIM>
struct Cut {
  static_assert(DIM == 64 || DIM == 128 || DIM == 256, "one of the head dims that have a kernel");
  static constexpr int BLOCKS = DIM / 4, SPAN = BLOCKS < 32 ? 16 : 32, SPANS = BLOCKS / SPAN, STEPS = SPAN / 16;
  static constexpr int TILES = SPAN / 8, WORDS = DIM / 32, COLUMNS = WORDS < 4 ? WORDS : 4;
  static constexpr float INVERSE_ROOT = DIM == 64 ? 0.125f : DIM == 128 ? 0.08838834764831845f : 0.0625f;  // D^-1/2
};

// Block n = 8 t + 2 c + j has coordinates 4 n + i; t < D/32, c < 4, j < 2, i < 4.
template <int DIM, int BITS, bool VALUES>
struct Head {
  using C = Cut<DIM>;
  // Right factors of the products in the order of their fragments, [span][step][i][tile][lane]. Keys: both registers of
  // the first, then of the second summand. Values need one summand: of a tile, then of the next.
  uint4 right[C::SPANS * 4 * C::STEPS * C::TILES / (VALUES ? 2 : 1)][WARP];
  // [t][j][i][c]: row i of the block times the transform of four, the unit and D^-1/2
  float4 blocks[C::WORDS][2][4][4];
  float4 shift[VALUES ? 1 : C::WORDS][2][4];    // [t][j][c]: what the centre becomes, negative
  uint4 pack[C::COLUMNS][WARP];                 // right factors that make words of bits, of i = 0, 1 and of i = 2, 3
  uint32_t summands[WARPS][DIM];                // of each warp: sign / balance / unit as a sum of two 16-bit numbers
  Book<BITS> book;
  const char *x;
  char *planes[BITS];  // magnitude bits, then the sign
  __half *scales;
  int x_bytes;             // from a token to the next
  uint32_t strides[BITS];  // bytes from a token or block to the next
  int start, stop;             // tokens of the store to encode
  int rule;
  Dtype dtype;
};

// x as the sum of two 16-bit numbers, whose bits are the halves of the result.
__device__ inline uint32_t split(float x, Dtype dtype) {
  if (dtype == BFLOAT16) {
    __nv_bfloat16 first = __float2bfloat16_rn(x), second = __float2bfloat16_rn(x - __bfloat162float(first));
    return __bfloat16_as_ushort(first) | (uint32_t)__bfloat16_as_ushort(second) << 16;
  }
  __half first = __float2half_rn(x), second = __float2half_rn(x - __half2float(first));
  return __half_as_ushort(first) | (uint32_t)__half_as_ushort(second) << 16;
}
__device__ inline float sum_of_split(uint32_t x, Dtype dtype) {
  float2 parts = dtype == BFLOAT16 ? floats_of_pair<__nv_bfloat16>(x) : floats_of_pair<__half>(x);
  return parts.x + parts.y;
}

// The warp's copy of the summands. Returns the unit: a power of two so that the largest amplitude over it is 2^14 ..
// 2^15, well inside float16.
template <int DIM>
__device__ inline float fill_summands(const float *signs, const float *balance, Dtype dtype,
                                      uint32_t (&summands)[DIM]) {
  int lane = lane_id();
  float amplitude[DIM / WARP], largest = 0;
#pragma unroll
  for (int k = 0; k < DIM / WARP; k++) {
    float sign = signs[k * WARP + lane];
    amplitude[k] = balance ? __fdividef(sign, balance[k * WARP + lane]) : sign;
    largest = fmaxf(largest, fabsf(amplitude[k]));
  }
  int exponent = (int)(__float_as_uint(warp_max(largest)) >> 23) - 14;
  float unit = __uint_as_float((uint32_t)(exponent < 1 ? 1 : exponent) << 23), inverse = 1 / unit;
#pragma unroll
  for (int k = 0; k < DIM / WARP; k++) summands[k * WARP + lane] = split(amplitude[k] * inverse, dtype);
  __syncwarp();
  return unit;
}

// Row k, column n of a product has the amplitude of block k, negative where k and n share an odd number of bits. Warps
// take turns in i. Bits 0 to 2 of k and n are in the lane; bits 3 and 4 flip whole registers.
template <int DIM, int BITS, bool VALUES>
__device__ inline void fill_right(Head<DIM, BITS, VALUES> &head) {
  using C = Cut<DIM>;
  int lane = lane_id(), g = lane / 4, c = lane % 4;
  const uint32_t(&summands)[DIM] = head.summands[warp_id()];
  static_assert(WARPS == 4, "a warp has one i");
  int i = warp_id();
#pragma unroll
  for (int at = 0; at < C::SPANS * C::STEPS; at++) {  // blocks 16 at and up
    uint32_t first[2], second[2];
#pragma unroll
    for (int k = 0; k < 2; k++) {
      uint32_t x[2];
#pragma unroll
      for (int j = 0; j < 2; j++)
        x[j] = summands[4 * (16 * at + 8 * k + 2 * c + j) + i] ^ (__popc((2 * c + j) & g) & 1 ? 0x80008000 : 0);
      first[k] = permute_bytes(x[0], x[1], 0x5410), second[k] = permute_bytes(x[0], x[1], 0x7632);
    }
#pragma unroll
    for (int tile = 0; tile < C::TILES; tile++) {
      uint32_t flip0 = at % C::STEPS & tile / 2 ? 0x80008000 : 0, flip1 = flip0 ^ (tile % 2 ? 0x80008000 : 0);
      int to = (at * 4 + i) * C::TILES + tile;
      if (VALUES)
        ((uint2 *)&head.right[to / 2][lane])[tile % 2] = make_uint2(first[0] ^ flip0, first[1] ^ flip1);
      else
        head.right[to][lane] = make_uint4(first[0] ^ flip0, first[1] ^ flip1, second[0] ^ flip0, second[1] ^ flip1);
    }
  }
}

// Blocks and what the centre becomes, by one warp: lane l has block l of each span. Loads come first, so that their way
// from memory is shared with what else is on its way.
template <int DIM, int BITS, bool VALUES>
struct Blocks {
  using C = Cut<DIM>;
  float4 row[C::SPANS][4];
  float mixed[C::SPANS][4];

  __device__ void load(const float *centre, const float *blocks) {
#pragma unroll
    for (int span = 0; span < C::SPANS; span++) {
      int n = span * C::SPAN + lane_id() % C::SPAN;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        row[span][i] = blocks ? ((const float4 *)blocks)[4 * n + i] : make_float4(i == 0, i == 1, i == 2, i == 3);
        mixed[span][i] = centre ? -centre[4 * n + i] : 0;
      }
    }
  }
  __device__ void finish(float unit, Dtype dtype, Head<DIM, BITS, VALUES> &head) {
    int lane = lane_id();
    float by = unit * C::INVERSE_ROOT;
#pragma unroll
    for (int e = 0; e < C::SPANS * 4; e++) {
      int span = e / 4, i = e % 4, n = span * C::SPAN + lane % C::SPAN;
      float4 x = row[span][i];
      float a = by * (x.x + x.y), b = by * (x.x - x.y), c = by * (x.z + x.w), d = by * (x.z - x.w);
      row[span][i] = make_float4(a + c, b + d, a - c, b - d);
      if (VALUES) continue;
      mixed[span][i] *= sum_of_split(head.summands[warp_id()][4 * n + i], dtype);
#pragma unroll
      for (int step = 1; step < C::SPAN; step *= 2) {
        float other = __shfl_xor_sync(ALL_LANES, mixed[span][i], step);
        mixed[span][i] = lane & step ? other - mixed[span][i] : mixed[span][i] + other;
      }
    }
    if (lane >= C::SPAN) return;
#pragma unroll
    for (int span = 0; span < C::SPANS; span++) {
      int n = span * C::SPAN + lane, t = n / 8, j = n % 2, c = n / 2 % 4;
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        head.blocks[t][j][i][c] = row[span][i];
        float other = C::SPANS == 1 ? 0 : mixed[C::SPANS - 1][i];
        v[i] = span ? mixed[0][i] - other : mixed[0][i] + other;
      }
      float sum[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float4 x = row[span][i];
        sum[i] = x.x * v[0] + x.y * v[1] + x.z * v[2] + x.w * v[3] + 0.0f;
      }
      if (!VALUES) head.shift[t][j][c] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
  }
};

// Column 2t + h of the words of a token is half h of word t: bits of blocks 4h to 4h + 3 of the eight. Warp t fills t.
template <int COLUMNS>
__device__ inline void fill_pack(uint4 (&pack)[COLUMNS][WARP]) {
  int t = warp_id(), g = lane_id() / 4, c = lane_id() % 4;
  if (t >= COLUMNS) return;
  float bit = g != 2 * t + c / 2 ? 0.0f : c % 2 ? 256.0f : 1.0f;
  pack[t][lane_id()] = make_uint4(pair_of<__half>(bit, 16 * bit), pair_of<__half>(2 * bit, 32 * bit),
                                  pair_of<__half>(4 * bit, 64 * bit), pair_of<__half>(8 * bit, 128 * bit));
}

// By all threads of a block; ends with a barrier.
template <int DIM, int BITS, bool VALUES>
__device__ inline void fill(const Coding &coding, int64_t batch, int64_t index, Head<DIM, BITS, VALUES> &head) {
  const Store &s = coding.store;
  int warp = warp_id();
  Blocks<DIM, BITS, VALUES> blocks;
  if (warp == 0) blocks.load(VALUES ? nullptr : centre_at(s, batch, index), s.rotation.blocks);
  float level = warp == 1 ? head.book.load(s.level_data) : 0;
  float unit = fill_summands(s.rotation.signs, balance_at(s, batch, index), coding.x.dtype, head.summands[warp]);
  if (warp == 0) blocks.finish(unit, coding.x.dtype, head);
  if (warp == 2 && lane_id() < BITS) {
    head.planes[lane_id()] = (char *)plane_at(s, batch, index, 0, lane_id());
    head.strides[lane_id()] = 4 * (uint32_t)(lane_id() < BITS - 1 ? s.mag_stride[2] : s.sign_stride[2]);
  }
  if (warp == 1) head.book.fill(level);
  fill_right(head);
  fill_pack(head.pack);
  __syncthreads();
}

}  // namespace halves
}  // namespace cuda
}  // namespace kvq
