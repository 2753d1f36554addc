// Attention over selected tokens of keys and values of three bits and 128 dims: the integers of the decode kernels
// (decode_packed.cuh) over tokens that are gathered.
//
// A warp takes 32 tokens a step. Their planes come to its own shared memory a step ahead, rows of four words (128
// dims), so that ldmatrix deals them out: of the matrix of tokens 8 j .. 8 j + 7 lane (g, c) has word c of token
// 8 j + g of the keys and, transposed, dims 16 g .. 16 g + 15 of tokens 8 j + 2 c and 8 j + 2 c + 1 of the values.
// With up to four rows lane (g, c) does the softmax of row c for the tokens 8 j + g, and weights are transposed on
// their way to the lanes of the second product; else of row g for tokens 8 j + 2 c and 8 j + 2 c + 1. Bits of values
// are put in order before they become bytes: selectors hold one dim of four tokens, not four dims of one.
#pragma once

#include "decode_kernel.cuh"
#include "sparse_work.cuh"

namespace kvq {
namespace cuda {

// A head of `attention` is a selection.
struct SelectedArgs {
  DecodeArgs attention;
  const int32_t *indices;
  int64_t index_stride[2];                            // batch, selection
  int tokens, each;                                   // tokens that an index may name, selections of a key/value head
  uint32_t key_sign, key_mag, value_sign, value_mag;  // bytes from token to token
};

// A step in shared memory, in words. Planes start 16 words apart in the banks, as their rows are written in turn. What
// is one word a token lies so that tokens 8 j + i, of which a lane needs those of some i, are side by side.
struct StepLayout {
  static constexpr int LEN = 32, ROW = 4, PLANE = LEN * ROW + 16, KEYS = 0, VALUES = 3 * PLANE;
  static constexpr int KEY_SCALE = 6 * PLANE, VALUE_SCALE = KEY_SCALE + LEN;  // the word that holds a token's scale
  static constexpr int TOKENS = VALUE_SCALE + LEN, SIZE = TOKENS + LEN;
  static __device__ __forceinline__ int place(int token) { return token % 8 * 4 + token / 8; }
};

// What limits is how many pieces of 64 bytes the memory finds in a second, not how many are asked for ahead: more
// stages were slower.
template <bool OCT_>
struct SelectedShape {
  static constexpr bool OCT = OCT_;
  static constexpr int DIM = 128, VDIM = 128, NUM_ROWS = OCT ? 8 : 4, STAGES = 2, CTAS = OCT ? 2 : 3;
  static constexpr int STEPS = 4 * WARPS * STAGES * StepLayout::SIZE;
  static constexpr int MERGE_ROW = VDIM + 4, MERGED = 4 * WARPS * NUM_ROWS * MERGE_ROW;
  static constexpr int QUERIES = larger(STEPS, MERGED), BYTES = QUERIES + Queries<DIM>::BYTES;
};

// Where a lane copies from, of one selection.
struct SelectedSource {
  const char *key_sign, *key_mag, *value_sign, *value_mag, *key_scale, *value_scale;
  const int32_t *indices;
  int count, lane;

  __device__ __forceinline__ SelectedSource(const SelectedArgs &s, const ItemPlace &place, int count, int lane)
      : count(count), lane(lane) {
    const StoreArgs &k = s.attention.keys, &v = s.attention.values;
    int h = place.k / s.each;
    auto of = [&](const auto *data, const int *stride) {
      return (const char *)(data + (int64_t)place.b * stride[0] + (int64_t)h * stride[1]);
    };
    key_sign = of(k.sign, k.sign_stride), key_mag = of(k.mag, k.mag_stride) + 16 * (lane & 1);
    value_sign = of(v.sign, v.sign_stride), value_mag = of(v.mag, v.mag_stride) + 16 * (lane & 1);
    key_scale = of(k.scale, k.scale_stride), value_scale = of(v.scale, v.scale_stride);
    hold(key_sign), hold(key_mag), hold(value_sign), hold(value_mag), hold(key_scale), hold(value_scale);
    indices = s.indices + place.b * s.index_stride[0] + place.k * s.index_stride[1] + lane;
  }

  // This lane's of the 32 tokens from place `at` of the selection, -1 behind its end.
  __device__ __forceinline__ int token_at(const SelectedArgs &s, int at) const {
    return at + lane < count ? (int)min((uint32_t)indices[at], (uint32_t)(s.tokens - 1)) : -1;
  }

