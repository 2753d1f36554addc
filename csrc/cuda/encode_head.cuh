// What encode by tensor cores needs to know of one head: the factors of the products, the blocks, what the centre
// becomes, the codebook, and where things lie. All of it is in shared memory, because registers limit the kernel.
#pragma once

#include "encode_book.cuh"
#include "mma.cuh"

namespace kvq {
namespace cuda {
namespace halves {

constexpr int PART_LEN = 16;                      // tokens of one product
constexpr int WARPS = 4, THREADS = WARPS * WARP;  // of a block of threads
constexpr float MIXED = 8;  // what products that mix blocks leave out, a power of two: their sums are float16

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
  // Right factors of the products that mix blocks, [summand][step of all spans][i][lane]: registers of tiles 0 and 1.
  // Those of tiles 2 and 3 are the same, in the second step of a span negative. Values need one summand.
  static constexpr int SUMMANDS = VALUES ? 1 : 2;
  uint4 right[SUMMANDS][C::SPANS * C::STEPS * 4][WARP];
  // [t][i]: right factors of the products that apply the blocks times the transform of four: registers of i' = 0 .. 3
  uint4 blocks[C::WORDS][4][WARP];
  float4 shift[VALUES ? 1 : 4][C::WORDS][4];  // [i][t][c]: what the centre becomes, negative, of j = 0, 1 and again
  uint4 pack[C::COLUMNS][WARP];               // right factors that make words of bits, of i = 0, 1 and of i = 2, 3
  uint32_t summands[WARPS][DIM];              // of each warp: sign / balance / unit as a sum of two 16-bit numbers
  Book<BITS> book;
  const char *x;
  char *planes[BITS];  // magnitude bits, then the sign
  __half *scales;
  float unit;              // of the coordinates
  int x_bytes;             // from a token to the next
  uint32_t strides[BITS];  // bytes from a token or block to the next
  int start, stop;         // tokens of the store to encode, up to the last ones of this block of threads
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

// What a warp needs for its copy of the summands.
template <int DIM>
struct Amplitudes {
  float sign[DIM / WARP], balance[DIM / WARP];

  __device__ void load(const float *signs, const float *by) {
#pragma unroll
    for (int k = 0; k < DIM / WARP; k++) {
      sign[k] = signs[k * WARP + lane_id()];
      balance[k] = by ? by[k * WARP + lane_id()] : 1;
    }
  }
  // Returns the unit: a power of two so that the largest amplitude over it is inside float16, 1 for amplitudes that are
  // not far from 1.
  __device__ float fill(Dtype dtype, uint32_t (&summands)[DIM]) {
    constexpr int SMALLEST = 127 - 8, LARGEST = 127 + 10;  // exponents
    float largest = 0;
#pragma unroll
    for (int k = 0; k < DIM / WARP; k++) {
      sign[k] = __fdividef(sign[k], balance[k]);
      largest = fmaxf(largest, fabsf(sign[k]));
    }
    int exponent = (int)(__float_as_uint(warp_max(largest)) >> 23);
    int over = exponent < SMALLEST ? exponent - SMALLEST : exponent > LARGEST ? exponent - LARGEST : 0;
    float unit = __uint_as_float((uint32_t)(127 + over) << 23);
    float inverse = __uint_as_float((uint32_t)(127 - over) << 23) / MIXED;
#pragma unroll
    for (int k = 0; k < DIM / WARP; k++) summands[k * WARP + lane_id()] = split(sign[k] * inverse, dtype);
    __syncwarp();
    return unit;
  }
};

// Row k, column n of a product has the amplitude of block k, negative where k and n share an odd number of bits. Bits 0
// to 2 of k and n are in the lane; bits 3 and 4 flip whole registers. A warp has one i.
template <int DIM, int BITS, bool VALUES>
__device__ inline void fill_right(Head<DIM, BITS, VALUES> &head) {
  using C = Cut<DIM>;
  int lane = lane_id(), g = lane / 4, c = lane % 4;
  const uint32_t (&summands)[DIM] = head.summands[warp_id()];
  static_assert(WARPS == 4, "a warp has one i");
  int i = warp_id();
#pragma unroll
  for (int at = 0; at < C::SPANS * C::STEPS; at++)  // blocks 16 at and up
#pragma unroll
    for (int summand = 0; summand < head.SUMMANDS; summand++) {
      uint32_t pair[2];
#pragma unroll
      for (int k = 0; k < 2; k++) {
        uint32_t x[2];
#pragma unroll
        for (int j = 0; j < 2; j++)
          x[j] = summands[4 * (16 * at + 8 * k + 2 * c + j) + i] ^ (__popc((2 * c + j) & g) & 1 ? 0x80008000 : 0);
        pair[k] = permute_bytes(x[0], x[1], summand ? 0x7632 : 0x5410);
      }
      head.right[summand][at * 4 + i][lane] = make_uint4(pair[0], pair[1], pair[0], pair[1] ^ 0x80008000);
    }
}

// Row i of the blocks and what the centre becomes of coordinates i, each warp one i: lane l has block l of each span.
template <int DIM, int BITS, bool VALUES>
struct Blocks {
  using C = Cut<DIM>;
  float4 row[C::SPANS];
  float mixed[C::SPANS];

