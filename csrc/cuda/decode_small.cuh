// The decode kernel of short contexts of few heads, one launch. Eight CTAs share a head's tokens and form a cluster. In
// each, eight warps work on two tiles, four on each, as those of short_kernel do, and two more on a step of exact
// tokens each. CTA r ends row r: all send it what their sums for that row are, into its shared memory, where it counts
// the bytes, so that nobody reads another's memory or waits for all of them.
#pragma once

#include "decode_short.cuh"

namespace kvq {
namespace cuda {

template <class S>
struct SmallShape {
  static constexpr bool EXISTS = S::SHORT && !S::EXACT_APART;  // with 16-bit exact tokens beside two tiles
  static constexpr int CTAS = 8, TEAMS = 2, WORKERS = TEAMS * WARPS, EXACT_WARPS = 2, SHARES = 2 * CTAS;
  static constexpr int PLACES = CTAS + SHARES, NUM_THREADS = 32 * (WORKERS + EXACT_WARPS);
  static_assert(S::NUM_ROWS <= CTAS && PLACES <= 32, "a CTA has a row, a lane a part");
  using Exchange = ShortExchange<S, TEAMS>;
  // Shared memory in bytes: tiles, queries, exact tokens (their sums afterwards) and their states, what the warps tell
  // each other, what arrives for the row of this CTA: sums [PLACES][VDIM], states, the count.
  static constexpr int QUERIES = 4 * TEAMS * S::Tile::SIZE, EXACT = QUERIES + Queries<S::DIM>::BYTES;
  static constexpr int STATES = EXACT + EXACT_WARPS * S::EXACT_WARP;
  static constexpr int EXCHANGE = STATES + EXACT_WARPS * S::NUM_ROWS * (int)sizeof(float2);
  static constexpr int SUMS = (EXCHANGE + (int)sizeof(Exchange) + 15) / 16 * 16,
                       PART_STATES = SUMS + 4 * PLACES * S::VDIM;
  static constexpr int COUNT = PART_STATES + PLACES * (int)sizeof(float2), SIZE = COUNT + 8;
  static constexpr int PART_BYTES = 4 * S::VDIM + (int)sizeof(float2);
};

// What arrives for rows of the cluster, at the same place of every CTA: packed parts by CTA, exact ones after them.
template <class T, class S>
struct Arrivals {
  using Shape = SmallShape<S>;
  using End = RowEnd<T, S::VDIM>;
  const char *memory;

  // Of row `row`, for its CTA.
  template <int N>
  __device__ __forceinline__ void send(int row, int part, int dim, const float (&x)[N]) const {
    send_to(row, Shape::SUMS + 4 * (part * S::VDIM + dim), x);
  }
  __device__ __forceinline__ void send_state(int row, int part, float2 state) const {
    const float x[2] = {state.x, state.y};
    send_to(row, Shape::PART_STATES + part * (int)sizeof(float2), x);
  }
  template <int N>
  __device__ __forceinline__ void send_to(int row, int at, const float (&x)[N]) const {
    uint32_t base = address_in_cluster(shared_address(memory), row);
    send_in_cluster(base + at, x, base + Shape::COUNT);
  }

