// The decode kernel. Grid: (sequence and head, parts, block of rows). A part is a few steps of exact tokens and a run
// of tiles of packed ones; its warps take them in turn, exact ones first: they are asked for before any tile. A warp copies its own tiles and never waits for another inside the loop: while it sums the values of a tile,
// the keys of its next one are on their way, and the other way round. Two CTAs of four warps a multiprocessor, with all
// registers, were faster than three or four, and tiles of 128 tokens faster than of 32.
#pragma once

#include "decode_combine.cuh"

namespace kvq {
namespace cuda {

template <int KBITS_, int VBITS_, int DIM_, int VDIM_, bool OCT_>
struct DecodeShape {
  static constexpr int KBITS = KBITS_, VBITS = VBITS_, DIM = DIM_, VDIM = VDIM_, NUM_ROWS = OCT_ ? 8 : 4;
  static constexpr bool OCT = OCT_, EXACT_APART = VDIM > 128;  // exact tokens in CTAs of their own: with wide sums both
                                                               // do not fit into the registers
  static constexpr bool SHORT = VDIM <= 32 * WARPS && VDIM % 32 == 0;  // whether there is a kernel of short contexts
  using Tile = TileLayout<KBITS, VBITS, DIM, VDIM>;
  using Packed = PackedWarp<KBITS, VBITS, DIM, VDIM, OCT>;
  // Shared memory in bytes: tiles (sums of the warps afterwards), bytes of the queries, one row a warp, row infos.
  // Exact parts: values of every warp.
  static constexpr int MERGE_ROW = VDIM + 4, MERGED = 4 * WARPS * ROWS * MERGE_ROW, TILES = 4 * WARPS * Tile::SIZE;
  static constexpr int QUERIES = TILES > MERGED ? TILES : MERGED, ROW = QUERIES + 2 * ROWS * QueryMap<DIM>::ROW_BYTES;
  static constexpr int INFO = ROW + 4 * WARPS * DIM, PACKED = INFO + ROWS * (int)sizeof(RowInfo);
  static constexpr int EXACT = EXACT_APART ? 0 : PACKED, EXACT_WARP = 2 * EXACT_STEP * (VDIM + 8);
  static constexpr int EXACT_END = EXACT + WARPS * EXACT_WARP, SIZE = PACKED > EXACT_END ? PACKED : EXACT_END;
  static constexpr int SHORT_SIZE = PACKED > WARPS * EXACT_WARP ? PACKED : WARPS * EXACT_WARP;  // of short_kernel
};

// A warp's share of the exact tokens: step `part` of 16 tokens and every `stride` steps another one. Made in two steps,
// so that what the first of them reads is on its way early; BEHIND groups of copies may have been started since.
template <class T, class S, int BEHIND>
struct ExactShare {
  using Exact = ExactWarp<T, S::DIM, S::VDIM>;
  Exact warp;
  T *shared;
  bool valid;

  __device__ __forceinline__ void start(const DecodeArgs &a, int b, int h, int first_row, int part, T *memory,
                                        int lane) {
    int g = lane >> 2;
    valid = g < S::NUM_ROWS && first_row + g < a.rows, shared = memory;
    warp.load_row(warp.query, valid ? query_of<T>(a, b, h, first_row + g) : nullptr, lane & 3);
    warp.start(a, b, h, part * EXACT_STEP, shared, lane);
  }

