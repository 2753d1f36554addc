// The kernel of attend, qk and pv: one CTA a block of rows and a split of packed or of exact tokens.
//
// Per tile of packed tokens: the words, copied during the tile before, are unfolded; barrier; the copy of the next
// words starts; products and softmax; barrier. Two CTAs share a multiprocessor, so that one multiplies while the other
// unfolds.
#pragma once

#include "tiles_codes.cuh"
#include "tiles_mask.cuh"
#include "tiles_products.cuh"
#include "tiles_softmax.cuh"

namespace kvq {
namespace cuda {
namespace tiles {

// Rounding a query to one half moves a logit by 2e-4 of the standard deviation that keys of random directions would
// give it: |R (q * balance)| * scale * key scale. Above this bound outputs might be off by 1e-3, so its low part counts
// too.
constexpr float HALF_QUERY_BOUND = 1.5f;

__device__ __forceinline__ float square_of(float x) { return x * x; }

template <class S, Mode MODE, bool PACKED>
struct Worker {
  const Plan &plan;
  const Attention &a;
  const Places &at;
  char *memory;
  int lane, g, c, row_at, token_at, dim_at;  // lane = 4 g + c; the warp within the CTA

  template <class T>
  __device__ __forceinline__ T *in(int offset) const {
    return (T *)(memory + offset);
  }
  __device__ __forceinline__ bool shared_values() const { return MODE == ATTEND && a.shared; }
  __device__ __forceinline__ const Store &value_store() const { return shared_values() ? a.keys : a.values; }
  __device__ __forceinline__ int num_words() const { return plan.query_pad / WORD_BITS; }

  __device__ __forceinline__ const Task &task() const { return *in<Task>(at.task); }

  __device__ __forceinline__ Worker(const Plan &plan, const Places &at, char *memory)
      : plan(plan), a(plan.a), at(at), memory(memory) {
    locate();
  }

  // Once a tile, so that what follows from it need not stay in registers.
  __device__ __forceinline__ void locate() {
    int thread = opaque(threadIdx.x), warp = thread / WARP;
    lane = thread % WARP, g = lane / 4, c = lane % 4;
    dim_at = warp % S::DIM_WARPS * S::WARP_DIMS, warp /= S::DIM_WARPS;
    token_at = warp % S::TOKEN_WARPS * S::WARP_TOKENS;
    row_at = warp / S::TOKEN_WARPS * 16 * S::ROW_TILES;
  }

  __device__ __forceinline__ Tokens tokens_of(int tile) const {
    int first = tile * S::TOKENS, length = (int)a.length;
    if (PACKED) return {true, first, MODE == ATTEND ? (int)a.start : 0, length, (int)a.num_sinks, length};
    return {false, first, 0, (int)a.exact_len, (int)a.num_sinks, length};
  }