  // Starts the copies of a step; missing tokens get some other's. Two lanes copy the magnitudes of a token.
  __device__ __forceinline__ void start(const SelectedArgs &s, uint32_t *step, int token) const {
    using L = StepLayout;
    step[L::TOKENS + L::place(lane)] = (uint32_t)token;
    uint32_t own = (uint32_t)max(token, 0), to = shared_address(step) + 16 * lane;
    start_copy(to + 4 * L::KEYS, advanced(key_sign, own, s.key_sign));
    start_copy(to + 4 * L::VALUES, advanced(value_sign, own, s.value_sign));
    copy_async<4>(step + L::KEY_SCALE + L::place(lane), advanced(key_scale, own / 2, 4));
    copy_async<4>(step + L::VALUE_SCALE + L::place(lane), advanced(value_scale, own / 2, 4));
    to = shared_address(step) + 4 * L::PLANE * (1 + (lane & 1)) + 16 * (lane / 2);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint32_t from = __shfl_sync(ALL_LANES, own, 16 * half + lane / 2);
      start_copy(to + 256 * half + 4 * L::KEYS, advanced(key_mag, from, s.key_mag));
      start_copy(to + 256 * half + 4 * L::VALUES, advanced(value_mag, from, s.value_mag));
    }
  }
};

template <bool OCT>
struct SelectedWarp : PackedWarp<3, 3, 128, 128, OCT> {
  using Packed = PackedWarp<3, 3, 128, 128, OCT>;
  using L = StepLayout;
  static constexpr int OWN = OCT ? 8 : 4, EACH = OWN / 4;  // tokens of a step whose softmax a lane does, of a matrix
  using Packed::AT_ONCE, Packed::HALVES, Packed::LIMBS, Packed::MTILES, Packed::query, Packed::row, Packed::top,
      Packed::sum, Packed::unit, Packed::shift, Packed::out, Packed::total;

  // Products of this lane's tokens of matrix j, still without scales.
  __device__ __forceinline__ void products(const uint32_t *step, const ByteTable &table, int lane,
                                           float (&y)[4][EACH]) const {
    uint32_t sign[4], low[4], high[4];
    const uint32_t *from = step + L::KEYS + L::ROW * lane;
    load_straight(sign, from), load_straight(low, from + L::PLANE), load_straight(high, from + 2 * L::PLANE);
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      int acc[HALVES][4];
      float two[HALVES][2];
      Packed::begin(acc);
#pragma unroll
      for (int h = 0; h < HALVES; h++) {
        Planes<3> planes[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) planes[k] = {sign[j + h + k], {low[j + h + k], high[j + h + k]}};
        Packed::multiply_planes(acc[h], planes, table, 0);
      }
      Packed::combine(acc, table, two);
#pragma unroll
      for (int k = 0; k < 2; k++)
#pragma unroll
        for (int e = 0; e < EACH; e++) y[j + k][e] = two[e][k];
    }
  }

  // The scale of a token from the word that holds it and its neighbour's.
  static __device__ __forceinline__ float scale_of(uint32_t word, int token) {
    return __half2float(__ushort_as_half((uint16_t)(word >> 16 * (token & 1))));
  }

