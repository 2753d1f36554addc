// What a mask does to each tile: whether all, none or some of 64 query tokens and a tile's tokens are attended. With
// many query tokens most tiles of a causal mask are plain, and the kernel neither reads the mask nor multiplies in
// vain.
#include "tiles_tokens.cuh"

namespace kvq {
namespace cuda {
namespace tiles {

namespace {

constexpr int THREADS = 128;

__global__ void __launch_bounds__(THREADS) mask_kinds(const __grid_constant__ Plan plan) {
  const Attention &a = plan.a;
  uint32_t index = blockIdx.x, rest = index / plan.num_tiles, block = rest % plan.mask_blocks;
  int64_t b = rest / plan.mask_blocks / plan.mask_heads, h = rest / plan.mask_blocks % plan.mask_heads;
  int tile = index % plan.num_tiles;
  bool packed = tile < plan.packed_tiles;
  int64_t first = (packed ? tile : tile - plan.packed_tiles) * plan.tile_len,
          left = (packed ? a.length : a.exact_len) - first;
  Tokens tokens = {packed, (int)first, 0, 0, (int)a.num_sinks, (int)a.length};
  int count = (int)(left < plan.tile_len ? left : plan.tile_len);
  int64_t queries = a.queries - block * MASK_QUERIES, offset = b * a.mask.stride[0] + h * a.mask.stride[1];
  if (queries > MASK_QUERIES) queries = MASK_QUERIES;
  bool not_all = false, not_none = false;
  for (int i = threadIdx.x; i < queries * plan.tile_len; i += THREADS) {
    int64_t query = block * MASK_QUERIES + i / plan.tile_len;
    int token = i % plan.tile_len;
    if (token >= count) continue;
    int64_t at = offset + query * a.mask.stride[2] + tokens.column((int)first + token) * a.mask.stride[3];
    float bias = a.mask.boolean ? (((const bool *)a.mask.data)[at] ? 0 : -INFINITY) : ((const float *)a.mask.data)[at];
    not_all |= bias != 0, not_none |= bias != -INFINITY;
  }
  not_all = __syncthreads_or(not_all), not_none = __syncthreads_or(not_none);
  if (threadIdx.x == 0) plan.mask_kinds[index] = !not_none ? NONE : not_all ? MIXED : ALL;
}

}  // namespace

void launch_mask_kinds(const Plan &plan, cudaStream_t stream) {
  if (!plan.mask_kinds) return;
  int64_t grid = (int64_t)plan.num_tiles * plan.mask_blocks * plan.mask_heads * plan.mask_batches;
  mask_kinds<<<(unsigned)grid, THREADS, 0, stream>>>(plan);
}

}  // namespace tiles
}  // namespace cuda
}  // namespace kvq
