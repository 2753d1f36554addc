// Attention over selected tokens of 16-bit dense keys and values on tensor cores, which read them where they lie.
//
// Each warp takes 16 tokens of a tile: their rows come into its own shared memory in copies of 16 bytes, several steps
// ahead.
//   scores^T [rows, tokens] = A (queries, rows g) . B (keys, column g = token)
//   sums^T [dims, rows]     = A (values, read transposed) . B (weights, column g = row)
// Weights are split into two halves, so that rounding them costs nothing.
#pragma once

#include "decode_asm.cuh"
#include "halves.cuh"
#include "sparse_asm.cuh"
#include "sparse_work.cuh"

namespace kvq {
namespace cuda {

constexpr int GATHER_WARPS = 4, GATHER_STEP = 16;
static_assert(GATHER_WARPS * GATHER_STEP == SPARSE_TILE, "a tile is a step of every warp");

__device__ __forceinline__ float capped(float x, float softcap) {
  return softcap > 0 ? tanhf(x / softcap) * softcap : x;
}

template <int DIM>
struct GatherShape {
  static constexpr int STAGES = DIM <= 64 ? 4 : DIM <= 128 ? 3 : 2, CTAS = DIM <= 128 ? 2 : 1;
  static constexpr int ROW = DIM + 8, STAGE = 2 * GATHER_STEP * ROW;  // elements; eight against bank conflicts
  static constexpr int SUMS_ROW = DIM + 4;                            // floats, likewise
  static constexpr int SUMS_BYTES = GATHER_WARPS * ITEM_ROWS * (SUMS_ROW + 2) * 4;
  static constexpr int BYTES = GATHER_WARPS * STAGES * (STAGE * 2 + GATHER_STEP * 4);
  static_assert(BYTES >= SUMS_BYTES, "partial sums of warps fit");
};

// What a warp has of eight rows: in lane 4 g + c the maximum and mass of row g, and dims of rows 2 c and 2 c + 1.
template <class T, int DIM>
struct RowSums {
  static constexpr int STEPS = DIM / 16, ROW = GatherShape<DIM>::ROW;
  float top, sum, out[STEPS][4];

  __device__ __forceinline__ void clear() {
    top = NOTHING, sum = 0;
#pragma unroll
    for (int i = 0; i < STEPS; i++) out[i][0] = out[i][1] = out[i][2] = out[i][3] = 0;
  }

  // use(i, fragments of 16 rows of keys, dims 16 i .. 16 i + 15).
  template <class Use>
  static __device__ __forceinline__ void each_keys(const T *rows, int lane, Use use) {
    const T *from = rows + ((lane & 7) + 8 * (lane >> 4)) * ROW + 8 * ((lane >> 3) & 1);
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      uint32_t k[4];
      load_straight(k, from + 16 * i);
      use(i, k);
    }
  }
  // Adds to x the products with fragments of queries.
  static __device__ __forceinline__ void multiply(float (&x)[2][4], uint2 query, const uint32_t (&k)[4]) {
    mma_half<T>(x[0], query.x, 0, query.y, 0, k[0], k[1]);
    mma_half<T>(x[1], query.x, 0, query.y, 0, k[2], k[3]);
  }

  // Adds 16 rows by the scores of this lane, x[i / 2][i % 2] of token 8 (i / 2) + 2 c + i % 2 in log2, times `by`.
  __device__ __forceinline__ void add(const float (&x)[2][4], const float (&by)[4], const T *rows, int lane) {
    float most = fmaxf(fmaxf(top, fmaxf(x[0][0], x[0][1])), fmaxf(x[1][0], x[1][1]));
    most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
    most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
    float keep = fast_exp2(top - most);
    top = most, sum *= keep;
    uint32_t upper[2], lower[2];
#pragma unroll
    for (int n = 0; n < 2; n++) {
      float p0 = fast_exp2(x[n][0] - most), p1 = fast_exp2(x[n][1] - most);
      sum += p0 + p1, p0 *= by[2 * n], p1 *= by[2 * n + 1];
      upper[n] = pair_of<T>(p0, p1);
      float2 rounded = floats_of_pair<T>(upper[n]);
      lower[n] = pair_of<T>(p0 - rounded.x, p1 - rounded.y);
    }
    float keep0 = __shfl_sync(ALL_LANES, keep, 8 * (lane & 3)),
          keep1 = __shfl_sync(ALL_LANES, keep, 8 * (lane & 3) + 4);
    const T *from = rows + ((lane & 7) + 8 * (lane >> 4)) * ROW + 8 * ((lane >> 3) & 1);
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      uint32_t v[4];
      load_transposed(v, from + 16 * i);
      out[i][0] *= keep0, out[i][1] *= keep1, out[i][2] *= keep0, out[i][3] *= keep1;
      mma_half<T>(out[i], v[0], v[1], v[2], v[3], upper[0], upper[1]);
      mma_half<T>(out[i], v[0], v[1], v[2], v[3], lower[0], lower[1]);
    }
  }

