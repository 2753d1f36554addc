// The last step of attend_selected: a block of threads joins the partial results of one row, each warp some of them,
// and turns sums of packed values back.
#pragma once

#include "sparse_any.cuh"

namespace kvq {
namespace cuda {

constexpr int JOIN_WARPS = 8, JOIN_THREADS = JOIN_WARPS * WARP, LANE_DIMS = MAX_HEAD_DIM / WARP;

__global__ void __launch_bounds__(JOIN_THREADS)
    combine_selected(const __grid_constant__ Selected s, const __grid_constant__ Work w) {
  extern __shared__ float4 memory[];
  __shared__ float masses[JOIN_WARPS];
  const Attention &a = s.attention;
  int item = blockIdx.x / ITEM_ROWS, r = blockIdx.x % ITEM_ROWS, row = w.first_row(item) + r, t = threadIdx.x,
      lane = lane_id(), warp = warp_id(), dim = a.value_dim;
  float *y = (float *)memory, *of_warps = y + 2 * dim;
  if (row >= w.rows) return;
  wait_for_kernels_ahead(), let_next_kernel_begin();
  Span parts(w, item);
  auto place_of = [&](int part) { return (int64_t)(parts.first + part) * ITEM_ROWS + r; };
  float most = NOTHING, mass = 0, sums[LANE_DIMS] = {};
  for (int part = lane; part < parts.count; part += WARP) most = fmaxf(most, w.state[place_of(part)].x);
  most = warp_max(most);
#pragma unroll 2
  for (int part = warp; part < parts.count; part += JOIN_WARPS) {
    float2 state = w.state[place_of(part)];
    const float *from = w.sums + place_of(part) * dim;
    float by = exp2f(state.x - most);
    mass = fmaf(by, state.y, mass);
#pragma unroll
    for (int j = 0; j < LANE_DIMS; j++)
      if (lane + j * WARP < dim) sums[j] = fmaf(by, from[lane + j * WARP], sums[j]);
  }
#pragma unroll
  for (int j = 0; j < LANE_DIMS; j++)
    if (lane + j * WARP < dim) of_warps[warp * dim + lane + j * WARP] = sums[j];
  if (lane == 0) masses[warp] = mass;
  __syncthreads();
  mass = 0;
  for (int i = 0; i < JOIN_WARPS; i++) mass += masses[i];
  ItemPlace place(w, item);
  RowSource values = values_of(s, place.b, place.kv_head(a, w));
  float inverse = mass > 0 || isnan(mass) ? 1 / mass : 0;
  for (int d = t; d < dim; d += JOIN_THREADS) {
    float sum = 0;
    for (int i = 0; i < JOIN_WARPS; i++) sum += of_warps[i * dim + d];
    y[d] = sum * inverse;
  }
  __syncthreads();
  if (values.packed && warp == 0) rotate_row<true>(values.store.rotation, y, y + dim, lane);
  __syncthreads();
  const float *centre = values.centre(), *balance = values.balance();
  int64_t head = place.head(a, w, row), query = place.query(a, row);
  char *out = row_at(a.out, place.b, head, query);
  for (int d = t; d < dim; d += JOIN_THREADS)
    store_element(out, a.out.dtype, d, y[d] * (balance ? balance[d] : 1) + (centre && mass > 0 ? centre[d] : 0));
  if (t == 0) {
    float lse = mass > 0 || isnan(mass) ? (most + log2f(mass)) / LOG2_OF_E : -INFINITY;
    a.lse[place.b * a.lse_stride[0] + head * a.lse_stride[1] + query * a.lse_stride[2]] = lse;
  }
}

inline int combine_bytes(const Attention &a) { return (2 + JOIN_WARPS) * a.value_dim * (int)sizeof(float); }

}  // namespace cuda
}  // namespace kvq