  // Scores, times log2 e where `restricted`, else still without factor and bias; scales of the values.
  __device__ __forceinline__ void scores(const uint32_t *step, const ByteTable &table, bool restricted, float softcap,
                                         const RowMask &mask, int lane, float (&x)[OWN], float (&scale)[OWN]) const {
    float y[4][EACH];
    products(step, table, lane, y);
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      uint32_t token[4], key[4], value[4];
      const uint32_t *from = step + 4 * (OCT ? 2 * (lane & 3) + e : lane >> 2);
      load_words(token, from + L::TOKENS), load_words(key, from + L::KEY_SCALE);
      load_words(value, from + L::VALUE_SCALE);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        int i = EACH * j + e, id = (int)token[j];
        x[i] = y[j][e] * scale_of(key[j], id), scale[i] = scale_of(value[j], id);
        if (!restricted) continue;
        float z = fmaf(x[i], row.factor, row.bias);
        if (softcap > 0) z = soft_capped(z, softcap);
        x[i] = id < 0 ? -INFINITY : mask.data ? mask.add(z, id) : z;
        scale[i] = id < 0 ? 0 : scale[i];
      }
    }
  }

  // Weights times scales as bytes of B fragments: of tokens 2 c and 2 c + 1 of matrices 0 and 1, then of 2 and 3.
  __device__ __forceinline__ void weights(const float (&x)[OWN], const float (&scale)[OWN], float factor, float offset,
                                          uint32_t (&weight)[LIMBS][2]) {
    float y[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      float p = fast_exp2(fmaf(x[i], factor, offset));
      sum += p;
      y[i] = fmaf(p, scale[i], WEIGHT_ZERO + fraction_of(i, OWN));
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
      if constexpr (OCT) {
#pragma unroll
        for (int l = 0; l < 2; l++) weight[l][half] = four_bytes(y + 4 * half, l, 1);
      } else {  // what comes back: of two matrices token 2 c, then the next one
        uint32_t two = transposed(two_of_both(y[2 * half], y[2 * half + 1]));
        weight[0][half] = permute_bytes(two, two, 0x3120u);
      }
  }

  // Bits of one plane of two matrices: nibbles of the tokens 2 c, 2 c + 1 of the first, then of the second, of dims
  // 16 g .. 16 g + 3 and, in the upper half, 8 later; `high`: of those 4 later.
  static __device__ __forceinline__ void order(uint32_t first, uint32_t second, uint32_t &low, uint32_t &high) {
    const uint32_t nibbles = 0x0F0F0F0Fu;
    uint32_t even = permute_bytes(first, second, 0x5140u), odd = permute_bytes(first, second, 0x7362u);
    low = select_bits(even, odd << 4, nibbles), high = select_bits(even >> 4, odd, nibbles);
  }

  __device__ __forceinline__ void add_values(const uint32_t *step, const ByteTable &table, int lane,
                                             const uint32_t (&weight)[LIMBS][2]) {
    uint32_t plane[3][4], ordered[2][2][3];  // [dims][matrices][plane]
    const uint32_t ones = 0x01010101u, *from = step + L::VALUES + L::ROW * lane;
#pragma unroll
    for (int p = 0; p < 3; p++) load_transposed(plane[p], from + p * L::PLANE);
#pragma unroll
    for (int p = 0; p < 3; p++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        order(plane[p][2 * half], plane[p][2 * half + 1], ordered[0][half][p], ordered[1][half][p]);
#pragma unroll
    for (int l = 0; l < LIMBS; l++) total[l] = __dp4a(weight[l][0], ones, __dp4a(weight[l][1], ones, total[l]));
#pragma unroll
    for (int dims = 0; dims < 2; dims++) {
      const uint32_t (&a)[3] = ordered[dims][0], (&b)[3] = ordered[dims][1];
      Planes<3> first{a[0], {a[1], a[2]}}, second{b[0], {b[1], b[2]}};
      Selectors s = first.selectors(table), t = second.selectors(table);
#pragma unroll
      for (int phase = 0; phase < 4; phase++) {
        uint32_t x0, x1, y0, y1;
        first.bytes(table, s.of_phase[phase], phase, x0, y0);
        second.bytes(table, t.of_phase[phase], phase, x1, y1);
#pragma unroll
        for (int l = 0; l < LIMBS; l++) {
          int (&to)[4] = out[l][4 * dims + phase];
          mma_int8<true>(to, x0, y0, x1, y1, weight[l][0], weight[l][1], to);
        }
      }
    }
  }

  __device__ __forceinline__ void add_step(const uint32_t *step, const ByteTable &keys, const ByteTable &values,
                                           bool restricted, float softcap, const RowMask &mask, int lane) {
    float x[OWN], scale[OWN];
    uint32_t weight[LIMBS][2];
    scores(step, keys, restricted, softcap, mask, lane, x, scale);
    float factor = restricted ? 1 : row.factor, bias = restricted ? 0 : row.bias, most = x[0], scale_most = scale[0];
#pragma unroll
    for (int i = 1; i < OWN; i++) most = fmaxf(most, x[i]), scale_most = fmaxf(scale_most, scale[i]);
    most = fmaf(most, factor, bias);
    if (__builtin_expect(__any_sync(~0u, most > top + SLACK || scale_most > unit), 0))
      Packed::raise(most, scale_most, lane >> 2, lane & 3);
    float offset = restricted ? Packed::exponent_of_one() - top : shift;  // large ones cancel first
    weights(x, scale, factor, offset, weight);
    add_values(step, values, lane, weight);
  }

  // Writes value(m, i) of out[.][m][2 * i ..] to its dims of a row.
  template <class Value>
  static __device__ __forceinline__ void store_column(float *row, Value value, int g) {
#pragma unroll
    for (int dims = 0; dims < 2; dims++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        *(float4 *)(row + 16 * g + 4 * dims + 8 * i) =
            make_float4(value(4 * dims, i), value(4 * dims + 1, i), value(4 * dims + 2, i), value(4 * dims + 3, i));
  }
};

// The tiles of a part, by the warps of a CTA in turn.
template <class T, class S>
__device__ __forceinline__ void attend_share(const SelectedArgs &s, const Work &w, const Share &share,
                                             const ByteTable &keys, const ByteTable &values, char *memory) {
  using L = StepLayout;
  constexpr int STAGES = S::STAGES, TURN = WARPS * L::LEN;
  const DecodeArgs &a = s.attention;
  int lane = lane_id(), warp = warp_id(), g = lane >> 2, c = lane & 3, row = w.first_row(share.item);
  int rows = min(w.rows - row, S::NUM_ROWS);
  ItemPlace place(w, share.item);
  SelectedSource source(s, place, w.count_of(share.item), lane);
  Queries<S::DIM> queries(memory + S::QUERIES);
  uint32_t *mine = (uint32_t *)memory + warp * STAGES * L::SIZE;
  int at = share.first * SPARSE_TILE + warp * L::LEN, stop = min(share.last * SPARSE_TILE, source.count);
  int ahead[STAGES];
#pragma unroll
  for (int i = 0; i < STAGES; i++) ahead[i] = source.token_at(s, at + i * TURN);
  QueryRows<T, S::DIM> query;
  query.place(a, place.b, place.k, place.k / s.each, row + warp, warp < rows, lane);
  query.load(a, lane);
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    if (at + i * TURN < stop) source.start(s, mine + i * L::SIZE, ahead[i]);
    close_copies();
  }
  store_queries<S>(query, a, keys.step, queries, place.b, place.k, place.k / s.each, row, rows, warp, lane);
  __syncthreads();
  SelectedWarp<S::OCT> packed;
  packed.clear();
  packed.load_queries(queries.bytes, queries.info, g, c);
  int own = SelectedWarp<S::OCT>::row_of(g, c);
  RowMask mask = mask_of_row(a, place.b, place.k, row + (own < rows ? own : 0));
  bool always = a.softcap > 0 || mask.data;
  int next = ahead[STAGES - 1];
  for (int stage = 0; at < stop; at += TURN, stage = stage + 1 == STAGES ? 0 : stage + 1) {
    int token = next, then = at + (STAGES - 1) * TURN;
    if (then < stop) {
      next = source.token_at(s, then + TURN);
      source.start(s, mine + (stage ? stage - 1 : STAGES - 1) * L::SIZE, token);
    }
    close_copies();
    wait_copy_groups<STAGES - 1>();
    __syncwarp();
    packed.add_step(mine + stage * L::SIZE, keys, values, always || at + L::LEN > source.count, a.softcap, mask, lane);
    __syncwarp();
  }
  merge_warps<S>(w, packed, values.step, (int64_t)blockIdx.x * ITEM_ROWS, rows, (float *)memory);
}

template <class T, class S>
__global__ void __launch_bounds__(THREADS, S::CTAS)
    attend_packed(const __grid_constant__ SelectedArgs s, const __grid_constant__ Work w) {
  extern __shared__ __align__(128) char memory[];
  fetch_parameters(s), fetch_parameters(w);
  wait_for_kernels_ahead(), let_next_kernel_begin();
  int lane = lane_id();
  float key_level = ByteTable::level_of(s.attention.keys.levels, 3, lane);
  float value_level = ByteTable::level_of(s.attention.values.levels, 3, lane);
  Share share(w);
  if (share.item < 0) return;
  ByteTable keys(key_level, 3, lane), values(value_level, 3, lane);
  attend_share<T, S>(s, w, share, keys, values, memory);
}

}  // namespace cuda
}  // namespace kvq
