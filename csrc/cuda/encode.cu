// encode of any head dim, dtype and rotation. A CTA takes one block of 32 tokens of one head, on the grid of blocks of
// the store, a warp one token at a time: the row is rotated in shared memory, quantised 32 coordinates at once, and
// votes make its words in the order of keys. Values are transposed 32 x 32 bits before they are stored.
#include "launch.h"
#include "pack.cuh"
#include "rotation.cuh"

namespace kvq {
namespace cuda {

namespace {

constexpr int WARPS = 8;

struct Block {
  int64_t batch, head, index;  // of the store
  int64_t first;               // token of x at bit 0, may be negative
  uint32_t valid;
};

// (x - centre) / balance of one token, rotated, in `row`.
__device__ void load_rotated(const Coding &c, const Block &at, int t, float *row, int lane) {
  const Store &s = c.store;
  const float *centre = centre_at(s, at.batch, at.head), *balance = balance_at(s, at.batch, at.head);
  const char *x = row_at(c.x, at.batch, at.head, at.first + t);
  for (int d = lane; d < s.dim; d += WARP) {
    float v = load_element(x, c.x.dtype, d);
    if (centre) v -= centre[d];
    row[d] = balance ? __fdividef(v, balance[d]) : v;
  }
  rotate_row<false>(s.rotation, row, row + s.dim, lane);
}

// Words [bits, W] in the order of keys of a rotated row, the sign last; returns the scale.
__device__ float quantise(const Coding &c, const Codebook &book, const float *row, uint32_t *words, int lane) {
  const Store &s = c.store;
  int num_words = (int)ceil_div(s.dim, WORD_BITS);
  float norm = 0, dot = 0, square = 0;
  for (int d = lane; d < s.dim; d += WARP) norm = fmaf(row[d], row[d], norm);
  norm = sqrtf(warp_sum(norm));
  float rms = norm / sqrtf((float)s.dim), inverse = 1 / fmaxf(rms, 1e-30f);
  for (int w = 0; w < num_words; w++) {
    int d = w * WARP + lane, magnitude = 0;
    float u = d < s.dim ? row[d] * inverse : 0, value;
    magnitude = book.magnitude(fabsf(u), value);
    if (d >= s.dim) magnitude = 0, value = 0;
    dot = fmaf(fabsf(u), value, dot);
    square = fmaf(value, value, square);
    int code = magnitude | (u < 0) << (s.bits - 1);
    for (int p = 0; p < s.bits; p++) {
      uint32_t word = __ballot_sync(ALL_LANES, code >> p & 1);
      if (lane == 0) words[p * num_words + w] = word;
    }
  }
  return scale_of(c.rule, norm, rms, warp_sum(dot) * rms, warp_sum(square));
}

__device__ void store_keys(const Coding &c, const Block &at, const uint32_t *words, int stride) {
  const Store &s = c.store;
  int num_words = (int)ceil_div(s.dim, WORD_BITS), width = s.bits * num_words;
  for (int i = threadIdx.x; i < BLOCK_LEN * width; i += WARPS * WARP) {
    int t = i / width, p = i % width / num_words, w = i % num_words;
    if (at.valid >> t & 1)
      plane_at(s, at.batch, at.head, at.index * BLOCK_LEN + t, p)[w] = words[t * stride + p * num_words + w];
  }
}

// Bits of tokens before the first new one stay.
__device__ void store_values(const Coding &c, const Block &at, const uint32_t *words, int stride) {
  const Store &s = c.store;
  int num_words = (int)ceil_div(s.dim, WORD_BITS), lane = lane_id();
  uint32_t kept = valid_tokens<int64_t>(at.index, 0, c.start);
  for (int i = warp_id(); i < s.bits * num_words; i += WARPS) {
    uint32_t word = transpose_bits(at.valid >> lane & 1 ? words[lane * stride + i] : 0, lane);
    int d = i % num_words * WARP + lane;
    if (d >= s.dim) continue;
    uint32_t *to = plane_at(s, at.batch, at.head, at.index, i / num_words) + d;
    *to = (kept ? *to & kept : 0) | word;
  }
}

__global__ void __launch_bounds__(WARPS *WARP) encode(const __grid_constant__ Coding c) {
  extern __shared__ float4 memory[];
  const Store &s = c.store;
  int lane = lane_id(), warp = warp_id(), row_size = s.dim * (s.rotation.matrix ? 2 : 1);
  int stride = (s.bits * (int)ceil_div(s.dim, WORD_BITS)) | 1;
  float *row = (float *)memory + warp * row_size;
  uint32_t *words = (uint32_t *)memory + WARPS * row_size;
  uint32_t head = blockIdx.x / (uint32_t)c.blocks;
  Block at;
  at.batch = head / (uint32_t)c.heads, at.head = head % (uint32_t)c.heads;
  at.index = c.start / BLOCK_LEN + blockIdx.x % (uint32_t)c.blocks;
  at.first = at.index * BLOCK_LEN - c.start;
  at.valid = valid_tokens(at.index, c.start, c.start + c.tokens);
  Codebook book(s);
#pragma unroll 1
  for (int t = warp; t < BLOCK_LEN; t += WARPS) {
    if (!(at.valid >> t & 1)) continue;
    load_rotated(c, at, t, row, lane);
    float scale = quantise(c, book, row, words + t * stride, lane);
    __half *scales = (__half *)scales_at(s, at.batch, at.head);
    if (lane == 0) scales[at.index * BLOCK_LEN + t] = __float2half_rn(scale);
    __syncwarp();
  }
  __syncthreads();
  if (c.along_tokens)
    store_values(c, at, words, stride);
  else
    store_keys(c, at, words, stride);
}

}  // namespace

void launch_encode(const Coding &c, cudaStream_t stream) {
  int row_size = c.store.dim * (c.store.rotation.matrix ? 2 : 1);
  int stride = (c.store.bits * (int)ceil_div(c.store.dim, WORD_BITS)) | 1;
  int bytes = 4 * (WARPS * row_size + BLOCK_LEN * stride);
  encode<<<(unsigned)(c.batch * c.heads * c.blocks), WARPS * WARP, bytes, stream>>>(c);
}

}  // namespace cuda
}  // namespace kvq
