// The decode kernel of short contexts. A CTA has at most a tile a warp, which all its warps work on together: a warp
// scores eight tokens of every block, all learn the maximum, and each sums 32 dims of the values over all tokens. So
// nothing is scaled twice, no warp's sums are merged, and the way from the first byte to the part is a third as long as
// decode_kernel's; for long contexts it is wasteful. Exact tokens have CTAs of their own or, in clusters, a warp of each.
#pragma once

#include "decode_kernel.cuh"

namespace kvq {
namespace cuda {

// What the warps tell each other.
template <class S>
struct ShortExchange {
  float top[WARPS][ROWS], sum[WARPS][ROWS], scale_top[WARPS];
  uint2 weight[WARPS][S::Packed::LIMBS][4][32];  // of a tile: bytes of B fragments, by limb, phase and lane
};

template <class S>
struct ShortWarp {
  static constexpr int KBITS = S::KBITS, VBITS = S::VBITS, EIGHT = 8;
  using Packed = PackedWarp<KBITS, VBITS, S::DIM, S::VDIM, S::OCT, 32>;
  using Places = typename Packed::Places;
  Packed packed;
  float x[WARPS][EIGHT];             // scores of a tile, in log2
  uint32_t scale[WARPS][EIGHT / 2];  // the values'

  // Scores of this warp's tokens of tile j; `here` is the first of them in block c.
  __device__ __forceinline__ void score(const DecodeArgs &a, const uint32_t *tile, const Places &at,
                                        const ByteTable &keys, int j, bool at_end, int here, const RowMask &mask,
                                        int warp, int g, int c) {
    packed.eight_scores(tile, at, keys, warp, c, x[j]);
    uint4 four = ((const uint4 *)(tile + at.value_scale))[warp];
    scale[j][0] = four.x, scale[j][1] = four.y, scale[j][2] = four.z, scale[j][3] = four.w;
    if (__builtin_expect(a.softcap > 0 || mask.data || at_end, 0)) {
      packed.restrict_scores(x[j], scale[j], here, a.start, a.length, a.softcap, mask);
    } else {
#pragma unroll
      for (int t = 0; t < EIGHT; t++) x[j][t] = fmaf(x[j][t], packed.row.factor, packed.row.bias);
    }
  }

  // The largest score of a row and the largest scale among this warp's tokens.
  __device__ __forceinline__ void tell_tops(ShortExchange<S> &all, int tiles, int warp, int lane) {
    float top = NO_SCORE, most = 0;
#pragma unroll
    for (int j = 0; j < WARPS; j++)
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
  __device__ __forceinline__ void tell_weights(ShortExchange<S> &all, int tiles, int warp, int lane) {
    int g = lane / 4;
    packed.clear();
#pragma unroll
    for (int w = 0; w < WARPS; w++)
      packed.top = fmaxf(packed.top, all.top[w][g]), packed.unit = fmaxf(packed.unit, all.scale_top[w]);
    float offset = packed.exponent_of_one() - packed.top, sum = 0;
#pragma unroll
    for (int j = 0; j < WARPS; j++)
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
            ((uint16_t *)&all.weight[j][l][phase][lane])[warp] = (uint16_t)two;
          }
      }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (lane % 4 == 0) all.sum[warp][g] = sum;
  }

