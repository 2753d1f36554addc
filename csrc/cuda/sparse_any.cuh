// Attention over selected tokens, and their scores, of any dtype, head dim and store, in float32.
//
// A block of threads rebuilds 32 rows in shared memory, packed ones in rotated space, where the queries are turned to
// as well.
#pragma once

#include "pack.cuh"
#include "rotation.cuh"
#include "sparse_asm.cuh"
#include "sparse_work.cuh"

namespace kvq {
namespace cuda {

constexpr int ANY_THREADS = 128, ANY_WARPS = ANY_THREADS / WARP, MAX_DIMS_EACH = MAX_HEAD_DIM / ANY_THREADS;
static_assert(SPARSE_TILE % WARP == 0, "a tile is whole groups of 32 tokens");

// Keys or values of one head.
struct RowSource {
  const Dense &dense;
  const Store &store;
  bool packed;
  int dim, b, h;

  __device__ __forceinline__ const float *centre() const { return packed ? centre_at(store, b, h) : nullptr; }
  __device__ __forceinline__ const float *balance() const { return packed ? balance_at(store, b, h) : nullptr; }

  // The values of all codes, sign above magnitude.
  __device__ __forceinline__ void load_values(float *values) const {
    int code = threadIdx.x, half = packed ? 1 << (store.bits - 1) : 0;
    if (code < 2 * half) values[code] = code < half ? store.level_data[code] : -store.level_data[code - half];
  }
  // Row `token` to `to`, by a warp; in rotated space if packed.
  __device__ __forceinline__ void load(float *to, int token, const float *values, int lane) const {
    if (!packed) {
      const char *row = row_at(dense, b, h, token);
      for (int d = lane; d < dim; d += WARP) to[d] = load_element(row, dense.dtype, d);
      return;
    }
    const uint32_t *planes[MAX_BITS];
#pragma unroll
    for (int p = 0; p < MAX_BITS; p++) planes[p] = plane_at(store, b, h, token, p < store.bits ? p : 0);
    float scale = __half2float(((const __half *)scales_at(store, b, h))[token]);
    for (int d = lane; d < dim; d += WARP) {
      int code = 0;
#pragma unroll
      for (int p = 0; p < MAX_BITS; p++)
        if (p < store.bits) code |= (int)(planes[p][d / WORD_BITS] >> lane & 1) << p;
      to[d] = scale * values[code];
    }
  }
};

__device__ __forceinline__ RowSource keys_of(const Selected &s, int b, int h) {
  return {s.attention.exact_keys, s.attention.keys, s.packed_keys, s.attention.dim, b, h};
}
__device__ __forceinline__ RowSource values_of(const Selected &s, int b, int h) {
  return {s.attention.exact_values, s.attention.values, s.packed_values, s.attention.value_dim, b, h};
}

// Shared memory of a block, in floats.
struct AnyShape {
  int query_row, tile_row;  // an odd stride lets 32 lanes read 32 rows
  __host__ __device__ AnyShape(int dim, int value_dim)
      : query_row((int)round_up(dim, 4)), tile_row((dim > value_dim ? dim : value_dim) | 1) {}
  __host__ __device__ int query_floats() const { return ITEM_ROWS * query_row; }
  __host__ __device__ int floats() const {
    return query_floats() + ANY_WARPS * query_row + ITEM_ROWS + ITEM_ROWS * WARP + WARP + WARP * tile_row;
  }
};

struct AnyBlock {
  const Selected &s;
  float *queries, *other, *bias, *weights, *tile;  // bias: q . centre of a row
  int *tokens;
  AnyShape shape;
  int t, lane, warp;

  __device__ __forceinline__ AnyBlock(const Selected &s, float *shared)
      : s(s), shape(s.attention.dim, s.attention.value_dim), t(threadIdx.x), lane(lane_id()), warp(warp_id()) {
    queries = shared, other = queries + shape.query_floats() + warp * shape.query_row;
    bias = queries + shape.query_floats() + ANY_WARPS * shape.query_row, weights = bias + ITEM_ROWS;
    tokens = (int *)(weights + ITEM_ROWS * WARP), tile = (float *)(tokens + WARP);
  }

  // Queries of an item, turned to where its keys are.
  __device__ __forceinline__ void load_queries(const Work &w, int item, const RowSource &keys) {
    const Attention &a = s.attention;
    ItemPlace place(w, item);
    const float *centre = keys.centre(), *balance = keys.balance();
    for (int r = warp; r < ITEM_ROWS; r += ANY_WARPS) {
      int row = w.first_row(item) + r;
      float *to = queries + r * shape.query_row, sum = 0;
      bool used = row < w.rows;
      const char *q = row_at(a.q, place.b, place.head(a, w, used ? row : 0), place.query(a, used ? row : 0));
      for (int d = lane; d < a.dim; d += WARP) {
        float x = used ? load_element(q, a.q.dtype, d) : 0;
        if (centre) sum = fmaf(x, centre[d], sum);
        to[d] = balance ? x * balance[d] : x;
      }
      sum = warp_sum(sum);
      if (lane == 0) bias[r] = sum;
      __syncwarp();
      if (keys.packed) rotate_row<false>(keys.store.rotation, to, other, lane);
    }
  }

  // Rows of the tokens at places at .. at + 32 of the selection.
  __device__ __forceinline__ void load_tile(const RowSource &from, const float *values) {
    for (int i = warp; i < WARP; i += ANY_WARPS)
      if (tokens[i] >= 0) from.load(tile + i * shape.tile_row, tokens[i], values, lane);
  }
  __device__ __forceinline__ void load_tokens(const int32_t *indices, int at, int count) {
    if (t < WARP) tokens[t] = at + t < count ? (int)min((uint32_t)indices[at + t], (uint32_t)(s.tokens - 1)) : -1;
  }