  __device__ __forceinline__ void finish() {
    sum += __shfl_xor_sync(ALL_LANES, sum, 1);
    sum += __shfl_xor_sync(ALL_LANES, sum, 2);
  }

  // Writes what this warp has to shared memory: [warp, row, dim], times `by`, then [warp, row] of maxima and masses.
  template <class DimOf>
  __device__ __forceinline__ void store(float *sums, float2 *state, int warp, int lane, float by, DimOf dim_of) const {
    int g = lane >> 2, c = lane & 3;
    float *to = sums + warp * ITEM_ROWS * GatherShape<DIM>::SUMS_ROW;
#pragma unroll
    for (int i = 0; i < STEPS; i++)
#pragma unroll
      for (int j = 0; j < 4; j++)
        to[(2 * c + j % 2) * GatherShape<DIM>::SUMS_ROW + dim_of(16 * i + 8 * (j / 2) + g)] = out[i][j] * by;
    if (c == 0) state[warp * ITEM_ROWS + g] = make_float2(top, sum);
  }
};

template <class T, int DIMS>
struct GatherWarp {
  static constexpr int DIM = DIMS, STEPS = DIM / 16, UNITS = DIM / 8;
  using S = GatherShape<DIM>;

  const Selected &s;
  T *rows;      // STAGES times 16 keys, 16 values
  int *tokens;  // STAGES times 16
  const T *keys, *values;
  const int32_t *indices;
  int count, lane;
  RowSums<T, DIM> result;
  uint2 query[STEPS];

  __device__ __forceinline__ GatherWarp(const Selected &s, char *shared, int warp, int lane) : s(s), lane(lane) {
    rows = (T *)shared + warp * S::STAGES * S::STAGE;
    tokens = (int *)((T *)shared + GATHER_WARPS * S::STAGES * S::STAGE) + warp * S::STAGES * GATHER_STEP;
  }

  __device__ __forceinline__ void begin(const Work &w, int item) {
    const Attention &a = s.attention;
    ItemPlace place(w, item);
    int h = place.kv_head(a, w), row = w.first_row(item) + (lane >> 2);
    keys = (const T *)a.exact_keys.data + place.b * a.exact_keys.stride[0] + h * a.exact_keys.stride[1];
    values = (const T *)a.exact_values.data + place.b * a.exact_values.stride[0] + h * a.exact_values.stride[1];
    indices = s.selection.indices + place.b * s.selection.index_stride[0] + place.k * s.selection.index_stride[1];
    count = w.count_of(item), result.clear();
    const T *q = (const T *)a.q.data + place.b * a.q.stride[0];
    if (row < w.rows) q += place.head(a, w, row) * a.q.stride[1] + place.query(a, row) * a.q.stride[2];
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      query[i].x = row < w.rows ? *((const uint32_t *)q + 8 * i + (lane & 3)) : 0;
      query[i].y = row < w.rows ? *((const uint32_t *)q + 8 * i + 4 + (lane & 3)) : 0;
    }
  }

  // The token at place `at` + lane % 16 of the selection, -1 behind its end.
  __device__ __forceinline__ int token_at(int at) const {
    at += lane % GATHER_STEP;
    return at < count ? (int)min((uint32_t)*(indices + at), (uint32_t)(s.tokens - 1)) : -1;
  }

  // Starts the copies of 16 tokens, lane i knows the one at i % 16; those that are missing have zeros for values.
  __device__ __forceinline__ void start(int stage, int token) const {
    const Attention &a = s.attention;
    T *to = rows + stage * S::STAGE;
    if (lane < GATHER_STEP) tokens[stage * GATHER_STEP + lane] = token;
#pragma unroll
    for (int i = 0; i < GATHER_STEP * UNITS / WARP; i++) {
      int unit = lane + i * WARP, row = unit / UNITS, at = unit % UNITS * 8, from = __shfl_sync(ALL_LANES, token, row);
      T *value = to + (GATHER_STEP + row) * S::ROW + at;
      if (from >= 0) {
        copy_async<16>(to + row * S::ROW + at, keys + from * a.exact_keys.stride[2] + at);
        copy_async<16>(value, values + from * a.exact_values.stride[2] + at);
      } else {
        *(uint4 *)value = make_uint4(0, 0, 0, 0);
      }
    }
  }

  __device__ __forceinline__ void step(int stage, const TokenMask &mask) {
    const T *from = rows + stage * S::STAGE;
    float x[2][4] = {};
    const float by[4] = {1, 1, 1, 1};
    result.each_keys(from, lane, [&](int i, const uint32_t (&k)[4]) { result.multiply(x, query[i], k); });
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int token = tokens[stage * GATHER_STEP + 8 * (i / 2) + 2 * (lane & 3) + i % 2];
      float &y = x[i / 2][i % 2];
      y = token < 0 ? -INFINITY : mask.add(capped(y * s.attention.scale, s.attention.softcap) * LOG2_OF_E, token);
    }
    result.add(x, by, from + GATHER_STEP * S::ROW, lane);
  }

  __device__ __forceinline__ void store(float *sums, float2 *state, int warp) const {
    result.store(sums, state, warp, lane, 1, [](int dim) { return dim; });
  }
};