  // The task, queries, row factors, offsets of rows and tables of the codebooks.
  __device__ __forceinline__ void set_up() const {
    const Task task = task_of<S, PACKED>(plan);
    int b = task.b, h = task.h, row = task.row, rows = task.rows, flat = task.flat;
    if (threadIdx.x == 0) *in<Task>(at.task) = task;
    if (MODE != SUMS) {
      const __half *from = (PACKED ? plan.rotated : plan.plain) + (int64_t)flat * plan.query_pad;
      int pieces = plan.query_pad / 8;
      for (int i = threadIdx.x; i < S::ROWS * pieces; i += S::THREADS) {
        int r = i / pieces, k = i % pieces * 8;
        __half *to = in<__half>(at.queries) + r * at.query_pitch + k;
        if (r < rows)
          copy_async<16>(to, from + (int64_t)r * plan.query_pad + k);
        else
          *(uint4 *)to = make_uint4(0, 0, 0, 0);
      }
      if (PACKED && !S::PRECISE) {
        const char *low = (const char *)plan.rotated_low + (int64_t)flat * plan.query_pad;
        for (int i = 16 * threadIdx.x; i < rows * plan.query_pad; i += 16 * S::THREADS)
          copy_async<16>(in<char>(at.low) + i / plan.query_pad * at.low_pitch + i % plan.query_pad, low + i);
      }
    }
    float unit = MODE == ATTEND ? a.scale * LOG2_E : 1, step = PACKED && MODE != SUMS ? step_of(a.keys) : 1;
    for (int r = threadIdx.x; r < S::ROWS; r += S::THREADS) {
      int here = r < rows ? r : rows - 1;
      int queries = (int)a.queries, member = (row + here) / queries, query = (row + here) % queries;
      if (MODE != SUMS) {
        RowInfo info = plan.info[flat + here];
        in<RowFactors>(at.factors)[r] = PACKED ? RowFactors{info.rotated_unit * step * unit, info.bias * unit}
                                               : RowFactors{info.plain_unit * unit, 0};
        in<float>(at.squares)[r] = info.rotated_square * a.scale * a.scale;
      }
      const int64_t *stride = MODE == ATTEND ? a.mask.stride : MODE == SCORES ? a.out.stride : a.p.stride;
      in<int64_t>(at.offsets)[r] = b * stride[0] + (h * a.group + member) * stride[1] + query * stride[2];
    }
    if (MODE == ATTEND && plan.mask_kinds && threadIdx.x == 2 * WARP)
      *in<MaskBlocks>(at.mask_blocks) = mask_blocks_of(plan, b, h, row, rows);
    if (PACKED && threadIdx.x == 0 && MODE != SUMS) in<HalfTable>(at.tables)[0] = half_table(a.keys);
    if (PACKED && threadIdx.x == WARP && MODE != SCORES) in<HalfTable>(at.tables)[1] = half_table(value_store());
  }

  __device__ __forceinline__ MaskKind kind_of(int tile) const {
    if (MODE != ATTEND || !a.mask.data) return ALL;
    if (!plan.mask_kinds) return MIXED;
    return kind_in(plan, *in<MaskBlocks>(at.mask_blocks), (PACKED ? 0 : plan.packed_tiles) + tile);
  }

  // Lists the tiles from first to first + THREADS that any row attends to, those with a mask marked.
  __device__ __forceinline__ void list_tiles(int first) const {
    __syncthreads();
    int thread = opaque(threadIdx.x), tile = first + thread, warp = thread / WARP;
    MaskKind kind = tile < task().end ? kind_of(tile) : NONE;
    unsigned wanted = __ballot_sync(ALL_LANES, kind != NONE);
    int *counts = in<int>(at.counts), before = 0, all = 0;
    counts[warp] = __popc(wanted);
    __syncthreads();
    for (int w = 0; w < S::THREADS / WARP; w++) before += w < warp ? counts[w] : 0, all += counts[w];
    before += __popc(wanted & ((1u << (thread % WARP)) - 1));
    if (kind != NONE) in<int>(at.tiles)[before] = kind == MIXED ? ~tile : tile;
    if (thread == 0) counts[S::THREADS / WARP] = all;
    __syncthreads();
  }
  __device__ __forceinline__ int num_listed() const { return in<int>(at.counts)[S::THREADS / WARP]; }

  // Starts the copy of a tile's words; returns the scale of this thread's place: keys first, then values.
  __device__ __forceinline__ float copy_words(int tile) const {
    int first = tile * S::TOKENS, left = (int)a.length - first, count = left < S::TOKENS ? left : S::TOKENS;
    int thread = opaque(threadIdx.x), b = task().b, h = task().h;
    if (MODE != SUMS)
      Words(a.keys, b, h, num_words(), plan.gapless_keys)
          .template copy<S::THREADS>(first, count, S::TOKENS, in<uint32_t>(at.words), thread);
    if (MODE != SCORES && !shared_values())
      Words(a.values, b, h, a.value_dim, plan.gapless_values)
          .template copy<S::THREADS>(first / BLOCK_LEN, (int)ceil_div(count, BLOCK_LEN), S::TOKENS / BLOCK_LEN,
                                     in<uint32_t>(at.value_words), thread);
    bool of_keys = thread < S::TOKENS;
    int token = first + code_of(thread % S::TOKENS);
    if (thread >= 2 * S::TOKENS || token >= a.length || (of_keys ? MODE == SUMS : MODE == SCORES)) return 0;
    const Store &s = of_keys ? a.keys : value_store();
    return __half2float(((const __half *)s.scale)[b * s.scale_stride[0] + h * s.scale_stride[1] + token]);
  }

