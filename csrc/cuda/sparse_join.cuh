// The last step of attend_selected for 16-bit outputs of usual head dims: a block of threads joins the parts of one
// row, and the answer of other tokens if there is one; its first warp turns sums of packed values back.
#pragma once

#include "decode_combine.cuh"
#include "sparse_work.cuh"

namespace kvq {
namespace cuda {

constexpr int ROW_THREADS = 128;  // few enough to be there while the parts are made

struct JoinArgs {
  int heads, queries, each;  // selections, query tokens, selections of a key/value head
  StoreArgs values;          // nothing but a rotation of no rounds if they are dense
  DenseArgs out, near;       // near: null if absent
  float *lse;
  const float *near_lse;
  int lse_stride[3], near_lse_stride[3];
};

template <class T, int VDIM>
__global__ void __launch_bounds__(ROW_THREADS)
    join_row(const __grid_constant__ JoinArgs a, const __grid_constant__ Work w) {
  constexpr int COLUMNS = VDIM / 4, LANES = ROW_THREADS / COLUMNS, AHEAD = 3;
  __shared__ __align__(16) float partial[LANES][VDIM], y[VDIM];
  __shared__ float masses[ROW_THREADS / WARP];
  using End = RowEnd<T, VDIM>;
  int flat = blockIdx.x / w.rows, row = blockIdx.x - flat * w.rows, item = flat * w.row_blocks + row / ITEM_ROWS;
  int t = threadIdx.x, lane = t % WARP, group = t / COLUMNS, column = 4 * (t % COLUMNS);
  int b = flat / a.heads, k = flat - b * a.heads, member = row / a.queries, query = row - member * a.queries;
  int head = k * (w.rows / a.queries) + member;
  auto place = [&](const int *stride) {
    return (int64_t)b * stride[0] + (int64_t)head * stride[1] + (int64_t)query * stride[2];
  };
  T *out = (T *)a.out.data + place(a.out.stride);
  const T *near = (const T *)a.near.data + place(a.near.stride);
  const float *near_lse = a.near_lse + place(a.near_lse_stride);
  End end;
  if (t < WARP) end.load(a.values, b, k / a.each, t);
  fetch_parameters(a), fetch_parameters(w);
  wait_for_kernels_ahead(), let_next_kernel_begin();
  float other = a.near_lse ? *near_lse * LOG2_OF_E : -INFINITY;
  bool has_other = other != -INFINITY;
  float exact[End::N];
  if (t < WARP)
#pragma unroll
    for (int i = 0; i < End::N; i++) exact[i] = has_other && End::in_row(i, t) ? float_of(near[End::dim_of(i, t)]) : 0;
  Span parts(w, item);
  const float2 *state = w.state + (int64_t)parts.first * ITEM_ROWS + row % ITEM_ROWS;
  const float *sums = w.sums + ((int64_t)parts.first * ITEM_ROWS + row % ITEM_ROWS) * VDIM + column;
  auto sums_of = [&](int part) { return *(const float4 *)(sums + (int64_t)part * ITEM_ROWS * VDIM); };
  float4 ahead[AHEAD], all = make_float4(0, 0, 0, 0);  // the first parts', on their way while the maximum is found
  float tops[AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; i++) {
    int part = group + i * LANES;
    tops[i] = NOTHING;
    if (group < LANES && part < parts.count) ahead[i] = sums_of(part), tops[i] = state[part * ITEM_ROWS].x;
  }
  float most = fmaxf(other, NOTHING), mass = 0;
  for (int part = lane; part < parts.count; part += WARP) most = fmaxf(most, state[part * ITEM_ROWS].x);
  most = warp_max(most);
  for (int part = t; part < parts.count; part += ROW_THREADS) {
    float2 s = state[part * ITEM_ROWS];
    mass = fmaf(fast_exp2(s.x - most), s.y, mass);
  }
  mass = warp_sum(mass);
  if (lane == 0) masses[t / WARP] = mass;
  auto add = [&](float by, float4 x) {
    all.x = fmaf(by, x.x, all.x), all.y = fmaf(by, x.y, all.y);
    all.z = fmaf(by, x.z, all.z), all.w = fmaf(by, x.w, all.w);
  };
  if (group < LANES) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
      if (group + i * LANES < parts.count) add(fast_exp2(tops[i] - most), ahead[i]);
#pragma unroll 2
    for (int part = group + AHEAD * LANES; part < parts.count; part += LANES)
      add(fast_exp2(state[part * ITEM_ROWS].x - most), sums_of(part));
    *(float4 *)&partial[group][column] = all;
  }
  __syncthreads();
  if (t >= WARP) return;
  mass = 0;
#pragma unroll
  for (int i = 0; i < ROW_THREADS / WARP; i++) mass += masses[i];
  float turned[End::N] = {}, by = has_other ? fast_exp2(other - most) : 0, total = mass + by;
#pragma unroll
  for (int i = 0; i < LANES; i++) {
    float more[End::N];
    End::load_row(more, partial[i], t);
#pragma unroll
    for (int j = 0; j < End::N; j++) turned[j] += more[j];
  }
#pragma unroll
  for (int i = 0; i < End::N; i++) exact[i] *= by;
  end.turn_back(turned, a.values.rotation, y, t);
  bool some = total > 0 || isnan(total);
  end.store(out, turned, exact, mass, some ? 1 / total : 0, t);
  if (t == 0) a.lse[place(a.lse_stride)] = some ? (most + log2f(total)) / LOG2_OF_E : -INFINITY;
}

}  // namespace cuda
}  // namespace kvq
