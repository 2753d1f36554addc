// Work of attend_selected, whose amount only the device knows: an even share of all selected tokens for every block of
// threads.
//
// An item is up to eight rows of one selection; its tokens are cut into tiles of 64, these evenly into parts, a block
// of threads each. All parts are as short as their number allows. None has tiles of two items: a second one would begin
// late, when its queries are turned and its first tokens asked for.
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
  float *sums;    // [parts, ITEM_ROWS, value dim]
  float2 *state;  // [parts, ITEM_ROWS]: maximum in log2, sum of the weights
  int2 *spans;    // [items]: first part, number of parts

  __device__ __forceinline__ int head_of(int item) const { return item / row_blocks; }  // b * selections + k
  __device__ __forceinline__ int first_row(int item) const { return item % row_blocks * ITEM_ROWS; }
  __device__ __forceinline__ int count_of(int item) const {
    int head = head_of(item);
    return *(count + head / selections * count_stride + head % selections);
  }
  __device__ __forceinline__ int tiles_of(int item) const {
    return (max(count_of(item), 0) + SPARSE_TILE - 1) / SPARSE_TILE;
  }

  // By a whole warp: the sum of of_tiles(tiles of an item) over all items.
  template <class OfTiles>
  __device__ __forceinline__ int sum(OfTiles of_tiles) const {
    int sum = 0;
#pragma unroll 2
    for (int i = lane_id(); i < items; i += WARP) sum += of_tiles(tiles_of(i));
    return __reduce_add_sync(ALL_LANES, sum);
  }
};

// How tiles are dealt, found by a whole warp.
struct Deal {
  uint32_t each;  // tiles of a part at most
  __device__ __forceinline__ explicit Deal(const Work &w) {
    uint32_t tiles = (uint32_t)w.sum([](int n) { return n; }), parts = (uint32_t)w.parts, spare = parts - w.items;
    uint32_t least = max(1u, (tiles + parts - 1) / parts), most = spare ? (tiles + spare - 1) / spare : tiles;
    most = max(least, most);
    while (least < most) {
      each = (least + most) / 2;
      if (w.sum([&](int n) { return parts_of(n); }) <= w.parts)
        most = each;
      else
        least = each + 1;
    }
    each = least;
  }
  __device__ __forceinline__ int parts_of(int tiles) const { return (int)((tiles + each - 1) / each); }
};

// Tiles first .. last of an item, those of a part; found by every warp of a block, the first of which writes the span.
struct Share {
  int item, first, last;  // item: -1 if the part has none
  __device__ __forceinline__ explicit Share(const Work &w) : item(-1) {
    Deal deal(w);
    int lane = lane_id(), part = blockIdx.x;
    for (int base = 0; base < w.items; base += WARP) {
      int tiles = base + lane < w.items ? w.tiles_of(base + lane) : 0, own = deal.parts_of(tiles), until = own;
      for (int step = 1; step < WARP; step *= 2) {
        int other = __shfl_up_sync(ALL_LANES, until, step);
        if (lane >= step) until += other;
      }
      uint32_t behind = __ballot_sync(ALL_LANES, part < until);
      if (behind) {
        int found = __ffs((int)behind) - 1;
        int parts = __shfl_sync(ALL_LANES, own, found), place = part - __shfl_sync(ALL_LANES, until - own, found);
        tiles = __shfl_sync(ALL_LANES, tiles, found);
        int each = tiles / parts, longer = tiles % parts;
        item = base + found, first = place * each + min(place, longer), last = first + each + (place < longer);
        if (place == 0 && threadIdx.x == 0) w.spans[item] = make_int2(blockIdx.x, parts);
        return;
      }
      part -= __shfl_sync(ALL_LANES, until, WARP - 1);
    }
  }
};

// The parts of an item, known once they are made.
struct Span {
  int first, count;
  __device__ __forceinline__ Span(const Work &w, int item) : first(0), count(0) {
    int2 span = w.spans[item];  // of an item without tiles nobody wrote it
    if (w.tiles_of(item) > 0) first = span.x, count = span.y;
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
    return k * (w.rows / (int)a.queries) + row / (int)a.queries;
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