  __device__ __forceinline__ void unfold(float scale) const {
    int thread = opaque(threadIdx.x);
    if (thread < 2 * S::TOKENS) in<float>(at.scales)[thread] = scale;
    if (MODE != SUMS)
      unfold_keys<S::TOKENS, S::THREADS>(a.keys.bits, in<uint32_t>(at.words), num_words(), in<HalfTable>(at.tables)[0],
                                         in<__half>(at.keys), at.query_pitch, thread);
    if (MODE != SCORES && !shared_values())
      unfold_values<S::TOKENS, S::THREADS>(a.values.bits, in<uint32_t>(at.value_words), a.value_dim,
                                           in<HalfTable>(at.tables)[1], in<__half>(at.values), at.value_pitch, thread);
  }

  // Exact keys or their low parts.
  __device__ __forceinline__ void load_keys(int tile, bool low) const {
    int first = tile * S::TOKENS, left = (int)a.exact_len - first;
    load_exact<S::TOKENS, S::THREADS>(a.exact_keys, task().b, task().h, first, left < S::TOKENS ? left : S::TOKENS,
                                      a.dim, plan.query_pad, plan.quads_keys, low, in<__half>(at.keys), at.query_pitch,
                                      in<float>(at.scales));
  }
  __device__ __forceinline__ void load_values(int tile, bool low) const {
    if (shared_values()) {
      if (low) load_keys(tile, true);
      return;
    }
    int first = tile * S::TOKENS, left = (int)a.exact_len - first;
    load_exact<S::TOKENS, S::THREADS>(a.exact_values, task().b, task().h, first, left < S::TOKENS ? left : S::TOKENS,
                                      a.value_dim, a.value_dim, plan.quads_values, low, in<__half>(at.values),
                                      at.exact_pitch, in<float>(at.scales) + S::TOKENS);
  }

  // The largest magnitude; as integers, floats that are not negative have the same order.
  __device__ __forceinline__ float largest(const float *x, int count) const {
    unsigned most = 0;
    for (int i = lane; i < count; i += WARP) most = max(most, __float_as_uint(fabsf(x[i])));
    return __uint_as_float(__reduce_max_sync(ALL_LANES, most));
  }

  using Scores = float[S::ROW_TILES][S::TOKEN_TILES][4];

  // Products with the queries in shared memory, and with LOW their low parts.
  template <bool LOW>
  __device__ __forceinline__ void add_products(Scores &x) const {
    add_scores<S, LOW>(x, in<__half>(at.queries) + row_at * at.query_pitch, in<char>(at.low) + row_at * at.low_pitch,
                       in<__half>(at.keys) + token_at * at.query_pitch, at.query_pitch, at.low_pitch, plan.query_pad,
                       lane);
  }
  // Products with the low parts of PRECISE.
  __device__ __forceinline__ void add_low_products(Scores &x) const {
    const void *low = PACKED ? plan.rotated_low : plan.plain_low;
    add_low_scores<S>(x, (const __half *)low + (int64_t)(task().flat + row_at) * plan.query_pad, task().rows - row_at,
                      in<__half>(at.keys) + token_at * at.query_pitch, at.query_pitch, plan.query_pad, lane);
  }

  // weights [rows, tokens] of shared memory, tokens in order (scores) or in places (sums), to and from fragments.
  __device__ __forceinline__ float &weight_at(int m, int n, int i, bool in_order) const {
    int place = token_at + 8 * n + 2 * c + i % 2;
    return in<float>(at.weights)[(row_at + 16 * m + g + 8 * (i / 2)) * S::WEIGHT_PITCH +
                                 (in_order && PACKED ? code_of(place) : place)];
  }

