// The parts of a row become its output: sums of packed parts are turned back once, exact parts join, all are divided.
#pragma once

#include "decode_queries.cuh"

namespace kvq {
namespace cuda {

constexpr int MANY_ROWS = 512;  // from here on a row is combined by fewer threads
constexpr int MANY_PARTS = 64;  // more are not asked for at once, but where rows are few and parts many

// How a call is cut, and its scratch, if it has any. Packed parts come first; part p of head bh and row r is at index
// (bh * count + p) * rows + r.
struct Parts {
  float *sums;    // [.., VDIM], packed ones in rotated space
  float2 *state;  // maximum in log2, sum of the weights
  int packed, exact;
  bool clustered;    // the CTAs of a head end its rows, as one cluster; there is no scratch
  bool small;        // by small_kernel
  int exact_shares;  // warps that the exact tokens of a head are dealt to
  int first_tile, num_tiles, exact_steps;
  int room;  // where all warps of a CTA work on its few tiles together: for how many it has memory, else 0

  __host__ __device__ int count() const { return packed + exact; }
  __device__ __forceinline__ int64_t index(int bh, int part, int rows) const {
    return ((int64_t)bh * count() + part) * rows;
  }
  __device__ __forceinline__ int tile(int split) const {
    return first_tile + (int)((int64_t)split * num_tiles / packed);
  }
};

__device__ __forceinline__ float largest_of_warp(float x) {  // not of NaN
  int ordered = __float_as_int(x);
  ordered = __reduce_max_sync(~0u, ordered ^ (ordered >> 31 & 0x7fffffff));
  return __int_as_float(ordered ^ (ordered >> 31 & 0x7fffffff));
}
// What of a row's end does not depend on the parts, loaded while they are still being made, and that end itself, by one
// warp: lane l holds dims N l .. N l + N - 1, or l, l + 32, .. where the rotation needs shared memory.
template <class T, int VDIM>
struct RowEnd {
  static constexpr int N = (VDIM + 31) / 32;
  static constexpr bool IN_REGISTERS = VDIM == 32 * fixed::largest_power(N) && VDIM >= 64;
  fixed::WarpRotation<IN_REGISTERS ? N : 2> rotation;
  const float *centre, *balance;
  float c[N], b[N];

  static __device__ __forceinline__ int dim_of(int i, int lane) { return IN_REGISTERS ? N * lane + i : lane + 32 * i; }
  static __device__ __forceinline__ bool in_row(int i, int lane) { return VDIM % 32 == 0 || dim_of(i, lane) < VDIM; }

  static __device__ __forceinline__ void load_row(float (&to)[N], const float *from, int lane) {
    if constexpr (IN_REGISTERS)
      fixed::load_floats(to, from + N * lane);
    else
#pragma unroll
      for (int i = 0; i < N; i++) to[i] = in_row(i, lane) ? from[dim_of(i, lane)] : 0;
  }

  __device__ __forceinline__ void load(const StoreArgs &v, int sequence, int h, int lane) {
    centre = v.centre ? v.centre + (int64_t)sequence * v.centre_stride[0] + h * v.centre_stride[1] : nullptr;
    balance = v.balance ? v.balance + (int64_t)sequence * v.balance_stride[0] + h * v.balance_stride[1] : nullptr;
    if (IN_REGISTERS && !v.rotation.matrix) rotation.load(v.rotation, true, lane);
    if (centre) load_row(c, centre, lane);
    if (balance) load_row(b, balance, lane);
  }

  // The same from shared memory of the cluster.
  static __device__ __forceinline__ void load_part(float (&to)[N], uint32_t from, int lane) {
    if constexpr (IN_REGISTERS) {
      load_in_cluster(to, from + 4 * N * lane);
    } else {
#pragma unroll
      for (int i = 0; i < N; i++) {
        float one[1] = {0};
        if (in_row(i, lane)) load_in_cluster(one, from + 4 * dim_of(i, lane));
        to[i] = one[0];
      }
    }
  }

  // Ends the row at `place`: the sums of its packed parts, still turned, and of its exact ones; the weights of all and
  // of packed parts, counted from `most`; its sink. `memory` [VDIM] is of this warp alone.
  __device__ __forceinline__ void finish(const DecodeArgs &a, const QueryPlace &place, float (&turned)[N],
                                         const float (&exact)[N], float all, float packed, float most, float sink,
                                         float *memory, int lane) const {
    turn_back(turned, a.values.rotation, memory, lane);
    if (a.sink_logits) all += fast_exp2(sink - most);
    bool some = all > 0 || isnan(all);  // a NaN is not taken for a row that sees nothing
    store((T *)a.out.data + place.at(a.out.stride), turned, exact, packed, some ? __fdividef(1, all) : 0, lane);
    if (lane == 0) a.lse[place.at(a.lse_stride)] = some ? (most + log2f(all)) * (1 / LOG2E) : -INFINITY;
  }

  // Sums of `lanes` threads a dim: partial [lanes][2][VDIM].
  static __device__ __forceinline__ void add_lanes(float (&sum)[N], const float *partial, int lanes, int lane) {
    load_row(sum, partial, lane);
#pragma unroll
    for (int j = 1; j < lanes; j++) {
      float more[N];
      load_row(more, partial + 2 * j * VDIM, lane);
#pragma unroll
      for (int i = 0; i < N; i++) sum[i] += more[i];
    }
  }