  // scale * q . k of row r and the token of this lane.
  __device__ __forceinline__ float score(int r) const {
    const float *q = queries + r * shape.query_row, *k = tile + lane * shape.tile_row;
    float sum = bias[r];
    for (int d = 0; d < s.attention.dim; d++) sum = fmaf(q[d], k[d], sum);
    return sum * s.attention.scale;
  }
};

__global__ void __launch_bounds__(ANY_THREADS, 2)
    score_any(const __grid_constant__ Selected s, const __grid_constant__ Work w) {
  extern __shared__ float4 memory[];
  __shared__ float key_values[1 << MAX_BITS];
  const Attention &a = s.attention;
  AnyBlock block(s, (float *)memory);
  wait_for_kernels_ahead(), let_next_kernel_begin();
  int item = blockIdx.x, at = blockIdx.y * WARP, count = w.count_of(item);
  ItemPlace place(w, item);
  bool some = at < count;
  if (some) {
    RowSource keys = keys_of(s, place.b, place.kv_head(a, w));
    keys.load_values(key_values);
    block.load_queries(w, item, keys);
    block.load_tokens(
        s.selection.indices + place.b * s.selection.index_stride[0] + place.k * s.selection.index_stride[1], at, count);
    __syncthreads();
    block.load_tile(keys, key_values);
    __syncthreads();
  }
  int column = at + block.lane;
  for (int r = block.warp; r < ITEM_ROWS; r += ANY_WARPS) {
    int row = w.first_row(item) + r;
    if (row >= w.rows || column >= s.selection.capacity) continue;
    float *out = (float *)row_at(a.out, place.b, place.head(a, w, row), place.query(a, row));
    out[column] = column < count ? block.score(r) : -INFINITY;
  }
}

__global__ void __launch_bounds__(ANY_THREADS, 2)
    attend_any(const __grid_constant__ Selected s, const __grid_constant__ Work w) {
  extern __shared__ float4 memory[];
  __shared__ float top[ITEM_ROWS], mass[ITEM_ROWS], keep[ITEM_ROWS], key_values[1 << MAX_BITS],
      value_values[1 << MAX_BITS];
  const Attention &a = s.attention;
  AnyBlock block(s, (float *)memory);
  wait_for_kernels_ahead(), let_next_kernel_begin();
  int t = threadIdx.x, lane = block.lane;
  Share share(w);
  if (share.item < 0) return;
  int item = share.item, count = w.count_of(item);
  ItemPlace place(w, item);
  int h = place.kv_head(a, w);
  RowSource keys = keys_of(s, place.b, h), values = values_of(s, place.b, h);
  keys.load_values(key_values), values.load_values(value_values);
  const int32_t *indices =
      s.selection.indices + place.b * s.selection.index_stride[0] + place.k * s.selection.index_stride[1];
  block.load_queries(w, item, keys);
  if (t < ITEM_ROWS) top[t] = NOTHING, mass[t] = 0;
  float sums[MAX_DIMS_EACH][ITEM_ROWS] = {};
  for (int at = share.first * SPARSE_TILE; at < min(share.last * SPARSE_TILE, count); at += WARP) {
    block.load_tokens(indices, at, count);
    __syncthreads();
    block.load_tile(keys, key_values);
    __syncthreads();
    for (int r = block.warp; r < ITEM_ROWS; r += ANY_WARPS) {
      int row = min(w.first_row(item) + r, w.rows - 1), token = block.tokens[lane];
      float x = -INFINITY;
      if (token >= 0) {
        x = block.score(r);
        if (a.softcap > 0) x = tanhf(x / a.softcap) * a.softcap;
        x = TokenMask(a.mask, place.b, place.head(a, w, row), place.query(a, row)).add(x * LOG2_OF_E, token);
      }
      float most = fmaxf(top[r], warp_max(x)), p = exp2f(x - most), all = warp_sum(p);
      __syncwarp();
      if (lane == 0) keep[r] = exp2f(top[r] - most), mass[r] = mass[r] * keep[r] + all, top[r] = most;
      block.weights[r * WARP + lane] = p;
      __syncwarp();
    }
    __syncthreads();
    block.load_tile(values, value_values);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < MAX_DIMS_EACH; i++) {
      int d = t + i * ANY_THREADS;
      if (d >= a.value_dim) continue;
#pragma unroll
      for (int r = 0; r < ITEM_ROWS; r++) sums[i][r] *= keep[r];
      for (int n = 0; n < WARP && at + n < count; n++) {
        float v = block.tile[n * block.shape.tile_row + d];
#pragma unroll
        for (int r = 0; r < ITEM_ROWS; r++) sums[i][r] = fmaf(block.weights[r * WARP + n], v, sums[i][r]);
      }
    }
    __syncthreads();
  }
  int64_t to = (int64_t)blockIdx.x * ITEM_ROWS;
#pragma unroll
  for (int i = 0; i < MAX_DIMS_EACH; i++)
#pragma unroll
    for (int r = 0; r < ITEM_ROWS; r++)
      if (t + i * ANY_THREADS < a.value_dim) w.sums[(to + r) * a.value_dim + t + i * ANY_THREADS] = sums[i][r];
  if (t < ITEM_ROWS) w.state[to + t] = make_float2(top[t], mass[t]);
}

}  // namespace cuda
}  // namespace kvq
