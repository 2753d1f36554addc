// The decode kernel of short contexts. A CTA has at most a tile a warp, which all its warps work on together: warp w
// scores every fourth token from the w-th on, all learn the maximum, and each sums 32 dims of the values over all
// tokens. So nothing is scaled twice, no warp's sums are merged, and the way from the first byte to the part is a third
// as long as decode_kernel's; for long contexts it is wasteful. Exact tokens have CTAs of their own.
#pragma once

#include "decode_kernel.cuh"

namespace kvq {
namespace cuda {

// What the warps tell each other. TEAMS of four warps work on a tile each at the same time.
template <class S, int TEAMS = 1>
struct ShortExchange {
  static constexpr int WORKERS = TEAMS * WARPS;
  float top[WORKERS][S::NUM_ROWS], sum[WORKERS][S::NUM_ROWS], scale_top[WORKERS];
  uint2 weight[TEAMS > 1 ? TEAMS : WARPS][S::Packed::LIMBS][4][32];  // of a tile: bytes of B fragments, by limb, phase
                                                                     // and lane
};

// A warp of several teams has one tile, of a single team up to four. It sums SUMMED dims of the values.
template <class S, int TEAMS = 1>
struct ShortWarp {
  static constexpr int KBITS = S::KBITS, VBITS = S::VBITS, EACH = TEAMS > 1 ? 1 : WARPS, SUMMED = 32 / TEAMS;
  using Packed = PackedWarp<KBITS, VBITS, S::DIM, S::VDIM, S::OCT, SUMMED>;
  using Places = typename Packed::Places;
  using Exchange = ShortExchange<S, TEAMS>;
  static constexpr int TOKENS = Packed::TOKENS / WARPS;  // of a tile, of a lane: its phase of the lane's half blocks
  Packed packed;
  float x[EACH][TOKENS];             // scores of a tile, in log2
  uint32_t scale[EACH][TOKENS / 2];  // the values'

  // Scores of this warp's tokens of its tile j, which begins at token `first`.
  __device__ __forceinline__ void score(const DecodeArgs &a, const uint32_t *tile, const Places &at,
                                        const ByteTable &keys, int j, int first, const RowMask &mask, int phase, int g,
                                        int c) {
    const __half *key_scale = (const __half *)(tile + at.key_scale) + phase;
    const uint16_t *value_scale = (const uint16_t *)(tile + at.value_scale) + phase;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float two[Packed::HALVES][2];
      packed.multiply_keys(tile, at, keys, 8 * i + phase, 8 * i + 4 + phase, c, two);
#pragma unroll
      for (int h = 0; h < Packed::HALVES; h++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
          int t = 4 * h + 2 * i + k;
          x[j][t] = two[h][k] * __half2float(key_scale[4 * t]);
        }
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t += 2) scale[j][t / 2] = value_scale[4 * t] | (uint32_t)value_scale[4 * t + 4] << 16;
    if (__builtin_expect(a.softcap > 0 || mask.data || first < a.start || first + TILE_LEN > a.length, 0)) {
      int here = first + Packed::first_token(g, c) + phase;
      restrict_scores<4>(x[j], scale[j], packed.row.factor, packed.row.bias, here, a.start, a.length, a.softcap, mask);
    } else {
#pragma unroll
      for (int t = 0; t < TOKENS; t++) x[j][t] = fmaf(x[j][t], packed.row.factor, packed.row.bias);
    }
  }