  __device__ __forceinline__ void attend(const DecodeArgs &a, const Parts &parts, int b, int h, int first_row,
                                         int part, int stride, int lane) {
    int g = lane >> 2, c = lane & 3;
    RowMask mask = mask_of_row(a, b, h, first_row + (valid ? g : 0));
    warp.clear();
    for (int step = part; step < parts.exact_steps; step += stride) {
      if (step > part) warp.start(a, b, h, step * EXACT_STEP, shared, lane);
      float keep;
      uint32_t upper[2], lower[2];
      warp.weights(a, mask, step * EXACT_STEP, c, keep, upper, lower);
      if (step > part)
        wait_copies<0>();
      else
        wait_copies<BEHIND>();
      __syncwarp();
      warp.add_values(shared, keep, upper, lower, lane);
      __syncwarp();
    }
    int64_t index = parts.index(b * a.heads + h, parts.packed + part, a.rows) + first_row;
    float sum = warp.sum + __shfl_xor_sync(~0u, warp.sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (c == 0 && valid) parts.state[index + g] = make_float2(warp.top, sum);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int to = 2 * c + i % 2;
      if (to < S::NUM_ROWS && first_row + to < a.rows)
#pragma unroll
        for (int m = 0; m < Exact::MTILES; m++)
          parts.sums[(index + to) * S::VDIM + Exact::dim_of(m, i / 2, g)] = warp.out[m][i];
    }
  }
};

// The CTAs of exact tokens alone, a share a warp.
template <class T, class S>
__device__ __forceinline__ void attend_exact_apart(const DecodeArgs &a, const Parts &parts, int b, int h, int first_row,
                                                   T *memory, int warp, int lane) {
  int part = (blockIdx.y - parts.packed) * WARPS + warp;
  if (part >= parts.exact) return;
  ExactShare<T, S, 0> share;
  share.start(a, b, h, first_row, part, memory + warp * (S::EXACT_WARP / sizeof(T)), lane);
  share.attend(a, parts, b, h, first_row, part, parts.exact, lane);
}

// Sums of a lane in floats, for weights relative to the CTA's maximum: columns 2c and 2c + 1 of the products to
// `to` [ROWS][MERGE_ROW]. A column is a row, or, with up to four rows, a limb of one.
template <class S, class Warp>
__device__ __forceinline__ void store_sums(const Warp &packed, const float (&factor)[2], float *to, int g, int c) {
  float half[Warp::LIMBS][2];
  packed.halves(half, c);
  auto value = [&](int m, int j, int i) {
    float x = (float)packed.out[0][m][2 * j + i] + half[0][i];
    if constexpr (S::OCT) x = 256 * x + (float)packed.out[1][m][2 * j + i] + half[1][i];
    return x * factor[i];
  };
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float *row = to + (2 * c + i) * S::MERGE_ROW;
#pragma unroll
    for (int m = 0; m < Warp::MTILES; m++)
      if (m / 2 < Warp::CHUNKS) {
        if (m % 2 == 0)
          *(float4 *)(row + Warp::dim_of(m, 0, g)) =
              make_float4(value(m, 0, i), value(m, 1, i), value(m + 1, 0, i), value(m + 1, 1, i));
      } else {
        *(float2 *)(row + Warp::dim_of(m, 0, g)) = make_float2(value(m, 0, i), value(m, 1, i));
      }
  }
}

// The warps' sums and states become the part of this CTA.
template <class S, class Warp>
__device__ __forceinline__ void merge_warps(const Parts &parts, const Warp &packed, float value_step, int64_t index,
                                            int rows, float *sums) {
  constexpr int LIMBS = S::OCT ? 1 : 2, COLUMNS = S::VDIM / 4;
  __shared__ float2 state[WARPS][S::NUM_ROWS];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, c = lane & 3;
  float sum = packed.row_sum();
  if (c == 0 && g < S::NUM_ROWS) state[warp][g] = make_float2(packed.top, sum / packed.one());
  __syncthreads();
  auto top_of = [&](int row) {
    float top = state[0][row].x;
#pragma unroll
    for (int w = 1; w < WARPS; w++) top = fmaxf(top, state[w][row].x);
    return top;
  };
  float factor[2], unit = value_step / packed.one() * (!S::OCT && c < 2 ? 256.0f : 1.0f);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int row = (2 * c + i) & (S::NUM_ROWS - 1);
    factor[i] = fast_exp2(state[warp][row].x - top_of(row)) * unit;
  }
  store_sums<S>(packed, factor, sums + warp * ROWS * S::MERGE_ROW, g, c);
  if (threadIdx.x < rows) {
    float top = top_of(threadIdx.x), all = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) all += state[w][threadIdx.x].y * fast_exp2(state[w][threadIdx.x].x - top);
    parts.state[index + threadIdx.x] = make_float2(top, all);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < rows * COLUMNS; i += THREADS) {
    int row = i / COLUMNS, column = i % COLUMNS;
    float4 total = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int w = 0; w < WARPS * LIMBS; w++) {
      int place = w / LIMBS * ROWS + w % LIMBS * S::NUM_ROWS + row;
      float4 v = *(const float4 *)(sums + place * S::MERGE_ROW + 4 * column);
      total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
    }
    *(float4 *)(parts.sums + (index + row) * S::VDIM + 4 * column) = total;
  }
}