  __device__ void load(const float *centre, const float *blocks) {
    int i = warp_id();
#pragma unroll
    for (int span = 0; span < C::SPANS; span++) {
      int n = span * C::SPAN + lane_id() % C::SPAN;
      row[span] = blocks ? ((const float4 *)blocks)[4 * n + i] : make_float4(i == 0, i == 1, i == 2, i == 3);
      mixed[span] = centre ? -centre[4 * n + i] : 0;
    }
  }

  // The rows times the transform of four. Column g of the fragments of t is block 8t + g, which one lane of each g has.
  __device__ void fill_rows(Head<DIM, BITS, VALUES> &head) const {
    constexpr float BY = MIXED * C::INVERSE_ROOT;
    int lane = lane_id(), i = warp_id();
#pragma unroll
    for (int t = 0; t < C::WORDS; t++) head.blocks[t][i][lane] = make_uint4(0, 0, 0, 0);
    __syncwarp();
    if (lane >= C::SPAN) return;
#pragma unroll
    for (int span = 0; span < C::SPANS; span++) {
      int n = span * C::SPAN + lane, g = n % 8;
      float4 x = row[span];
      float a = BY * (x.x + x.y), b = BY * (x.x - x.y), c = BY * (x.z + x.w), d = BY * (x.z - x.w);
      int shift = g % 2 * 16;  // the half of a register that is the block's
      head.blocks[n / 8][i][4 * g + g / 2] =
          make_uint4(pair_of<__half>(a + c, 0) << shift, pair_of<__half>(b + d, 0) << shift,
                     pair_of<__half>(a - c, 0) << shift, pair_of<__half>(b - d, 0) << shift);
    }
  }

  // `summands` are the warp's.
  __device__ void fill(Dtype dtype, const uint32_t (&summands)[DIM], Head<DIM, BITS, VALUES> &head) const {
    fill_rows(head);
    if constexpr (!VALUES) {
      int lane = lane_id(), i = warp_id();
#pragma unroll
      for (int span = 0; span < C::SPANS; span++) {
        int n = span * C::SPAN + lane % C::SPAN;
        float sum = mixed[span] * sum_of_split(summands[4 * n + i], dtype);
#pragma unroll
        for (int step = 1; step < C::SPAN; step *= 2) {
          float other = __shfl_xor_sync(ALL_LANES, sum, step);
          sum = lane & step ? other - sum : sum + other;
        }
        float *to = (float *)&head.shift[i][n / 8][n / 2 % 4] + n % 2;
        if (lane < C::SPAN) to[0] = to[2] = sum + 0.0f;
      }
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

// A thread's part of the parameters of a head; fill ends with a barrier. They are asked for before rows are.
template <int DIM, int BITS, bool VALUES>
struct Parameters {
  Blocks<DIM, BITS, VALUES> blocks;
  Amplitudes<DIM> amplitudes;
  float level;

  __device__ void load(const Coding &coding, int64_t batch, int64_t index) {
    const Store &s = coding.store;
    amplitudes.load(s.rotation.signs, VALUES ? nullptr : balance_at(s, batch, index));
    blocks.load(VALUES ? nullptr : centre_at(s, batch, index), s.rotation.blocks);
    if (warp_id() == 1) level = Book<BITS>::load(s.level_data);
  }
  __device__ void fill(const Coding &coding, int64_t batch, int64_t index, Head<DIM, BITS, VALUES> &head) {
    const Store &s = coding.store;
    int warp = warp_id();
    float unit = amplitudes.fill(coding.x.dtype, head.summands[warp]);
    blocks.fill(coding.x.dtype, head.summands[warp], head);
    if (warp == 1) head.book.fill(level);
    if (warp == 2 && lane_id() < BITS) {
      head.planes[lane_id()] = (char *)plane_at(s, batch, index, 0, lane_id());
      head.strides[lane_id()] = 4 * (uint32_t)(lane_id() < BITS - 1 ? s.mag_stride[2] : s.sign_stride[2]);
    }
    if (threadIdx.x == THREADS - 1) {
      head.x = row_at(coding.x, batch, index, 0), head.scales = (__half *)scales_at(s, batch, index), head.unit = unit;
      head.x_bytes = (int)(2 * coding.x.stride[2]), head.rule = coding.rule, head.dtype = coding.x.dtype;
      head.start = (int)coding.start;
    }
    fill_right(head);
    fill_pack(head.pack);
    __syncthreads();
  }
};

}  // namespace halves
}  // namespace cuda
}  // namespace kvq