  // The largest score of a row and the largest scale among this warp's tokens.
  __device__ __forceinline__ void tell_tops(Exchange &all, int tiles, int warp, int g, int c) {
    float top = NO_SCORE, most = 0;
#pragma unroll
    for (int j = 0; j < EACH; j++)
      if (j < tiles) {
        __half2 two = *(const __half2 *)&scale[j][0];
#pragma unroll
        for (int i = 1; i < TOKENS / 2; i++) two = __hmax2(two, *(const __half2 *)&scale[j][i]);
        most = fmaxf(most, fmaxf(__low2float(two), __high2float(two)));
#pragma unroll
        for (int t = 0; t < TOKENS; t++) top = fmaxf(top, x[j][t]);
      }
    top = Packed::row_max(top);
    most = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most)));  // not negative: ordered as integers are
    if (Packed::leads(g, c)) all.top[warp][Packed::row_of(g, c)] = top;
    if (g + c == 0) all.scale_top[warp] = most;
  }

  // Weights of this warp's tokens, once the tops are known: a word is four tokens of a phase.
  __device__ __forceinline__ void tell_weights(Exchange &all, int tiles, int warp, int g, int c) {
    int row = Packed::row_of(g, c), phase = warp % WARPS;
    packed.clear();
#pragma unroll
    for (int w = 0; w < Exchange::WORKERS; w++)
      packed.top = fmaxf(packed.top, all.top[w][row]), packed.unit = fmaxf(packed.unit, all.scale_top[w]);
    float offset = packed.exponent_of_one() - packed.top, sum = 0;
    // Fractions as of the tokens of all warps, which are this one's `phase` apart.
    float zero = WEIGHT_ZERO + ((float)phase - 0.5f * (WARPS - 1)) / (WARPS * TOKENS);
#pragma unroll
    for (int j = 0; j < EACH; j++)
      if (j < tiles) {
        float y[TOKENS];
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) {
          float2 s = __half22float2(*(const __half2 *)&scale[j][i]);
          float p0 = fast_exp2(x[j][2 * i] + offset), p1 = fast_exp2(x[j][2 * i + 1] + offset);
          sum += p0 + p1;
          y[2 * i] = fmaf(p0, s.x, zero + fraction_of(2 * i, TOKENS));
          y[2 * i + 1] = fmaf(p1, s.y, zero + fraction_of(2 * i + 1, TOKENS));
        }
#pragma unroll
        for (int h = 0; h < Packed::HALVES; h++)
#pragma unroll
          for (int l = 0; l < 2; l++) {
            int column = S::OCT ? g : 2 * c + l, block = S::OCT ? c : g / 2, half = S::OCT ? h : g % 2;
            uint32_t *to = (uint32_t *)&all.weight[warp / WARPS + j][S::OCT ? l : 0][phase][4 * column + block];
            to[half] = four_bytes(y + 4 * h, l, 1);
          }
      }
    sum = Packed::row_sum(sum);
    if (Packed::leads(g, c)) all.sum[warp][row] = sum;
  }

  // Sums of this warp's dims, from `first` on, over tile j of the CTA.
  __device__ __forceinline__ void add(const Exchange &all, const uint32_t *tile, const Places &at,
                                      const ByteTable &values, int j, int first, int lane) {
    uint32_t weight[Packed::LIMBS][4][2];
#pragma unroll
    for (int l = 0; l < Packed::LIMBS; l++)
#pragma unroll
      for (int phase = 0; phase < 4; phase++) {
        uint2 two = all.weight[j][l][phase][lane];
        weight[l][phase][0] = two.x, weight[l][phase][1] = two.y;
      }
    packed.sum_values(tile, at, values, lane / 4, weight, first);
  }

  // Gives put(row, dim, sums) two or four dims of the part at a time.
  template <class Put>
  __device__ __forceinline__ void store(const Put &put, int rows, float value_step, int first, int g, int c) const {
    float unit = value_step * packed.inverse_of_one(), half[Packed::LIMBS][2];
    packed.halves(half, c);
#pragma unroll
    for (int i = 0; i < Packed::SUM_ROWS; i++) {
      float sum[SUMMED / 8];
#pragma unroll
      for (int k = 0; k < SUMMED / 8; k++) sum[k] = packed.sum_of(half, k / 2, k % 2, i) * unit;
      int row = Packed::sum_row(i, c);
      if (row < rows) put(row, first + Packed::dim_of(0, 0, g), sum);
    }
  }

  // The state of a row of the part, in a warp that knows the maximum, once all have told their sums.
  __device__ __forceinline__ float2 state(const Exchange &all, int row) const {
    float sum = all.sum[0][row];
    for (int w = 1; w < Exchange::WORKERS; w++) sum += all.sum[w][row];
    return make_float2(packed.top, sum * packed.inverse_of_one());
  }
};

