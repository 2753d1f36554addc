// The decode kernel. Grid: (sequence and head, parts, block of rows). A part is a few steps of exact tokens and a run
// of tiles of packed ones. Four warps take the tiles in turn. Exact tokens have a warp of their own if they are few and
// registers allow it; else the warps take them in turn too, first. A warp copies its own tiles and never waits for
// another inside the loop: while it sums the values of a tile, the keys of its next one are on their way, and the other
// way round. Two CTAs a multiprocessor were faster than three, also where those keep all in registers, than one of
// eight warps, and than two of six; tiles of 128 tokens were faster than of 32.
#pragma once

#include "decode_rows.cuh"

namespace kvq {
namespace cuda {

template <int KBITS_, int VBITS_, int DIM_, int VDIM_, bool OCT_>
struct DecodeShape {
  static constexpr int KBITS = KBITS_, VBITS = VBITS_, DIM = DIM_, VDIM = VDIM_, NUM_ROWS = OCT_ ? 8 : 4;
  static constexpr bool OCT = OCT_, EXACT_APART = DIM > 128;  // exact tokens in CTAs of their own: both do not fit
  // Whether a fifth warp attends to exact tokens while four work on tiles.
  static constexpr bool FIFTH = !OCT && !EXACT_APART;
  static constexpr int LONG_WARPS = FIFTH ? WARPS + 1 : WARPS;
  static constexpr bool SHORT = VDIM <= 32 * WARPS && VDIM % 32 == 0;  // whether there is a kernel of short contexts
  using Tile = TileLayout<KBITS, VBITS, DIM, VDIM>;
  using Packed = PackedWarp<KBITS, VBITS, DIM, VDIM, OCT>;
  static constexpr bool ROOM = Packed::ROOM;  // in registers
  // Shared memory in bytes: tiles (each warp's sums afterwards; exact tokens in CTAs that have no others), the queries,
  // states of the warps' packed and exact tokens and of the CTA's two parts, exact tokens (their sums afterwards).
  static constexpr int MERGE_ROW = VDIM + 4, TILES = 4 * WARPS * Tile::SIZE;
  static constexpr int EXACT_WARP = ExactWarp<__half, DIM, VDIM>::BYTES, ALL_EXACT = WARPS * EXACT_WARP;
  static constexpr int QUERIES = larger(TILES, ALL_EXACT), STATES = QUERIES + Queries<DIM>::BYTES;
  static constexpr int NUM_STATES = EXACT_APART ? WARPS : 2 * WARPS + 2;
  static constexpr int EXACT = STATES + NUM_STATES * NUM_ROWS * (int)sizeof(float2);
  static constexpr int SIZE = EXACT_APART ? EXACT : EXACT + ALL_EXACT;
  static_assert(NUM_ROWS * MERGE_ROW <= Tile::SIZE && (EXACT_APART || 4 * NUM_ROWS * MERGE_ROW <= EXACT_WARP),
                "sums fit");
  // Of a CTA with room for some tiles all of whose warps work on them together.
  static __host__ __device__ constexpr int short_queries(int room) { return larger(4 * room * Tile::SIZE, ALL_EXACT); }
  static constexpr int short_size(int room) { return short_queries(room) + Queries<DIM>::BYTES; }
};

// A warp's share of the exact tokens: step `part` of 16 tokens and every `stride` steps another one. Its first copies
// are started ahead of its work; BEHIND groups of copies may have been started since. The results may lie where its
// tokens were.
template <class T, class S, int BEHIND>
__device__ __forceinline__ void attend_exact(ExactWarp<T, S::DIM, S::VDIM> &warp, const DecodeArgs &a,
                                             const Parts &parts, const T *queries, int b, int h, int first_row,
                                             int part, int stride, const PartPlace &to, int lane) {
  using Exact = ExactWarp<T, S::DIM, S::VDIM>;
  int g = lane >> 2, c = lane & 3;
  bool valid = g < S::NUM_ROWS && first_row + g < a.rows;
  RowMask mask = mask_of_row(a, b, h, first_row + (valid ? g : 0));
  warp.clear();
  auto wait = [&](bool first) {  // for the group before the last one, and before those started since
    if (first)
      wait_copy_groups<BEHIND + 1>();
    else
      wait_copy_groups<1>();
    __syncwarp();
  };
  for (int step = part; step < parts.exact_steps; step += stride) {
    float keep, x[2][4] = {};
    uint32_t upper[2], lower[2];
    wait(step == part);
    warp.scores(queries, x, lane);
    __syncwarp();
    if (step + stride < parts.exact_steps)
      warp.start_keys(a, b, h, step + stride, lane);
    else
      close_copies();
    warp.weights(a, mask, step * EXACT_STEP, c, x, keep, upper, lower);
    wait(step == part);
    warp.add_values(keep, upper, lower, lane);
    __syncwarp();
    if (step + stride < parts.exact_steps) warp.start_values(a, b, h, step + stride, lane);
  }
  float sum = warp.sum + __shfl_xor_sync(~0u, warp.sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  if (c == 0 && valid) to.state[g] = make_float2(warp.top, sum);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int row = 2 * c + i % 2;
    if (row < S::NUM_ROWS && first_row + row < a.rows)
#pragma unroll
      for (int m = 0; m < Exact::MTILES; m++) to.sums[row * to.pitch + Exact::dim_of(m, i / 2, g)] = warp.out[m][i];
  }
}

// This warp's rows of the queries: the one that was loaded, and one more where a CTA has up to eight.
template <class S, class T>
__device__ __forceinline__ void store_queries(QueryRows<T, S::DIM> &query, const DecodeArgs &a, float step,
                                              const Queries<S::DIM> &queries, int b, int h, int store_head,
                                              int first_row, int rows, int warp, int lane) {
  query.store(a, step, warp, warp, queries, lane);
  if constexpr (S::OCT) {
    query.place(a, b, h, store_head, first_row + warp + WARPS, warp + WARPS < rows, lane);
    query.load(a, lane);
    query.store(a, step, warp + WARPS, warp, queries, lane);
  }
}

// Part `part` of head bh in scratch, from `first_row` on.
template <class S>
__device__ __forceinline__ PartPlace scratch_of(const DecodeArgs &a, const Parts &parts, int bh, int part,
                                                int first_row) {
  int64_t index = parts.index(bh, part, a.rows) + first_row;
  return {parts.sums + index * S::VDIM, S::VDIM, parts.state + index};
}

// The CTAs of exact tokens alone, a share a warp.
template <class T, class S>
__device__ __forceinline__ void attend_exact_apart(const DecodeArgs &a, const Parts &parts, char *memory, int b, int h,
                                                   int first_row, int rows) {
  T *queries = (T *)Queries<S::DIM>(memory + (parts.room ? S::short_queries(parts.room) : S::QUERIES)).raw;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = (blockIdx.y - parts.packed) * WARPS + warp;
  ExactWarp<T, S::DIM, S::VDIM> mine(memory + warp * S::EXACT_WARP);
  if (part < parts.exact) mine.start_keys(a, b, h, part, lane), mine.start_values(a, b, h, part, lane);
  for (int row = warp; row < rows; row += WARPS) {
    const uint32_t *from = (const uint32_t *)query_of<T>(a, b, h, first_row + row);
    for (int i = lane; i < S::DIM / 2; i += 32) ((uint32_t *)(queries + row * (S::DIM + 8)))[i] = from[i];
  }
  __syncthreads();
  if (part >= parts.exact) return;
  PartPlace to = scratch_of<S>(a, parts, blockIdx.x, parts.packed + part, first_row);
  attend_exact<T, S, 0>(mine, a, parts, queries, b, h, first_row, part, parts.exact, to, lane);
}

// The sums of the warps become the parts of the CTA, and these, in a cluster, rows.
template <class T, class S>
__device__ __forceinline__ void end_part(const DecodeArgs &a, const Parts &parts, const typename S::Packed &packed,
                                         float value_step, char *memory) {
  // Read anew where that saves registers.
  int3 block{(int)blockIdx.x, (int)blockIdx.y, (int)blockIdx.z};
  int thread = threadIdx.x;
  if constexpr (!S::EXACT_APART || !S::ROOM) block = block_again(), thread = thread_again();
  int warp = thread / 32, lane = thread % 32, b = block.x / a.heads, h = block.x - b * a.heads;
  int first_row = block.z * S::NUM_ROWS, rows = min(a.rows - first_row, S::NUM_ROWS);
  float *exact = (float *)(memory + S::EXACT);
  auto state = (float2(*)[S::NUM_ROWS])(memory + S::STATES);
  int num_exact = S::EXACT_APART ? 0 : (parts.exact_shares - block.y + parts.packed - 1) / parts.packed;
  WarpParts<S> all{(float *)memory, S::Tile::SIZE, state, exact, S::EXACT_WARP / 4, num_exact};
  ClusterRows<T, S> end(parts, rows, block.y, warp);
  PartPlace to{(float *)memory, S::MERGE_ROW, state[2 * WARPS]}, to_exact{exact, S::MERGE_ROW, state[2 * WARPS + 1]};
  if (!parts.clustered)
    to = scratch_of<S>(a, parts, block.x, block.y, first_row),
    to_exact = scratch_of<S>(a, parts, block.x, parts.packed + block.y, first_row);
  if constexpr (!S::EXACT_APART) end.load(a, b, h, lane);
  all.template merge<32 * S::LONG_WARPS>(packed, value_step, rows, to, to_exact, thread);
  if constexpr (!S::EXACT_APART)
    if (parts.clustered)
      end.finish(a, parts, to, to_exact, Queries<S::DIM>(memory + S::QUERIES).rows + (warp & WARPS - 1) * S::DIM, b, h,
                 first_row, lane);
}

template <class T, class S>
__global__ void __launch_bounds__(32 * S::LONG_WARPS, 2)
    decode_kernel(const __grid_constant__ DecodeArgs a, const __grid_constant__ Parts parts) {
  extern __shared__ __align__(128) char memory[];
  int b = blockIdx.x / a.heads, h = blockIdx.x - b * a.heads, first_row = blockIdx.z * S::NUM_ROWS;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, c = lane & 3;
  int rows = min(a.rows - first_row, S::NUM_ROWS);
  const uint32_t *words = (const uint32_t *)memory;
  uint32_t address = shared_address(words + warp * S::Tile::SIZE);
  if constexpr (S::ROOM) hold(address);
  Queries<S::DIM> queries(memory + S::QUERIES);
  int slot = S::FIFTH ? (warp + 1) % S::LONG_WARPS : warp, exact_part = slot * parts.packed + blockIdx.y;
  bool has_exact = !S::EXACT_APART && slot < WARPS && exact_part < parts.exact_shares;
  int stop = parts.tile(blockIdx.y + 1), tile = parts.tile(blockIdx.y);
  if constexpr (S::FIFTH)
    tile = warp == WARPS ? stop : tile + warp;
  else
    tile += warp - (parts.exact_shares + parts.packed - 1 - (int)blockIdx.y) / parts.packed & WARPS - 1;
  QueryRows<T, S::DIM> query;
  query.place(a, b, h, h, first_row + warp, warp < min(rows, WARPS), lane);
  using Source = TileSource<typename S::Tile, S::KBITS, S::VBITS, S::VDIM>;
  auto start_keys = [&](const Source &source, int tile) {
    source.start_keys(tile, address, lane);
    close_copies();
  };
  auto start_values = [&](const Source &source, int tile) {
    source.start_values(tile, address, lane);
    close_copies();
  };
  char *exact_memory = memory + S::EXACT;
  ExactWarp<T, S::DIM, S::VDIM> exact(exact_memory + slot * S::EXACT_WARP);
  auto state = (float2(*)[S::NUM_ROWS])(memory + S::STATES);
  float key_level, value_level;
  {
    Source source(a, b, h, stop, lane);
    source.hold(), fetch_parameters(a), fetch_parameters(parts);
    wait_for_kernels_ahead();
    if constexpr (S::EXACT_APART)
      if (blockIdx.y >= parts.packed) return attend_exact_apart<T, S>(a, parts, memory, b, h, first_row, rows);

    // Loads that the first steps wait for go first; the tiles' fill the queues of the memory.
    if (!S::FIFTH || warp < WARPS) query.load(a, lane);
    key_level = ByteTable::level_of(a.keys.levels, S::KBITS, lane);
    value_level = ByteTable::level_of(a.values.levels, S::VBITS, lane);
    if (has_exact) {
      exact.start_keys(a, b, h, exact_part, lane);
      exact.start_values(a, b, h, exact_part, lane);
    }
    start_keys(source, tile), start_values(source, tile);
  }
  let_next_kernel_begin();
  ByteTable keys(key_level, S::KBITS, lane), values(value_level, S::VBITS, lane);
  if (!S::FIFTH || warp < WARPS) store_queries<S>(query, a, keys.step, queries, b, h, h, first_row, rows, warp, lane);
  __syncthreads();
  if (has_exact)
    attend_exact<T, S, 2>(exact, a, parts, (const T *)queries.raw, b, h, first_row, exact_part, parts.exact_shares,
                          {(float *)(exact_memory + slot * S::EXACT_WARP), S::MERGE_ROW, state[WARPS + slot]}, lane);
  Source source(a, b, h, stop, lane);  // made again: exact tokens need the registers
  source.hold();
  typename S::Packed::Places at(warp * S::Tile::SIZE, g, c, S::Packed::first_token(g, c));
  if constexpr (S::ROOM) at.hold();
  typename S::Packed packed;
  packed.clear();
  packed.load_queries(queries.bytes, queries.info, g, c);
  int row = S::Packed::row_of(g, c);
  RowMask mask = mask_of_row(a, b, h, first_row + (row < rows ? row : 0));
  // Tiles all of whose scores count as they are are these many from `first_plain` on.
  const int first_plain = (a.start + TILE_LEN - 1) / TILE_LEN;
  int num_plain = max(a.length / TILE_LEN - first_plain, 0);
  if (a.softcap > 0 || mask.data) num_plain = 0;
  for (; tile < stop; tile += WARPS) {
    bool restricted = (uint32_t)(tile - first_plain) >= (uint32_t)num_plain;
    float x[S::Packed::TOKENS];
    wait_copy_groups<1>();
    __syncwarp();
    if constexpr (!S::ROOM) packed.load_fragments(queries.bytes, g, c);  // not kept while values are summed
    packed.scores(words, at, keys, c, x);
    __syncwarp();
    start_keys(source, tile + WARPS);
    wait_copy_groups<1>();
    __syncwarp();
    packed.add_tile(words, at, values, x, restricted, tile * TILE_LEN, a.start, a.length, a.softcap, mask, g, c);
    __syncwarp();
    if constexpr (S::ROOM)
      start_values(source, tile + WARPS);
    else  // addresses made anew
      hold(b), hold(h), start_values(Source(a, b, h, stop, lane), tile + WARPS);
  }
  float value_step = values.step;
  if constexpr (!S::ROOM) value_step = ByteTable::step_of(a.values.levels, S::VBITS);  // read anew
  end_part<T, S>(a, parts, packed, value_step, memory);
}

}  // namespace cuda
}  // namespace kvq