  // Sums of 32 dims from `first` on over tile j.
  __device__ __forceinline__ void add(const ShortExchange<S> &all, const uint32_t *tile, const Places &at,
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

  // This warp's dims of the part.
  __device__ __forceinline__ void store(const PartPlace &to, int rows, float value_step, int first, int lane) const {
    int g = lane / 4, c = lane % 4;
    float unit = value_step * packed.inverse_of_one(), half[Packed::LIMBS][2];
    packed.halves(half, c);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float sum[4];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        int m = k / 2, at = 2 * (k % 2) + i;
        float upper = (float)packed.out[0][m][at] + half[0][i], lower;
        if constexpr (S::OCT)
          lower = (float)packed.out[1][m][at] + half[1][i];
        else
          lower = __shfl_xor_sync(~0u, upper, 2);
        sum[k] = (256 * upper + lower) * unit;
      }
      int row = 2 * c + i;
      if (row < rows)
        *(float4 *)(to.sums + row * to.pitch + first + Packed::dim_of(0, 0, g)) =
            make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
  }
};

// Tiles first .. first + count, which are in shared memory, become a part, by four warps together.
template <class S>
__device__ __forceinline__ void attend_together(const DecodeArgs &a, ShortExchange<S> &all, const uint32_t *tiles,
                                                const Queries<S::DIM> &queries, const ByteTable &keys,
                                                const ByteTable &values, const RowMask &mask, int first, int count,
                                                int rows, const PartPlace &to, int warp, int lane) {
  int g = lane >> 2, c = lane & 3;
  ShortWarp<S> mine;
  const typename ShortWarp<S>::Places at(0, g, c);
  mine.packed.load_queries(queries.bytes, queries.info, g, c);
#pragma unroll
  for (int j = 0; j < WARPS; j++)
    if (j < count) {
      int token = (first + j) * TILE_LEN;
      mine.score(a, tiles + j * S::Tile::SIZE, at, keys, j, token < a.start || token + TILE_LEN > a.length,
                 token + c * BLOCK_LEN + ShortWarp<S>::EIGHT * warp, mask, warp, g, c);
    }
  mine.tell_tops(all, count, warp, lane);
  sync_first<THREADS>();
  mine.tell_weights(all, count, warp, lane);
  sync_first<THREADS>();
  if (warp == 0 && c == 0 && g < rows) {
    float sum = all.sum[0][g];
    for (int w = 1; w < WARPS; w++) sum += all.sum[w][g];
    to.state[g] = make_float2(mine.packed.top, sum * mine.packed.inverse_of_one());
  }
  if (32 * warp >= S::VDIM) return;
  for (int j = 0; j < count; j++) mine.add(all, tiles + j * S::Tile::SIZE, at, values, j, 32 * warp, lane);
  mine.store(to, rows, values.step, 32 * warp, lane);
}

// CLUSTERED: the CTAs of a head are a cluster, which ends its rows, and a fifth warp attends to exact tokens.
template <class T, class S, bool CLUSTERED>
__global__ void __launch_bounds__(CLUSTERED ? THREADS + 32 : THREADS, CLUSTERED ? 2 : 3)
    short_kernel(const __grid_constant__ DecodeArgs a, const __grid_constant__ Parts parts) {
  extern __shared__ __align__(128) char memory[];
  __shared__ ShortExchange<S> all;
  int b = blockIdx.x / a.heads, h = blockIdx.x - b * a.heads, first_row = blockIdx.z * S::NUM_ROWS;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int rows = min(a.rows - first_row, S::NUM_ROWS);
  uint32_t *tiles = (uint32_t *)memory, address = shared_address(tiles + warp * S::Tile::SIZE);
  Queries<S::DIM> queries(memory + (CLUSTERED ? S::FEW : S::short_queries(parts.room)));
  int first = parts.tile(blockIdx.y), count = parts.tile(blockIdx.y + 1) - first;
  QueryRows<T, S::DIM> query;
  query.place(a, b, h, h, first_row + warp, warp < min(rows, WARPS), lane);
  TileSource<typename S::Tile, S::KBITS, S::VBITS, S::VDIM> source(a, b, h, first + count, lane);
  source.hold(), fetch_parameters(a), fetch_parameters(parts);
  ClusterRows<T, S> end(parts, rows, blockIdx.y, warp);
  ExactWarp<T, S::DIM, S::VDIM> exact(memory + S::FEW_EXACT);
  bool fifth = CLUSTERED && warp == WARPS, has_exact = fifth && (int)blockIdx.y < parts.exact_shares;
  wait_for_kernels_ahead();
  if (!CLUSTERED && blockIdx.y >= parts.packed) {
    let_next_kernel_begin();
    return attend_exact_apart<T, S>(a, parts, memory, b, h, first_row, rows);
  }
  if (!fifth) query.load(a, lane);
  float key_level = ByteTable::level_of(a.keys.levels, S::KBITS, lane);
  float value_level = ByteTable::level_of(a.values.levels, S::VBITS, lane);
  if (has_exact) exact.start_keys(a, b, h, blockIdx.y, lane), exact.start_values(a, b, h, blockIdx.y, lane);
  source.start_keys(first + warp, address, lane), source.start_values(first + warp, address, lane);
  close_copies();
  if constexpr (CLUSTERED) end.load(a, b, h, lane);
  let_next_kernel_begin();
  ByteTable keys(key_level, S::KBITS, lane), values(value_level, S::VBITS, lane);
  if (!fifth) {
    store_queries<S>(query, a, keys.step, queries, b, h, h, first_row, rows, warp, lane);
    wait_copy_groups<0>();
  }
  __syncthreads();
  auto state = (float2 (*)[S::NUM_ROWS])(memory + S::FEW_STATES);
  PartPlace to{(float *)queries.bytes, S::VDIM, state[0]}, to_exact{(float *)exact.keys, S::MERGE_ROW, state[1]};
  if constexpr (!CLUSTERED) to = scratch_of<S>(a, parts, blockIdx.x, blockIdx.y, first_row);
  int row = lane / 4 & (S::NUM_ROWS - 1);
  RowMask mask = mask_of_row(a, b, h, first_row + (row < rows ? row : 0));
  if (!fifth)
    attend_together<S>(a, all, tiles, queries, keys, values, mask, first, count, rows, to, warp, lane);
  else if (has_exact)
    attend_exact<T, S, 1>(exact, a, parts, (const T *)queries.raw, b, h, first_row, blockIdx.y, parts.exact_shares,
                          to_exact, lane);
  if constexpr (CLUSTERED)
    end.finish(a, parts, to, to_exact, (float *)memory + warp * S::VDIM, b, h, first_row, lane);
}

}  // namespace cuda
}  // namespace kvq
