// What encode by tensor cores needs to know of one head: the factors of the products, the blocks, what the centre
// becomes, the codebook, and where things lie. All of it is in shared memory, because registers limit the kernel.
#pragma once

#include "mma.cuh"
#include "pack.cuh"

namespace kvq {
namespace cuda {
namespace halves {

constexpr int PART_LEN = 16;  // tokens of one product

// Warps of a block of threads; what they share stays below 48 KiB.
template <int DIM>
constexpr int WARPS = DIM == 256 ? 2 : 4;

// D^-1/2
template <int DIM>
__device__ constexpr float inverse_root() {
  static_assert(DIM == 64 || DIM == 128 || DIM == 256, "one of the head dims that have a kernel");
  return DIM == 64 ? 0.125f : DIM == 128 ? 0.08838834764831845f : 0.0625f;
}

// The codebook as a tree, from the top bit of the magnitude down: node 2^depth - 1 + prefix has the edge that decides
// its bit, and what the bit adds to the value and to its square.
template <int BITS>
struct Tree {
  static constexpr int NODES = (1 << (BITS - 1)) - 1;
  float edge[NODES], step[NODES], square_step[NODES], least;

  __device__ void fill(const float *levels, int node) {
    int depth = node < 1 ? 0 : node < 3 ? 1 : 2, size = 1 << (BITS - 2 - depth);
    int low = (node + 1 - (1 << depth)) * 2 * size, middle = low + size;
    edge[node] = (levels[middle - 1] + levels[middle]) / 2;
    step[node] = levels[middle] - levels[low];
    square_step[node] = levels[middle] * levels[middle] - levels[low] * levels[low];
    if (node == 0) least = levels[0];
  }
};

// Coordinates: d = (c / 2) D/2 + 8r + 4 (c % 2) + i with r < D/16, c and i < 4.
template <int DIM, int BITS, bool VALUES>
struct Head {
  static constexpr int PLACES = DIM / 16;  // r
  // Right factors of the products in the order of their fragments. Keys: [2r + n][lane], columns n, first and second
  // summand. Values: [r][lane], columns 0 and 1.
  uint4 right[VALUES ? PLACES : 2 * PLACES][WARP];
  float4 blocks[PLACES][4][4];               // [r][i][c]: row i of the block, times the unit and D^-1/2
  float4 shift[VALUES ? 1 : 2 * PLACES][4];  // [2r + n][c]: what the products make of the centre, negative, twice
  float amplitude[DIM];    // sign / balance, then what it makes of the centre, negative, over the unit
  uint32_t summands[DIM];  // the amplitude over the unit as a sum of two 16-bit numbers
  Tree<BITS> tree;
  const char *x;
  uint32_t *planes[BITS];  // magnitude bits, then the sign
  __half *scales;
  int64_t x_bytes, sign_stride, mag_stride;  // from a token or block to the next
  int start, stop;                           // tokens of the store to encode
  int rule;
  Dtype dtype;
};

// A power of two so that the largest amplitude over it is 2^14 .. 2^15, well inside float16.
template <int DIM>
__device__ inline float unit_of(const float (&amplitude)[DIM]) {
  float largest = 0;
#pragma unroll
  for (int d = 0; d < DIM; d += WARP) largest = fmaxf(largest, fabsf(amplitude[d + lane_id()]));
  int exponent = (int)(__float_as_uint(warp_max(largest)) >> 23) - 14;
  return __uint_as_float((uint32_t)(exponent < 1 ? 1 : exponent) << 23);
}

// x as the sum of two 16-bit numbers, whose bits are the halves of the result; `x` becomes the sum.
__device__ inline uint32_t split(float &x, Dtype dtype) {
  if (dtype == BFLOAT16) {
    __nv_bfloat16 first = __float2bfloat16_rn(x), second = __float2bfloat16_rn(x - __bfloat162float(first));
    x = __bfloat162float(first) + __bfloat162float(second);
    return __bfloat16_as_ushort(first) | (uint32_t)__bfloat16_as_ushort(second) << 16;
  }
  __half first = __float2half_rn(x), second = __float2half_rn(x - __half2float(first));
  x = __half2float(first) + __half2float(second);
  return __half_as_ushort(first) | (uint32_t)__half_as_ushort(second) << 16;
}

// Element k of the 16 coordinates that one product mixes, those of all i and c.
template <int DIM>
__device__ inline int coordinate(int r, int k) {
  return k / 8 * (DIM / 2) + 8 * r + k % 8;
}
__device__ inline bool is_negative(int k, int column) { return __popc(k & column) & 1; }

// Both registers of a fragment of the right factor at r, of its first and of its second summand.
template <int DIM>
__device__ inline uint4 fragment(const uint32_t (&summands)[DIM], int r, int lane, int column) {
  uint32_t x[4];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    int k = lane % 4 * 2 + j % 2 + j / 2 * 8;
    x[j] = summands[coordinate<DIM>(r, k)] ^ (is_negative(k, column) ? 0x80008000 : 0);
  }
  return make_uint4(permute_bytes(x[0], x[1], 0x5410), permute_bytes(x[2], x[3], 0x5410),
                    permute_bytes(x[0], x[1], 0x7632), permute_bytes(x[2], x[3], 0x7632));
}

// What the products at r make of a vector in one column.
template <int DIM>
__device__ inline float mixed(const float (&x)[DIM], int r, int column) {
  float sum = 0;
#pragma unroll
  for (int k = 0; k < 16; k++) {
    float v = x[coordinate<DIM>(r, k)];
    sum += is_negative(k, column) ? -v : v;
  }
  return sum;
}

// The factors and what the centre becomes, from the amplitudes; the unit is what they were divided by.
template <int DIM, int BITS, bool VALUES>
__device__ inline float fill_factors(const float *centre, Head<DIM, BITS, VALUES> &head) {
  constexpr int PLACES = DIM / 16, THREADS = WARPS<DIM> * WARP;
  int thread = threadIdx.x;
  float unit = unit_of(head.amplitude), inverse = 1 / unit;
  __syncthreads();
  for (int d = thread; d < DIM; d += THREADS) {
    float x = head.amplitude[d] * inverse;
    head.summands[d] = split(x, head.dtype);
    head.amplitude[d] = centre ? -x * centre[d] : 0;
  }
  __syncthreads();
  for (int e = thread; e < PLACES * 2 * WARP; e += THREADS) {
    // Column 2c + j of product n is i = 2n + j: bits 0 and 1 of the number of the column, those of c above.
    int lane = e % WARP, n = e / WARP % 2, r = e / WARP / 2, column = lane / 8 * 4 + 2 * n + lane / 4 % 2;
    uint4 b = fragment(head.summands, r, lane, column);
    if (VALUES)
      ((uint2 *)&head.right[r][lane])[n] = make_uint2(b.x, b.y);
    else
      head.right[2 * r + n][lane] = b;
  }
  for (int e = thread; !VALUES && e < DIM; e += THREADS) {
    int j = e % 2, c = e / 2 % 4, n = e / 8 % 2, r = e / 16;
    float *shift = (float *)&head.shift[2 * r + n][c];
    shift[j] = shift[j + 2] = mixed(head.amplitude, r, 4 * c + 2 * n + j);
  }
  return unit;
}

// By all threads of a block; ends with a barrier.
template <int DIM, int BITS, bool VALUES>
__device__ inline void fill(const Coding &coding, int64_t batch, int64_t index, Head<DIM, BITS, VALUES> &head) {
  constexpr int PLACES = DIM / 16, THREADS = WARPS<DIM> * WARP;
  const Store &s = coding.store;
  const float *balance = balance_at(s, batch, index), *blocks = s.rotation.blocks;
  int thread = threadIdx.x;
  if (thread < Tree<BITS>::NODES) head.tree.fill(s.level_data, thread);
  if (thread < BITS) head.planes[thread] = plane_at(s, batch, index, 0, thread);
  if (thread == 0) {
    head.x = row_at(coding.x, batch, index, 0), head.scales = (__half *)scales_at(s, batch, index);
    head.x_bytes = 2 * coding.x.stride[2], head.sign_stride = s.sign_stride[2], head.mag_stride = s.mag_stride[2];
    head.start = (int)coding.start, head.stop = (int)(coding.start + coding.tokens);
    head.rule = coding.rule, head.dtype = coding.x.dtype;
  }
  for (int d = thread; d < DIM; d += THREADS)
    head.amplitude[d] = balance ? __fdividef(s.rotation.signs[d], balance[d]) : s.rotation.signs[d];
  __syncthreads();
  float by = fill_factors(centre_at(s, batch, index), head) * inverse_root<DIM>();
  for (int e = thread; e < PLACES * 16; e += THREADS) {
    int c = e % 4, i = e / 4 % 4, r = e / 16;
    const float *row = blocks + (coordinate<DIM>(r, 8 * (c / 2)) + 4 * (c % 2)) * 4 + 4 * i;
    float4 identity = make_float4(i == 0, i == 1, i == 2, i == 3);
    float4 block = blocks ? *(const float4 *)row : identity;
    head.blocks[r][i][c] = make_float4(by * block.x, by * block.y, by * block.z, by * block.w);
  }
  __syncthreads();
}

}  // namespace halves
}  // namespace cuda
}  // namespace kvq
