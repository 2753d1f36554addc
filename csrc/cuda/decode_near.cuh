// Attention over a handful of exact tokens and no packed ones, as of a sparse cache's window: one launch, no scratch.
// Grid: (sequence and head, slice of the values' dims, block of rows). A warp has 16 tokens. Its lanes load queries,
// keys and values into the places of the products' fragments, all at once, so that between the memory and the weights
// there is neither shared memory nor a barrier. CTAs of other slices compute the same weights: what a multiprocessor
// can load in the time is the limit, and keys twice are less than all values.
//
//   scores^T [rows, tokens] = A (queries) . B (keys)     the order of the dims is any that is the same in both
//   sums^T [dims, rows]     = A (values) . B (weights)   a word of a lane is two dims, rows g and g + 8 of A
#pragma once

#include "decode_combine.cuh"

namespace kvq {
namespace cuda {

// A row of 2 * LANES * WORDS dims, dealt to LANES lanes in fours of words, then in twos and ones.
template <int LANES, int WORDS>
struct DealtRow {
  static constexpr int FOURS = WORDS / 4 * 4, TWOS = WORDS / 2 * 2;

  // The first of the two dims of word w.
  static __device__ __forceinline__ int dim_of(int w, int lane) {
    if (w < FOURS) return 2 * LANES * (w & ~3) + 8 * lane + 2 * (w & 3);
    if (w < TWOS) return 2 * LANES * FOURS + 4 * lane + 2 * (w - FOURS);
    return 2 * LANES * TWOS + 2 * lane;
  }
  template <class T>
  static __device__ __forceinline__ void load(uint32_t (&to)[WORDS], const T *row, int lane) {
#pragma unroll
    for (int w = 0; w < FOURS; w += 4) load_words(*(uint32_t (*)[4])(to + w), row + dim_of(w, lane));
    if constexpr (FOURS < TWOS) load_words(*(uint32_t (*)[2])(to + FOURS), row + dim_of(FOURS, lane));
    if constexpr (TWOS < WORDS) load_words(*(uint32_t (*)[1])(to + TWOS), row + dim_of(TWOS, lane));
  }
};

template <int DIM_, int VDIM_, bool OCT>
struct NearShape {
  static constexpr int DIM = DIM_, VDIM = VDIM_, NUM_ROWS = OCT ? 8 : 4;
  static constexpr int SLICE = VDIM % 64 == 0 ? 64 : VDIM % 48 == 0 ? 48 : VDIM, SLICES = VDIM / SLICE;
  // Nine warps are a window of 132 tokens, and one for every row. At 96 registers a multiprocessor has room for two
  // such CTAs, this kernel's and the next one's.
  static constexpr int MIN_WARPS = 9, MAX_WARPS = DIM <= 128 ? 20 : DIM <= 192 ? 16 : 12;
  static_assert(MIN_WARPS > NUM_ROWS, "a warp without a row");
  static constexpr int PITCH = SLICE + 8;              // floats of a row of sums, against bank conflicts
  static constexpr int STATES = 4 * NUM_ROWS * PITCH;  // bytes of a warp's sums
  static constexpr int size(int warps) { return warps * (STATES + NUM_ROWS * (int)sizeof(float2)); }
};

inline int64_t near_steps(const Attention &a) { return ceil_div(a.exact_len, EXACT_STEP); }

// Warps of a CTA, where there are no more steps than MAX_WARPS.
template <class S>
int near_warps(const Attention &a) {
  int steps = (int)near_steps(a);
  return steps > S::MIN_WARPS ? steps : S::MIN_WARPS;
}

// A warp's 16 tokens: weights and sums are those of exact tokens elsewhere, the products' operands lie in registers.
template <class T, class S>
struct NearWarp : ExactWarp<T, S::DIM, S::SLICE> {
  using Exact = ExactWarp<T, S::DIM, S::SLICE>;
  using Keys = DealtRow<4, S::DIM / 8>;
  using Values = DealtRow<8, S::SLICE / 16>;
  static constexpr int KEY_WORDS = S::DIM / 8, VALUE_WORDS = S::SLICE / 16;
  uint32_t query[KEY_WORDS], key[2][KEY_WORDS], value[4][VALUE_WORDS];
  const T *query_row, *key_row[2], *value_row[4];
  const char *mask_row;  // null without a mask
  uint32_t mask[4];      // what it has for this lane's tokens, as it is

  __device__ __forceinline__ NearWarp() : Exact(nullptr) {}