  __device__ __forceinline__ void write_scores(Scores &x, const Tokens &tokens) const {
    scale_scores<S>(x, in<float>(at.scales) + token_at, in<RowFactors>(at.factors) + row_at, g, c);
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; m++)
#pragma unroll
      for (int n = 0; n < S::TOKEN_TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) weight_at(m, n, i, true) = x[m][n][i];
    __syncthreads();
    for (int i = threadIdx.x; i < task().rows * S::TOKENS; i += S::THREADS) {
      int r = i / S::TOKENS, token = tokens.first + i % S::TOKENS;
      if (!tokens.has(token)) continue;
      char *out = a.out.data + element_size(a.out.dtype) * in<int64_t>(at.offsets)[r];
      store_element(out, a.out.dtype, tokens.column(token), in<float>(at.weights)[r * S::WEIGHT_PITCH + i % S::TOKENS]);
    }
  }

  __device__ __forceinline__ void read_weights(const Tokens &tokens) const {
    for (int i = threadIdx.x; i < S::ROWS * S::TOKENS; i += S::THREADS) {
      int r = i / S::TOKENS, token = tokens.first + i % S::TOKENS;
      const char *p = a.p.data + element_size(a.p.dtype) * in<int64_t>(at.offsets)[r];
      float weight = tokens.has(token) && r < task().rows ? load_element(p, a.p.dtype, tokens.column(token)) : 0;
      int place = PACKED ? place_of(i % S::TOKENS) : i % S::TOKENS;
      in<float>(at.weights)[r * S::WEIGHT_PITCH + place] = weight;
    }
  }

  __device__ __forceinline__ void read_mask(const Tokens &tokens) const {
    const int64_t *offsets = in<int64_t>(at.offsets), step = a.mask.stride[3];
    int thread = opaque(threadIdx.x);
    if (a.mask.boolean)
      copy_mask<S>((const bool *)a.mask.data, step, tokens, offsets, in<uint32_t>(at.mask), thread);
    else
      copy_mask<S>((const float *)a.mask.data, step, tokens, offsets, in<float>(at.mask), thread);
  }

  // The weights of a tile whose scores `x` are complete, or of given weights.
  __device__ __forceinline__ void weigh_tile(RowState<S> &state, Scores &x, const Tokens &tokens, bool mixed,
                                             Weights<S> &weights) const {
    const float *value_scales = in<float>(at.scales) + (shared_values() && !PACKED ? 0 : S::TOKENS);
    float most = largest(value_scales, S::TOKENS);
    if (MODE == ATTEND) {
      scale_scores<S>(x, in<float>(at.scales) + token_at, in<RowFactors>(at.factors) + row_at, g, c);
      if (a.softcap != 0) for_each(x, [&](float &logit) { logit = soft_cap(logit, a.softcap, plan.two_by_cap); });
      if (mixed && a.mask.boolean) mask_scores<S>(x, in<uint32_t>(at.mask) + row_at * S::MASK_WORDS, token_at, g, c);
      if (mixed && !a.mask.boolean) mask_scores<S>(x, in<float>(at.mask) + row_at * S::BIAS_PITCH, token_at, g, c);
      if (tokens.first < tokens.from || tokens.first + S::TOKENS > tokens.to) cut_scores<S>(x, tokens, token_at, c);
      weigh<S>(state, x, value_scales + token_at, most, c, weights);
    } else {
#pragma unroll
      for (int m = 0; m < S::ROW_TILES; m++)
#pragma unroll
        for (int n = 0; n < S::TOKEN_TILES; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) x[m][n][i] = weight_at(m, n, i, false);
      take_weights<S>(state, x, value_scales + token_at, most, c, weights);
    }
  }

  using Fragments = uint32_t[S::ROW_TILES][S::STEPS][4];

  __device__ __forceinline__ void add_packed_values(RowState<S> &state, const Fragments &weights) const {
    if (shared_values())
      add_values<S, false>(state.sums, weights, in<__half>(at.keys) + token_at * at.query_pitch + dim_at,
                           at.query_pitch, plan.query_pad - dim_at, lane);
    else
      add_values<S, true>(state.sums, weights, in<__half>(at.values) + dim_at * at.value_pitch + token_at,
                          at.value_pitch, a.value_dim - dim_at, lane);
  }
  __device__ __forceinline__ void add_exact_values(RowState<S> &state, const Fragments &weights) const {
    int pitch = shared_values() ? at.query_pitch : at.exact_pitch;
    const __half *values = in<__half>(shared_values() ? at.keys : at.values) + token_at * pitch + dim_at;
    add_values<S, false>(state.sums, weights, values, pitch, a.value_dim - dim_at, lane);
  }

