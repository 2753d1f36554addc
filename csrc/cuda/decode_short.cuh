// The decode kernel of short contexts. A CTA has at most a tile a warp, which all its warps work on together: a warp
// scores eight tokens of every block, all learn the maximum, and each sums 32 dims of the values over all tokens. So
// nothing is scaled twice, no warp's sums are merged, and the way from the first byte to the part is a third as long as
// decode_kernel's; for long contexts it is wasteful. Exact tokens have CTAs of their own.
#pragma once

#include "decode_kernel.cuh"

namespace kvq {
namespace cuda {

// What the warps tell each other. TEAMS of four warps work on a tile each at the same time.
template <class S, int TEAMS = 1>
struct ShortExchange {
  static constexpr int WORKERS = TEAMS * WARPS;
  float top[WORKERS][ROWS], sum[WORKERS][ROWS], scale_top[WORKERS];
  uint2 weight[TEAMS > 1 ? TEAMS : WARPS][S::Packed::LIMBS][4][32];  // of a tile: bytes of B fragments, by limb, phase
                                                                     // and lane
};

// A warp of several teams has one tile, of a single team up to four. It sums SUMMED dims of the values.
template <class S, int TEAMS = 1>
struct ShortWarp {
  static constexpr int KBITS = S::KBITS, VBITS = S::VBITS, EIGHT = 8, EACH = TEAMS > 1 ? 1 : WARPS, SUMMED = 32 / TEAMS;
  using Packed = PackedWarp<KBITS, VBITS, S::DIM, S::VDIM, S::OCT, SUMMED>;
  using Places = typename Packed::Places;
  using Exchange = ShortExchange<S, TEAMS>;
  Packed packed;
  float x[EACH][EIGHT];             // scores of a tile, in log2
  uint32_t scale[EACH][EIGHT / 2];  // the values'

  // Scores of this warp's tokens of its tile j; `here` is the first of them in block c.
  __device__ __forceinline__ void score(const DecodeArgs &a, const uint32_t *tile, const Places &at,
                                        const ByteTable &keys, int j, bool at_end, int here, const RowMask &mask,
                                        int warp, int c) {
    int eight = warp % WARPS;
    packed.eight_scores(tile, at, keys, eight, c, x[j]);
    uint4 four = ((const uint4 *)(tile + at.value_scale))[eight];
    scale[j][0] = four.x, scale[j][1] = four.y, scale[j][2] = four.z, scale[j][3] = four.w;
    if (__builtin_expect(a.softcap > 0 || mask.data || at_end, 0)) {
      packed.restrict_scores(x[j], scale[j], here, a.start, a.length, a.softcap, mask);
    } else {
#pragma unroll
      for (int t = 0; t < EIGHT; t++) x[j][t] = fmaf(x[j][t], packed.row.factor, packed.row.bias);
    }
  }