template <class T, class S>
__global__ void __launch_bounds__(THREADS, 3)
    short_kernel(const __grid_constant__ DecodeArgs a, const __grid_constant__ Parts parts) {
  extern __shared__ __align__(128) char memory[];
  __shared__ ShortExchange<S> all;
  int b = blockIdx.x / a.heads, h = blockIdx.x - b * a.heads, first_row = blockIdx.z * S::NUM_ROWS;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, c = lane & 3;
  int rows = min(a.rows - first_row, S::NUM_ROWS);
  uint32_t *tiles = (uint32_t *)memory, to = shared_address(tiles + warp * S::Tile::SIZE);
  Queries<S::DIM> queries(memory + S::short_queries(parts.room));
  int first = parts.tile(blockIdx.y), count = parts.tile(blockIdx.y + 1) - first;
  QueryRows<T, S::DIM> query;
  query.place(a, b, h, h, first_row + warp, warp < rows, lane);
  TileSource<typename S::Tile, S::KBITS, S::VBITS, S::VDIM> source(a, b, h, first + count, lane);
  source.hold(), fetch_parameters(a), fetch_parameters(parts);
  wait_for_kernels_ahead();
  if (blockIdx.y >= parts.packed) {
    let_next_kernel_begin();
    return attend_exact_apart<T, S>(a, parts, memory, b, h, first_row, rows);
  }
  query.load(a, lane);
  float key_level = ByteTable::level_of(a.keys.levels, S::KBITS, lane);
  float value_level = ByteTable::level_of(a.values.levels, S::VBITS, lane);
  source.start_keys(first + warp, to, lane), source.start_values(first + warp, to, lane);
  close_copies();
  let_next_kernel_begin();
  ByteTable keys(key_level, S::KBITS, lane), values(value_level, S::VBITS, lane);
  store_queries<S>(query, a, keys.step, queries, b, h, h, first_row, rows, warp, lane);
  wait_copy_groups<0>();
  __syncthreads();
  ShortWarp<S> mine;
  using Packed = typename ShortWarp<S>::Packed;
  const typename ShortWarp<S>::Places at(0, g, c, Packed::first_token(g, c));
  mine.packed.load_queries(queries.bytes, queries.info, g, c);
  int row = Packed::row_of(g, c);
  RowMask mask = mask_of_row(a, b, h, first_row + (row < rows ? row : 0));
#pragma unroll
  for (int j = 0; j < WARPS; j++)
    if (j < count) mine.score(a, tiles + j * S::Tile::SIZE, at, keys, j, (first + j) * TILE_LEN, mask, warp, g, c);
  mine.tell_tops(all, count, warp, g, c);
  __syncthreads();
  mine.tell_weights(all, count, warp, g, c);
  __syncthreads();
  int64_t index = parts.index(blockIdx.x, blockIdx.y, a.rows) + first_row;
  if (warp == 0 && Packed::leads(g, c) && row < rows) parts.state[index + row] = mine.state(all, row);
  if (32 * warp >= S::VDIM) return;
  for (int j = 0; j < count; j++) mine.add(all, tiles + j * S::Tile::SIZE, at, values, j, 32 * warp, lane);
  auto put = [&](int row, int dim, const float (&x)[4]) {
    *(float4 *)(parts.sums + (index + row) * S::VDIM + dim) = make_float4(x[0], x[1], x[2], x[3]);
  };
  mine.store(put, rows, values.step, 32 * warp, g, c);
}

}  // namespace cuda
}  // namespace kvq