// Tiles first .. last of an item, of which this warp has tokens `offset` and on.
template <class Worker>
__device__ __forceinline__ void run(Worker &worker, int first, int last, int offset, const TokenMask &mask) {
  constexpr int STAGES = Worker::S::STAGES;
  int at = first * SPARSE_TILE + offset, started = first, early[STAGES];
#pragma unroll
  for (int i = 0; i < STAGES; i++) early[i] = worker.token_at(at + i * SPARSE_TILE);
  int ahead = early[STAGES - 1];
  at += (STAGES - 1) * SPARSE_TILE;
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    if (started++ < last) worker.start(i, early[i]);
    close_copies();
  }
  auto start_next = [&](int stage) {
    int token = ahead;
    at += SPARSE_TILE;
    if (started++ < last) ahead = worker.token_at(at), worker.start(stage, token);
    close_copies();
  };
  for (int tile = first, stage = 0; tile < last; tile++, stage = stage + 1 == STAGES ? 0 : stage + 1) {
    start_next(stage ? stage - 1 : STAGES - 1);
    wait_copy_groups<STAGES - 1>();
    __syncwarp();
    if (tile * SPARSE_TILE + offset < worker.count) worker.step(stage, mask);
    __syncwarp();
  }
  worker.result.finish();
}

template <class Worker>
__global__ void __launch_bounds__(GATHER_WARPS *WARP, Worker::S::CTAS)
    attend_gathered(const __grid_constant__ Selected s, const __grid_constant__ Work w) {
  constexpr int DIM = Worker::DIM, SUMS_ROW = GatherShape<DIM>::SUMS_ROW;
  extern __shared__ float4 memory[];
  float *sums = (float *)memory;
  float2 *state = (float2 *)(sums + GATHER_WARPS * ITEM_ROWS * SUMS_ROW);
  fetch_parameters(s), fetch_parameters(w);
  wait_for_kernels_ahead(), let_next_kernel_begin();
  int lane = lane_id(), warp = warp_id();
  Share share(w);
  if (share.item < 0) return;
  Worker worker(s, (char *)memory, warp, lane);
  worker.begin(w, share.item);
  ItemPlace place(w, share.item);
  int row = min(w.first_row(share.item) + (lane >> 2), w.rows - 1);
  TokenMask mask(s.attention.mask, place.b, place.head(s.attention, w, row), place.query(s.attention, row));
  run(worker, share.first, share.last, warp * GATHER_STEP, mask);
  __syncthreads();  // no warp needs its tokens any more
  worker.store(sums, state, warp);
  __syncthreads();
  int64_t at = (int64_t)blockIdx.x * ITEM_ROWS;
  for (int i = threadIdx.x; i < ITEM_ROWS * DIM; i += GATHER_WARPS * WARP) {
    int r = i / DIM, d = i % DIM;
    float most = NOTHING, all = 0, mass = 0;
    for (int j = 0; j < GATHER_WARPS; j++) most = fmaxf(most, state[j * ITEM_ROWS + r].x);
    for (int j = 0; j < GATHER_WARPS; j++) {
      float2 x = state[j * ITEM_ROWS + r];
      float by = fast_exp2(x.x - most);
      all = fmaf(by, sums[(j * ITEM_ROWS + r) * SUMS_ROW + d], all), mass = fmaf(by, x.y, mass);
    }
    w.sums[(at + r) * DIM + d] = all;
    if (d == 0) w.state[at + r] = make_float2(most, mass);
  }
}

}  // namespace cuda
}  // namespace kvq