  // The largest score of a row and the largest scale among this warp's tokens.
  __device__ __forceinline__ void tell_tops(Exchange &all, int tiles, int warp, int lane) {
    float top = NO_SCORE, most = 0;
#pragma unroll
    for (int j = 0; j < EACH; j++)
      if (j < tiles) {
        __half2 two = *(const __half2 *)&scale[j][0];
#pragma unroll
        for (int i = 1; i < EIGHT / 2; i++) two = __hmax2(two, *(const __half2 *)&scale[j][i]);
        most = fmaxf(most, fmaxf(__low2float(two), __high2float(two)));
#pragma unroll
        for (int t = 0; t < EIGHT; t++) top = fmaxf(top, x[j][t]);
      }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    most = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most)));  // not negative: ordered as integers are
    if (lane % 4 == 0) all.top[warp][lane / 4] = top;
    if (lane == 0) all.scale_top[warp] = most;
  }

  // Weights of this warp's tokens, once the tops are known.
  __device__ __forceinline__ void tell_weights(Exchange &all, int tiles, int warp, int lane) {
    int g = lane / 4;
    packed.clear();
#pragma unroll
    for (int w = 0; w < Exchange::WORKERS; w++)
      packed.top = fmaxf(packed.top, all.top[w][g]), packed.unit = fmaxf(packed.unit, all.scale_top[w]);
    float offset = packed.exponent_of_one() - packed.top, sum = 0;
#pragma unroll
    for (int j = 0; j < EACH; j++)
      if (j < tiles) {
        float y[EIGHT];
#pragma unroll
        for (int i = 0; i < EIGHT / 2; i++) {
          float2 s = __half22float2(*(const __half2 *)&scale[j][i]);
          float p0 = fast_exp2(x[j][2 * i] + offset), p1 = fast_exp2(x[j][2 * i + 1] + offset);
          sum += p0 + p1;
          y[2 * i] = fmaf(p0, s.x, 32768.0f + fraction_of(2 * i, EIGHT));
          y[2 * i + 1] = fmaf(p1, s.y, 32768.0f + fraction_of(2 * i + 1, EIGHT));
        }
#pragma unroll
        for (int l = 0; l < Packed::LIMBS; l++)
#pragma unroll
          for (int phase = 0; phase < 4; phase++) {  // bytes n = 2 (warp % 2) and the next of half warp / 2
            uint32_t two =
                permute_bytes(__float_as_uint(y[phase]), __float_as_uint(y[phase + 4]), Packed::limb_of_two(l, g));
            ((uint16_t *)&all.weight[warp / WARPS + j][l][phase][lane])[warp % WARPS] = (uint16_t)two;
          }
      }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (lane % 4 == 0) all.sum[warp][g] = sum;
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
  __device__ __forceinline__ void store(const Put &put, int rows, float value_step, int first, int lane) const {
    int g = lane / 4, c = lane % 4;
    float unit = value_step * packed.inverse_of_one(), half[Packed::LIMBS][2];
    packed.halves(half, c);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float sum[SUMMED / 8];
#pragma unroll
      for (int k = 0; k < SUMMED / 8; k++) {
        int m = k / 2, at = 2 * (k % 2) + i;
        float upper = (float)packed.out[0][m][at] + half[0][i], lower;
        if constexpr (S::OCT)
          lower = (float)packed.out[1][m][at] + half[1][i];
        else
          lower = __shfl_xor_sync(~0u, upper, 2);
        sum[k] = (256 * upper + lower) * unit;
      }
      int row = 2 * c + i;
      if (row < rows) put(row, first + Packed::dim_of(0, 0, g), sum);
    }
  }

  // The state of row g of the part, in a warp that knows the maximum, once all have told their sums.
  __device__ __forceinline__ float2 state(const Exchange &all, int g) const {
    float sum = all.sum[0][g];
    for (int w = 1; w < Exchange::WORKERS; w++) sum += all.sum[w][g];
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
  const typename ShortWarp<S>::Places at(0, g, c);
  mine.packed.load_queries(queries.bytes, queries.info, g, c);
  int row = g & (S::NUM_ROWS - 1);
  RowMask mask = mask_of_row(a, b, h, first_row + (row < rows ? row : 0));
#pragma unroll
  for (int j = 0; j < WARPS; j++)
    if (j < count) {
      int token = (first + j) * TILE_LEN;
      mine.score(a, tiles + j * S::Tile::SIZE, at, keys, j, token < a.start || token + TILE_LEN > a.length,
                 token + c * BLOCK_LEN + ShortWarp<S>::EIGHT * warp, mask, warp, c);
    }
  mine.tell_tops(all, count, warp, lane);
  __syncthreads();
  mine.tell_weights(all, count, warp, lane);
  __syncthreads();
  int64_t index = parts.index(blockIdx.x, blockIdx.y, a.rows) + first_row;
  if (warp == 0 && c == 0 && g < rows) parts.state[index + g] = mine.state(all, g);
  if (32 * warp >= S::VDIM) return;
  for (int j = 0; j < count; j++) mine.add(all, tiles + j * S::Tile::SIZE, at, values, j, 32 * warp, lane);
  auto put = [&](int row, int dim, const float (&x)[4]) {
    *(float4 *)(parts.sums + (index + row) * S::VDIM + dim) = make_float4(x[0], x[1], x[2], x[3]);
  };
  mine.store(put, rows, values.step, 32 * warp, lane);
}

}  // namespace cuda
}  // namespace kvq