  // Where row `row` of the queries and those of tokens `first` and later lie; instead of missing tokens the last one.
  __device__ __forceinline__ void place(const DecodeArgs &a, int b, int h, int row, int first_dim, int first, int g,
                                        int c) {
    QueryPlace place(a, b, h, row);
    query_row = (const T *)a.q.data + place.at(a.q.stride);
    mask_row = a.mask ? a.mask + a.mask_bytes * place.at(a.mask_stride) : nullptr;
    hold(query_row), hold(mask_row);
    const DenseArgs &k = a.exact_keys, &v = a.exact_values;
    const T *keys = (const T *)k.data + (int64_t)b * k.stride[0] + (int64_t)h * k.stride[1];
    const T *values = (const T *)v.data + (int64_t)b * v.stride[0] + (int64_t)h * v.stride[1] + first_dim;
    int last = a.exact_len - 1;
#pragma unroll
    for (int n = 0; n < 2; n++) {
      key_row[n] = keys + (int64_t)min(first + 8 * n + g, last) * k.stride[2];
      hold(key_row[n]);
    }
#pragma unroll
    for (int t = 0; t < 4; t++) {
      value_row[t] = values + (int64_t)min(first + token_of(t, c), last) * v.stride[2];
      hold(value_row[t]);
    }
  }
  // Values of a lane are of the tokens whose weights it has.
  static __device__ __forceinline__ int token_of(int t, int c) { return 8 * (t / 2) + 2 * c + t % 2; }

  __device__ __forceinline__ void load(const DecodeArgs &a, int first, int g, int c) {
    Keys::load(query, query_row, c);
#pragma unroll
    for (int n = 0; n < 2; n++) Keys::load(key[n], key_row[n], c);
#pragma unroll
    for (int t = 0; t < 4; t++) Values::load(value[t], value_row[t], g);
    if (a.mask)
#pragma unroll
      for (int t = 0; t < 4; t++) {
        const char *from =
            mask_row + (int64_t)min(first + token_of(t, c), a.exact_len - 1) * a.mask_stride[3] * a.mask_bytes;
        mask[t] = a.mask_bytes == 1 ? *(const uint8_t *)from : *(const uint32_t *)from;
      }
  }

  // In two chains of products, each half as long.
  __device__ __forceinline__ void scores(float (&x)[2][4]) const {
    float half[2][4] = {};
#pragma unroll
    for (int w = 0; w < KEY_WORDS; w += 2)
#pragma unroll
      for (int n = 0; n < 2; n++)
        mma_half<T>(w % 4 ? half[n] : x[n], query[w], 0, query[w + 1], 0, key[n][w], key[n][w + 1]);
#pragma unroll
    for (int n = 0; n < 2; n++) x[n][0] += half[n][0], x[n][1] += half[n][1];
  }

  // Scores times log2 e as they count; `present`: how many of the tokens there are.
  __device__ __forceinline__ void limit(const DecodeArgs &a, int present, float (&x)[2][4], int c) const {
    auto each = [&](auto change) {
#pragma unroll
      for (int t = 0; t < 4; t++) x[t / 2][t % 2] = change(x[t / 2][t % 2], t);
    };
    each([&](float y, int) { return y * (a.scale * LOG2E); });
    if (a.softcap > 0) each([&](float y, int) { return soft_capped(y, a.softcap); });
    if (a.mask && a.mask_bytes == 1) each([&](float y, int t) { return mask[t] ? y : -INFINITY; });
    if (a.mask && a.mask_bytes != 1) each([&](float y, int t) { return fmaf(__uint_as_float(mask[t]), LOG2E, y); });
    each([&](float y, int t) { return token_of(t, c) < present ? y : -INFINITY; });
  }

  __device__ __forceinline__ void add_values(const uint32_t (&upper)[2], const uint32_t (&lower)[2]) {
#pragma unroll
    for (int w = 0; w < VALUE_WORDS; w++) {
      uint32_t v[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        v[i] = permute_bytes(value[i & 2][w], value[(i & 2) + 1][w], i % 2 ? 0x7632u : 0x5410u);
      mma_half<T>(this->out[w], v[0], v[1], v[2], v[3], upper[0], upper[1]);
      mma_half<T>(this->out[w], v[0], v[1], v[2], v[3], lower[0], lower[1]);
    }
  }

  // `sums` [NUM_ROWS][PITCH]; the states of a row are `stride` apart.
  __device__ __forceinline__ void store(float *sums, float2 *state, int stride, int g, int c) const {
    float all = this->sum + __shfl_xor_sync(~0u, this->sum, 1);
    all += __shfl_xor_sync(~0u, all, 2);
    if (c == 0 && g < S::NUM_ROWS) state[g * stride] = make_float2(this->top, all);
    if (2 * c >= S::NUM_ROWS) return;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float *to = sums + (2 * c + i) * S::PITCH;
      const auto &x = this->out;
#pragma unroll
      for (int w = 0; w + 1 < VALUE_WORDS; w += 2)
        *(float4 *)(to + Values::dim_of(w, g)) = make_float4(x[w][i], x[w][2 + i], x[w + 1][i], x[w + 1][2 + i]);
      if constexpr (VALUE_WORDS % 2) {
        constexpr int W = VALUE_WORDS - 1;
        *(float2 *)(to + Values::dim_of(W, g)) = make_float2(x[W][i], x[W][2 + i]);
      }
    }
  }
};

// A row of `out` and its lse, which a warp makes of the parts of the CTA's warps.
template <class T, class S>
struct NearEnd {
  static constexpr int N = (S::SLICE + 63) / 64;  // pairs of dims a lane
  T *out;
  float *lse;
  const float *sink_logit;