  template <class Function>
  static __device__ __forceinline__ void for_each(Scores &x, Function function) {
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; m++)
#pragma unroll
      for (int n = 0; n < S::TOKEN_TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) function(x[m][n][i]);
  }

  // Tile i of the list; `mixed`: with a mask.
  __device__ __forceinline__ int listed(int i, bool &mixed) const {
    int tile = in<int>(at.tiles)[i];
    mixed = MODE == ATTEND && tile < 0;
    return tile < 0 ? ~tile : tile;
  }

  // The listed tiles.
  __device__ __forceinline__ void run_packed(RowState<S> &state) {
    bool mixed, next_mixed;
    float scale = num_listed() ? copy_words(listed(0, mixed)) : 0,
          square = MODE == ATTEND ? largest(in<float>(at.squares), S::ROWS) : 0;
    for (int i = 0, count = num_listed(); i < count; i++) {
      wait_copies();
      __syncthreads();
      Tokens tokens = tokens_of(listed(i, mixed));
      unfold(scale);
      if (MODE == SUMS) read_weights(tokens);
      if (mixed) read_mask(tokens);
      __syncthreads();
      if (i + 1 < count) scale = copy_words(listed(i + 1, next_mixed));
      locate();
      Scores x;
      for_each(x, [](float &score) { score = 0; });
      if constexpr (S::PRECISE) {
        if (MODE != SUMS) add_products<false>(x), add_low_products(x);
      } else if (square * square_of(largest(in<float>(at.scales), S::TOKENS)) > square_of(HALF_QUERY_BOUND)) {
        add_products<true>(x);
      } else {
        add_products<false>(x);
      }
      if (MODE == SCORES) {
        write_scores(x, tokens);
        continue;
      }
      Weights<S> weights;
      locate();
      weigh_tile(state, x, tokens, mixed, weights);
      locate();
      add_packed_values(state, weights.high);
      if constexpr (S::PRECISE) add_packed_values(state, weights.low);
    }
  }

  __device__ __forceinline__ void run_exact(RowState<S> &state) {
    for (int i = 0, count = num_listed(); i < count; i++) {
      bool mixed;
      int tile = listed(i, mixed);
      Tokens tokens = tokens_of(tile);
      wait_copies();
      __syncthreads();
      locate();
      Scores x = {};
      if (S::PRECISE && MODE != SUMS) {
        load_keys(tile, true);
        __syncthreads();
        add_products<false>(x);
        __syncthreads();
      }
      if (MODE != SUMS) load_keys(tile, false);
      if (MODE != SCORES) load_values(tile, false);
      if (MODE == SUMS) read_weights(tokens);
      if (mixed) read_mask(tokens);
      __syncthreads();
      locate();
      if (MODE != SUMS) add_products<false>(x);
      if (S::PRECISE && MODE != SUMS) add_low_products(x);
      if (MODE == SCORES) {
        write_scores(x, tokens);
        continue;
      }
      Weights<S> weights;
      locate();
      weigh_tile(state, x, tokens, mixed, weights);
      locate();
      add_exact_values(state, weights.high);
      if constexpr (S::PRECISE) {
        add_exact_values(state, weights.low);
        __syncthreads();
        load_values(tile, true);
        __syncthreads();
        add_exact_values(state, weights.high);
      }
    }
  }

  // All tiles, as many at a time as there are threads to list them.
  __device__ __forceinline__ void run(RowState<S> &state) {
    for (int first = task().tile; first < task().end; first += S::THREADS) {
      list_tiles(first);
      if constexpr (PACKED)
        run_packed(state);
      else
        run_exact(state);
    }
  }
};

}  // namespace tiles
}  // namespace cuda
}  // namespace kvq
