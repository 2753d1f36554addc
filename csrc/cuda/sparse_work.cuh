// Work of attend_selected, whose amount only the device knows: an even share of all selected tokens for every block of
// threads.
//
// An item is up to eight rows of one selection; its tokens are cut into tiles of 64. Tiles of all items in a row are
// dealt to `parts` blocks, so that a block works on few items one after another. What it finds for one is the partial
// result at `part + item`, which is a place of its own: parts and items both only grow along the tiles.
#pragma once

#include "rows.cuh"
#include "sparse.h"

namespace kvq {
namespace cuda {

constexpr int ITEM_ROWS = 8, SPARSE_TILE = 64;
constexpr float NOTHING = -1e30f, LOG2_OF_E = 1.44269504f;  // a maximum below every score, in log2

struct Work {
  int parts, items, row_blocks, selections, rows;  // rows of a selection
  const int32_t *count;
  int64_t count_stride;
  float *sums;    // [parts + items, ITEM_ROWS, value dim]
  float2 *state;  // [parts + items, ITEM_ROWS]: maximum in log2, sum of the weights

  __device__ __forceinline__ int head_of(int item) const { return item / row_blocks; }  // b * selections + k
  __device__ __forceinline__ int first_row(int item) const { return item % row_blocks * ITEM_ROWS; }
  __device__ __forceinline__ int count_of(int item) const {
    int head = head_of(item);
    return *(count + head / selections * count_stride + head % selections);
  }
  __device__ __forceinline__ int tiles_of(int item) const {
    return (max(count_of(item), 0) + SPARSE_TILE - 1) / SPARSE_TILE;
  }
  // By a whole warp: the number of all tiles.
  __device__ __forceinline__ int all_tiles() const {
    int sum = 0;
#pragma unroll 4
    for (int i = lane_id(); i < items; i += WARP) sum += tiles_of(i);
    for (int step = WARP / 2; step; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    return sum;
  }
  // By a whole warp: the item of a tile; `tile` becomes its place in the item.
  __device__ __forceinline__ int item_of(int &tile) const {
    int lane = lane_id();
    for (int base = 0;; base += WARP) {
      int own = base + lane < items ? tiles_of(base + lane) : 0, until = own;
      for (int step = 1; step < WARP; step *= 2) {
        int other = __shfl_up_sync(ALL_LANES, until, step);
        if (lane >= step) until += other;
      }
      uint32_t behind = __ballot_sync(ALL_LANES, tile < until);
      if (behind) {
        int found = __ffs((int)behind) - 1;
        tile -= __shfl_sync(ALL_LANES, until - own, found);
        return base + found;
      }
      tile -= __shfl_sync(ALL_LANES, until, WARP - 1);
    }
  }
};

// How so many tiles are dealt: the first parts have one more than the others.
struct Deal {
  uint32_t each, longer;
  __device__ __forceinline__ Deal(const Work &w, int tiles)
      : each((uint32_t)tiles / w.parts), longer((uint32_t)tiles % w.parts) {}
  __device__ __forceinline__ int first_tile(uint32_t part) const { return (int)(part * each + min(part, longer)); }
  __device__ __forceinline__ int owner(uint32_t tile) const {
    uint32_t of_longer = longer * (each + 1);
    return (int)(tile < of_longer ? tile / (each + 1) : longer + (tile - of_longer) / each);
  }
};

// The parts that have tiles of an item, found by a whole warp.
struct Span {
  int first, count;
  __device__ __forceinline__ Span(const Work &w, int item) {
    int own = 0, before = 0, tiles = 0;
#pragma unroll 4
    for (int i = lane_id(); i < w.items; i += WARP) {
      int n = w.tiles_of(i);
      tiles += n, before += i < item ? n : 0, own += i == item ? n : 0;
    }
    for (int step = WARP / 2; step; step /= 2) {
      tiles += __shfl_xor_sync(ALL_LANES, tiles, step), before += __shfl_xor_sync(ALL_LANES, before, step);
      own += __shfl_xor_sync(ALL_LANES, own, step);
    }
    Deal deal(w, tiles);
    first = own ? deal.owner(before) : 0, count = own ? deal.owner(before + own - 1) + 1 - first : 0;
  }
};

// Row r of an item's selection among queries and outputs.
struct ItemPlace {
  int b, k;  // sequence and selection
  __device__ __forceinline__ ItemPlace(const Work &w, int item)
      : b(w.head_of(item) / w.selections), k(w.head_of(item) % w.selections) {}
  __device__ __forceinline__ int kv_head(const Attention &a, const Work &w) const {
    return (int)(k * a.heads / w.selections);
  }
  __device__ __forceinline__ int64_t head(const Attention &a, const Work &w, int row) const {
    return (int64_t)k * (w.rows / (int)a.queries) + row / (int)a.queries;
  }
  __device__ __forceinline__ int64_t query(const Attention &a, int row) const { return row % (int)a.queries; }
};

// The mask of one row; add takes and gives scores times log2 e.
struct TokenMask {
  const char *data;  // null without a mask
  int64_t stride;    // bytes
  bool boolean;
  __device__ __forceinline__ TokenMask(const Mask &m, int64_t b, int64_t head, int64_t query)
      : data((const char *)m.data), stride(m.stride[3] * (m.boolean ? 1 : 4)), boolean(m.boolean) {
    if (data) data += (b * m.stride[0] + head * m.stride[1] + query * m.stride[2]) * (boolean ? 1 : 4);
  }
  __device__ __forceinline__ float add(float x, int64_t token) const {
    if (!data) return x;
    if (boolean) return data[token * stride] ? x : -INFINITY;
    return fmaf(*(const float *)(data + token * stride), LOG2_OF_E, x);
  }
};

}  // namespace cuda
}  // namespace kvq