  __device__ __forceinline__ NearEnd(const DecodeArgs &a, int b, int h, int row, int first_dim, int lane) {
    QueryPlace place(a, b, h, row);
    out = (T *)a.out.data + place.at(a.out.stride) + first_dim + 2 * lane;
    lse = a.lse + place.at(a.lse_stride);
    sink_logit = a.sink_logits ? a.sink_logits + place.head : nullptr;
  }
  static __device__ __forceinline__ bool in_row(int i, int lane) { return 64 * i + 2 * lane < S::SLICE; }
  __device__ __forceinline__ float load_sink() const { return sink_logit ? *sink_logit : NO_SCORE; }

  // `sums` are the row's in the part of the first warp.
  __device__ __forceinline__ void finish(const float *sums, const float2 *states, int warps, float sink,
                                         bool first_slice, int lane) const {
    float2 state = lane < warps ? states[lane] : make_float2(NO_SCORE, 0), x[S::MIN_WARPS][N], total[N] = {};
    auto load = [&](float2(&part)[N], int warp) {
#pragma unroll
      for (int i = 0; i < N; i++)
        if (in_row(i, lane)) part[i] = *(const float2 *)(sums + warp * S::NUM_ROWS * S::PITCH + 64 * i + 2 * lane);
    };
#pragma unroll
    for (int w = 0; w < S::MIN_WARPS; w++) load(x[w], w);
    sink *= LOG2E;
    float most = fmaxf(largest_of_warp(state.x), sink), weight = fast_exp2(state.x - most), share = weight * state.y;
    float all = sink_logit ? fast_exp2(sink - most) : 0;
    auto add = [&](const float2(&part)[N], int warp) {
      float w = __shfl_sync(~0u, weight, warp);
      all += __shfl_sync(~0u, share, warp);
#pragma unroll
      for (int i = 0; i < N; i++)
        total[i].x = fmaf(w, part[i].x, total[i].x), total[i].y = fmaf(w, part[i].y, total[i].y);
    };
#pragma unroll
    for (int w = 0; w < S::MIN_WARPS; w++) add(x[w], w);
#pragma unroll 1
    for (int w = S::MIN_WARPS; w < warps; w++) load(x[0], w), add(x[0], w);
    bool some = all > 0 || isnan(all);  // a NaN is not taken for a row that sees nothing
    float inverse = some ? __fdividef(1, all) : 0;
#pragma unroll
    for (int i = 0; i < N; i++)
      if (in_row(i, lane)) *(uint32_t *)(out + 64 * i) = pair_of<T>(total[i].x * inverse, total[i].y * inverse);
    if (lane == 0 && first_slice) *lse = some ? (most + log2f(all)) * (1 / LOG2E) : -INFINITY;
  }
};

// One head's slice `slice` of the values' dims and block of rows `row_block`. Warps without a row to end, of which
// there is one at least, do others(i, how many they are) instead, behind the kernels ahead.
template <class T, class S, class Others>
__device__ __forceinline__ void attend_near(const DecodeArgs &a, int head, int slice, int row_block, char *memory,
                                            Others others) {
  int b = head / a.heads, h = head - b * a.heads, first_row = row_block * S::NUM_ROWS;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, c = lane & 3, warps = blockDim.x / 32;
  int rows = min(a.rows - first_row, S::NUM_ROWS), row = first_row + (g < rows ? g : 0);
  int first = warp * EXACT_STEP, first_dim = slice * S::SLICE;
  float *sums = (float *)memory;
  float2 *states = (float2 *)(memory + warps * S::STATES);
  NearWarp<T, S> mine;
  mine.place(a, b, h, row, first_dim, first, g, c);
  NearEnd<T, S> end(a, b, h, first_row + min(warp, rows - 1), first_dim, lane);
#if __CUDA_ARCH__ >= 900  // while kernels ahead run
  hold(end.out), hold(end.lse), hold(end.sink_logit);
#endif
  fetch_parameters(a);
  wait_for_kernels_ahead();
  bool has_tokens = first < a.exact_len;
  if (has_tokens) mine.load(a, first, g, c);
  float sink = end.load_sink();
  let_next_kernel_begin();
  mine.clear();
  if (has_tokens) {
    float keep, x[2][4] = {};  // nothing has been summed that would be kept
    uint32_t upper[2], lower[2];
    mine.scores(x);
    mine.limit(a, a.exact_len - first, x, c);
    mine.weigh(x, keep, upper, lower);
    mine.add_values(upper, lower);
  }
  mine.store(sums + warp * S::STATES / 4, states + warp, warps, g, c);
  __syncthreads();
  if (warp < rows)
    end.finish(sums + warp * S::PITCH, states + warp * warps, warps, sink, first_dim == 0, lane);
  else
    others(warp - rows, warps - rows);
}

template <class T, class S>
__global__ void __launch_bounds__(32 * S::MAX_WARPS) near_kernel(const __grid_constant__ DecodeArgs a) {
  extern __shared__ __align__(16) char memory[];
  attend_near<T, S>(a, blockIdx.x, blockIdx.y, blockIdx.z, memory, [](int, int) {});
}

}  // namespace cuda
}  // namespace kvq