  // Ends the row of this CTA, by one warp; `scratch` [VDIM].
  __device__ __forceinline__ void finish(const DecodeArgs &a, const Parts &parts, int b, int h, int row, float *scratch,
                                         int lane) const {
    QueryPlace place(a, b, h, row);
    End end;
    end.load(a.values, b, h, lane);
    float sink = a.sink_logits ? a.sink_logits[place.head] * LOG2E : NO_SCORE;
    const float *sums = (const float *)(memory + Shape::SUMS);
    wait_for_bytes(shared_address(memory + Shape::COUNT));
    float2 state = make_float2(NO_SCORE, 0);
    if (lane < Shape::CTAS + parts.exact) state = ((const float2 *)(memory + Shape::PART_STATES))[lane];
    float most = largest_of_warp(fmaxf(state.x, sink)), weight = fast_exp2(state.x - most), all = weight * state.y;
    float packed = warp_sum(lane < Shape::CTAS ? all : 0), turned[End::N] = {}, exact[End::N] = {};
    all = warp_sum(all);
    auto add = [&](float (&to)[End::N], int part) {
      float x[End::N], w = __shfl_sync(~0u, weight, part);
      End::load_row(x, sums + part * S::VDIM, lane);
#pragma unroll
      for (int i = 0; i < End::N; i++) to[i] = fmaf(w, x[i], to[i]);
    };
#pragma unroll
    for (int part = 0; part < Shape::CTAS; part++) add(turned, part);
#pragma unroll 4
    for (int part = Shape::CTAS; part < Shape::CTAS + parts.exact; part++) add(exact, part);
    end.finish(a, place, turned, exact, all, packed, most, sink, scratch, lane);
  }
};

// The tiles of a CTA, which are in shared memory, become its packed part.
template <class T, class S>
__device__ __forceinline__ void attend_in_teams(const DecodeArgs &a, const Arrivals<T, S> &arrivals,
                                                typename SmallShape<S>::Exchange &all, const uint32_t *tiles,
                                                const Queries<S::DIM> &queries, const ByteTable &keys,
                                                const ByteTable &values, const RowMask &mask, int first, int count,
                                                int rows, int warp, int lane) {
  using Shape = SmallShape<S>;
  using Mine = ShortWarp<S, Shape::TEAMS>;
  using Packed = typename Mine::Packed;
  int g = lane >> 2, c = lane & 3, row = Packed::row_of(g, c), rank = blockIdx.y;
  int team = warp / WARPS, own = team < count, dims = warp * Mine::SUMMED;
  Mine mine;
  const typename Mine::Places at(0, g, c, Packed::first_token(g, c));
  mine.packed.load_queries(queries.bytes, queries.info, g, c);
  if (own)
    mine.score(a, tiles + team * S::Tile::SIZE, at, keys, 0, (first + team) * TILE_LEN, mask, warp % WARPS, g, c);
  mine.tell_tops(all, own, warp, g, c);
  sync_first<32 * Shape::WORKERS>();
  mine.tell_weights(all, own, warp, g, c);
  sync_first<32 * Shape::WORKERS>();
  wait_for_cluster();  // all have begun and may be sent something
  if (warp == 0 && Packed::leads(g, c) && row < rows) arrivals.send_state(row, rank, mine.state(all, row));
  if (dims >= S::VDIM) return;
#pragma unroll
  for (int j = 0; j < Shape::TEAMS; j++)
    if (j < count) mine.add(all, tiles + j * S::Tile::SIZE, at, values, j, dims, lane);
  auto put = [&](int row, int dim, const auto &x) { arrivals.send(row, rank, dim, x); };
  mine.store(put, rows, values.step, dims, g, c);
}

// A warp's share of the exact tokens becomes a part. Its sums are gathered from its lanes in its own memory first.
template <class T, class S>
__device__ __forceinline__ void attend_exact_share(ExactWarp<T, S::DIM, S::VDIM> &exact, const DecodeArgs &a,
                                                   const Parts &parts, const Arrivals<T, S> &arrivals,
                                                   const Queries<S::DIM> &queries, float2 *state, int b, int h,
                                                   int first_row, int share, int rows, int lane) {
  const PartPlace to{(float *)exact.keys, S::MERGE_ROW, state};
  attend_exact<T, S, 0>(exact, a, parts, (const T *)queries.raw, b, h, first_row, share, SmallShape<S>::SHARES, to,
                        lane);
  __syncwarp();
  int part = SmallShape<S>::CTAS + share;
  for (int row = 0; row < rows; row++)
    if (4 * lane < S::VDIM) {
      float4 v = *(const float4 *)(to.sums + row * to.pitch + 4 * lane);
      const float x[4] = {v.x, v.y, v.z, v.w};
      arrivals.send(row, part, 4 * lane, x);
    }
  if (lane < rows) arrivals.send_state(lane, part, state[lane]);
}

template <class T, class S>
__global__ void __launch_bounds__(SmallShape<S>::NUM_THREADS, 2)
    small_kernel(const __grid_constant__ DecodeArgs a, const __grid_constant__ Parts parts) {
  extern __shared__ __align__(128) char memory[];
  using Shape = SmallShape<S>;
  int b = blockIdx.x / a.heads, h = blockIdx.x - b * a.heads, first_row = blockIdx.z * S::NUM_ROWS, rank = blockIdx.y;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = min(a.rows - first_row, S::NUM_ROWS);
  const Arrivals<T, S> arrivals{memory};
  if (threadIdx.x == 0 && rank < rows)
    open_for_bytes(shared_address(memory + Shape::COUNT), (Shape::CTAS + parts.exact) * Shape::PART_BYTES);
  __syncwarp();
  tell_cluster_of_begin();
  Queries<S::DIM> queries(memory + Shape::QUERIES);
  int first = parts.tile(rank), count = parts.tile(rank + 1) - first;
  // Four warps bring the queries, four the tiles: two of these keys, two values.
  int tile = warp % Shape::TEAMS, exact_warp = max(warp - Shape::WORKERS, 0);
  int share = exact_warp ? Shape::SHARES - 1 - rank : rank;  // CTAs without a row are the first with two
  bool asks = warp < WARPS, worker = warp < Shape::WORKERS, has_exact = !worker && share < parts.exact;
  uint32_t *tiles = (uint32_t *)memory, address = shared_address(tiles + tile * S::Tile::SIZE);
  QueryRows<T, S::DIM> query;
  query.place(a, b, h, h, first_row + warp, warp < min(rows, WARPS), lane);
  TileSource<typename S::Tile, S::KBITS, S::VBITS, S::VDIM> source(a, b, h, first + count, lane);
  source.hold(), fetch_parameters(a), fetch_parameters(parts);
  ExactWarp<T, S::DIM, S::VDIM> exact(memory + Shape::EXACT + exact_warp * S::EXACT_WARP);
  wait_for_kernels_ahead();
  if (asks)
    query.load(a, lane);
  else if (has_exact)
    exact.start_keys(a, b, h, share, lane), exact.start_values(a, b, h, share, lane);
  else if (warp < WARPS + Shape::TEAMS)
    source.start_keys(first + tile, address, lane);
  else if (worker)
    source.start_values(first + tile, address, lane);
  float key_level = ByteTable::level_of(a.keys.levels, S::KBITS, lane);
  float value_level = ByteTable::level_of(a.values.levels, S::VBITS, lane);
  let_next_kernel_begin();
  ByteTable keys(key_level, S::KBITS, lane), values(value_level, S::VBITS, lane);
  if (asks) store_queries<S>(query, a, keys.step, queries, b, h, h, first_row, rows, warp, lane);
  if (worker) close_copies(), wait_copy_groups<0>();
  __syncthreads();
  int row = S::Packed::row_of(lane / 4, lane % 4);
  RowMask mask = mask_of_row(a, b, h, first_row + (row < rows ? row : 0));
  if (worker) {
    attend_in_teams(a, arrivals, *(typename Shape::Exchange *)(memory + Shape::EXCHANGE), tiles, queries, keys, values,
                    mask, first, count, rows, warp, lane);
  } else {
    wait_for_cluster();
    float2 *state = (float2 *)(memory + Shape::STATES) + exact_warp * S::NUM_ROWS;
    if (has_exact) attend_exact_share(exact, a, parts, arrivals, queries, state, b, h, first_row, share, rows, lane);
    // The last warp ends the row: it seldom has exact tokens.
    if (exact_warp && rank < rows) arrivals.finish(a, parts, b, h, first_row + rank, queries.rows, lane);
  }
}

}  // namespace cuda
}  // namespace kvq