template <class T, class S>
__global__ void __launch_bounds__(THREADS, 2)
    decode_kernel(const __grid_constant__ DecodeArgs a, const __grid_constant__ Parts parts) {
  extern __shared__ __align__(128) char memory[];
  int b = blockIdx.x / a.heads, h = blockIdx.x - b * a.heads, first_row = blockIdx.z * S::NUM_ROWS;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, c = lane & 3;
  int rows = min(a.rows - first_row, S::NUM_ROWS);
  uint32_t *mine = (uint32_t *)memory + warp * S::Tile::SIZE;
  T *exact_memory = (T *)(memory + S::EXACT + warp * S::EXACT_WARP);
  char *bytes = memory + S::QUERIES;
  float *row_memory = (float *)(memory + S::ROW) + warp * S::DIM;
  RowInfo *info = (RowInfo *)(memory + S::INFO);
  fetch_parameters(a), fetch_parameters(parts);
  wait_for_earlier_launches();
  if constexpr (S::EXACT_APART) {
    if (blockIdx.y >= parts.packed) {
      attend_exact_apart<T, S>(a, parts, b, h, first_row, (T *)(memory + S::EXACT), warp, lane);
      return;
    }
  }
  int exact_steps = S::EXACT_APART ? 0 : (parts.exact_steps + parts.packed - 1 - (int)blockIdx.y) / parts.packed;
  int tile = parts.tile(blockIdx.y) + (warp - exact_steps & WARPS - 1), stop = parts.tile(blockIdx.y + 1);

  // Loads that the first steps wait for go first; the tiles' fill the queues of the memory.
  QueryRows<T, S::DIM> query;
  query.load(a, b, h, first_row + warp, warp < rows, lane);
  float key_level = ByteTable::level_of(a.keys.levels, S::KBITS, lane);
  float value_level = ByteTable::level_of(a.values.levels, S::VBITS, lane);
  ExactShare<T, S, 2> share;
  if constexpr (!S::EXACT_APART)
    if (warp < exact_steps)
      share.start(a, b, h, first_row, warp * parts.packed + blockIdx.y, exact_memory, lane);
  using Source = TileSource<typename S::Tile, S::KBITS, S::VBITS, S::VDIM>;
  uint32_t address = shared_address(mine);
  auto start_keys = [&](const Source &source, int tile) {
    if (tile < stop) source.start_keys(tile, address, lane);
    commit_copies();
  };
  auto start_values = [&](const Source &source, int tile) {
    if (tile < stop) source.start_values(tile, address, lane);
    commit_copies();
  };
  {
    Source source(a, b, h, lane);
    start_keys(source, tile), start_values(source, tile);
  }
  allow_later_launch();
  ByteTable keys(key_level, S::KBITS, lane), values(value_level, S::VBITS, lane);
  query.store(a, keys.step, warp, row_memory, bytes, info, lane);
  if constexpr (S::OCT) {
    query.load(a, b, h, first_row + warp + WARPS, warp + WARPS < rows, lane);
    query.store(a, keys.step, warp + WARPS, row_memory, bytes, info, lane);
  }
  __syncthreads();
  if constexpr (!S::EXACT_APART)
    if (warp < exact_steps)
      share.attend(a, parts, b, h, first_row, warp * parts.packed + blockIdx.y, WARPS * parts.packed, lane);
  Source source(a, b, h, lane);  // made again: exact tokens need the registers
  typename S::Packed packed;
  packed.clear();
  packed.load_queries(bytes, info, g, c);
  int row = g & (S::NUM_ROWS - 1);
  RowMask mask = mask_of_row(a, b, h, first_row + (row < rows ? row : 0));
  for (; tile < stop; tile += WARPS) {
    float x[S::Packed::TOKENS];
    wait_copies<1>();
    __syncwarp();
    packed.scores(mine, keys, g, c, x);
    start_keys(source, tile + WARPS);
    wait_copies<1>();
    __syncwarp();
    packed.add_tile(mine, values, x, tile * TILE_LEN, a.start, a.length, a.softcap, mask, g, c);
    __syncwarp();
    start_values(source, tile + WARPS);
  }
  int64_t index = parts.index(blockIdx.x, blockIdx.y, a.rows) + first_row;
  merge_warps<S>(parts, packed, values.step, index, rows, (float *)memory);
}

}  // namespace cuda
}  // namespace kvq
