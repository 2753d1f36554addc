// decode: a warp rebuilds one token at a time, a CTA the tokens of one block of 32 of one head.
#include "launch.h"
#include "pack.cuh"
#include "rotation.cuh"

namespace kvq {
namespace cuda {

namespace {

constexpr int WARPS = 8;

// scale * value(code) of token t of a block.
__device__ void load_values(const Coding &c, int64_t batch, int64_t head, int64_t block, int t, const Codebook &book,
                            float *row, int lane) {
  const Store &s = c.store;
  const uint32_t *planes[MAX_BITS];
  for (int p = 0; p < MAX_BITS; p++)
    planes[p] = p < s.bits ? plane_at(s, batch, head, c.along_tokens ? block : block * BLOCK_LEN + t, p) : nullptr;
  float scale = __half2float(((const __half *)scales_at(s, batch, head))[block * BLOCK_LEN + t]);
  for (int d = lane; d < s.dim; d += WARP) {
    int code = 0;
    for (int p = 0; p < MAX_BITS; p++)
      if (p < s.bits) code |= (int)(c.along_tokens ? planes[p][d] >> t & 1 : planes[p][d / WORD_BITS] >> lane & 1) << p;
    row[d] = scale * book.value(code, s.bits);
  }
}

__global__ void __launch_bounds__(WARPS *WARP, 2) decode(const __grid_constant__ Coding c) {
  extern __shared__ float4 memory[];
  const Store &s = c.store;
  int lane = lane_id(), warp = warp_id();
  float *row = (float *)memory + warp * s.dim * (s.rotation.matrix ? 2 : 1);
  uint32_t index = blockIdx.x / (uint32_t)c.blocks;
  int64_t batch = index / (uint32_t)c.heads, head = index % (uint32_t)c.heads;
  int64_t block = c.start / BLOCK_LEN + blockIdx.x % (uint32_t)c.blocks;
  uint32_t valid = valid_tokens(block, c.start, c.start + c.tokens);
  const float *centre = centre_at(s, batch, head), *balance = balance_at(s, batch, head);
  Codebook book(s);
#pragma unroll 1
  for (int t = warp; t < BLOCK_LEN; t += WARPS) {
    if (!(valid >> t & 1)) continue;
    load_values(c, batch, head, block, t, book, row, lane);
    rotate_row<true>(s.rotation, row, row + s.dim, lane);
    char *out = row_at(c.x, batch, head, block * BLOCK_LEN - c.start + t);
    for (int d = lane; d < s.dim; d += WARP)
      store_element(out, c.x.dtype, d, row[d] * (balance ? balance[d] : 1) + (centre ? centre[d] : 0));
    __syncwarp();
  }
}

}  // namespace

void launch_decode(const Coding &c, cudaStream_t stream) {
  int bytes = 4 * WARPS * c.store.dim * (c.store.rotation.matrix ? 2 : 1);
  decode<<<(unsigned)(c.batch * c.heads * c.blocks), WARPS * WARP, bytes, stream>>>(c);
}

}  // namespace cuda
}  // namespace kvq