  // The rotation turned back; `y` [VDIM] is memory for it.
  __device__ __forceinline__ void turn_back(float (&x)[N], const Rotation &r, float *y, int lane) const {
    if constexpr (IN_REGISTERS)
      if (!r.matrix) {
        rotation.turn(x, r, true, lane);
        return;
      }
#pragma unroll
    for (int i = 0; i < N; i++)
      if (in_row(i, lane)) y[dim_of(i, lane)] = x[i];
    __syncwarp();
    fixed::rotate_row<VDIM>(y, r, true, lane);
    load_row(x, y, lane);
  }

  __device__ __forceinline__ void store(T *out, float (&x)[N], const float (&exact)[N], float packed, float inverse,
                                        int lane) const {
#pragma unroll
    for (int i = 0; i < N; i++) {
      if (balance) x[i] *= b[i];
      if (centre) x[i] = fmaf(packed, c[i], x[i]);
      x[i] = (x[i] + exact[i]) * inverse;
    }
    if constexpr (IN_REGISTERS) {
      uint32_t pair[N / 2];
#pragma unroll
      for (int i = 0; i < N; i += 2) pair[i / 2] = pair_of<T>(x[i], x[i + 1]);
      store_words(out + N * lane, pair);
    } else {
#pragma unroll
      for (int i = 0; i < N; i++)
        if (in_row(i, lane)) out[dim_of(i, lane)] = from_float<T>(x[i]);
    }
  }
};

// One CTA a row. Every warp finds the weights of all parts for itself, in dynamic shared memory [warps][parts]; a
// thread adds up four dims of every LANES-th part; the first warp ends the row. LONG: for more than MANY_PARTS.
template <class T, int VDIM, int NUM_THREADS, bool LONG = false>
__global__ void __launch_bounds__(NUM_THREADS)
    combine_kernel(const __grid_constant__ DecodeArgs a, const __grid_constant__ Parts parts) {
  extern __shared__ float weights[];
  constexpr int COLUMNS = VDIM / 4, LANES = NUM_THREADS / COLUMNS, AHEAD = NUM_THREADS / 32 + 2 * LONG,
                EACH = LONG ? 3 : 2;
  __shared__ __align__(16) float partial[LANES][2][VDIM], y[VDIM];
  __shared__ float2 totals;  // of all weights, of packed parts'
  int rows = a.rows, bh = blockIdx.x / rows, row = blockIdx.x - bh * rows, t = threadIdx.x, count = parts.count();
  int b = bh / a.heads, h = bh - b * a.heads, column = t % COLUMNS, lane = t / COLUMNS, in_warp = t % 32;
  QueryPlace place(a, b, h, row);
  // 32 bits reach over MAX_PART_BYTES of sums and take half the registers of an address.
  uint32_t first = (uint32_t)bh * count * rows + row;
  auto state_of = [&](int p) { return parts.state[first + (uint32_t)p * rows]; };
  auto sums_of = [&](int p) { return ((const float4 *)parts.sums)[(first + (uint32_t)p * rows) * COLUMNS + column]; };
  float sink = a.sink_logits ? a.sink_logits[place.head] * LOG2E : NO_SCORE;
  RowEnd<T, VDIM> end;
  if (t < 32) end.load(a.values, b, h, t);
  wait_for_kernels_ahead();
  let_next_kernel_begin();
  float4 ahead[AHEAD];  // the first sums of this thread, on their way while the weights are found
  float2 mine[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++)
    mine[i] = in_warp + 32 * i < count ? state_of(in_warp + 32 * i) : make_float2(NO_SCORE, 0);
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
    if (lane < LANES && lane + i * LANES < count) ahead[i] = sums_of(lane + i * LANES);
  float most = sink;
#pragma unroll
  for (int i = 0; i < EACH; i++) most = fmaxf(most, mine[i].x);
  for (int p = in_warp + 32 * EACH; p < count; p += 32) most = fmaxf(most, state_of(p).x);
  most = largest_of_warp(most);
  float all = 0, packed = 0, *weight = weights + t / 32 * count;
  auto weigh = [&](int p, float2 s) {
    float w = fast_exp2(s.x - most);
    weight[p] = w, all += w * s.y, packed += p < parts.packed ? w * s.y : 0;
  };
#pragma unroll
  for (int i = 0; i < EACH; i++)
    if (in_warp + 32 * i < count) weigh(in_warp + 32 * i, mine[i]);
  for (int p = in_warp + 32 * EACH; p < count; p += 32) weigh(p, state_of(p));
  __syncwarp();
  if (lane < LANES) {
    float4 both[2] = {};
    auto add_to = [&](float4 &sum, float w, float4 x) {
      sum.x += w * x.x, sum.y += w * x.y, sum.z += w * x.z, sum.w += w * x.w;
    };
    auto add = [&](int p, float4 x) {
      if (p < parts.packed)
        add_to(both[0], weight[p], x);
      else
        add_to(both[1], weight[p], x);
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
      if (lane + i * LANES < count) add(lane + i * LANES, ahead[i]);
#pragma unroll 4
    for (int p = lane + AHEAD * LANES; p < count; p += LANES) add(p, sums_of(p));
    *(float4 *)&partial[lane][0][4 * column] = both[0], *(float4 *)&partial[lane][1][4 * column] = both[1];
  }
  if (t / 32 == 1) {
    all = warp_sum(all), packed = warp_sum(packed);
    if (in_warp == 0) totals = make_float2(all, packed);
  }
  __syncthreads();
  if (t >= 32) return;
  all = totals.x, packed = totals.y;
  float turned[RowEnd<T, VDIM>::N], exact[RowEnd<T, VDIM>::N];
  end.add_lanes(turned, partial[0][0], LANES, t);
  end.add_lanes(exact, partial[0][1], LANES, t);
  end.finish(a, place, turned, exact, all, packed, most, sink, y, t);
}

}  // namespace cuda
}  // namespace kvq
