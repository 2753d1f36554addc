// The last step of attend_selected: a block of threads joins the partial results of one row and turns sums of packed
// values back.
#pragma once

#include "sparse_any.cuh"

namespace kvq {
namespace cuda {

__global__ void __launch_bounds__(ANY_THREADS)
    combine_selected(const __grid_constant__ Selected s, const __grid_constant__ Work w) {
  extern __shared__ float4 memory[];
  float *y = (float *)memory;
  const Attention &a = s.attention;
  int item = blockIdx.x / ITEM_ROWS, r = blockIdx.x % ITEM_ROWS, row = w.first_row(item) + r, t = threadIdx.x,
      warp = warp_id();
  wait_for_kernels_ahead();
  if (row >= w.rows) return;
  int tiles = w.tiles_before(w.items), first = w.tiles_before(item), own = w.tiles_of(item);
  int part = own ? w.owner(first, tiles) : 0, last = own ? w.owner(first + own - 1, tiles) : -1;
  float most = NOTHING, mass = 0, sums[MAX_DIMS_EACH] = {};
  for (int i = part; i <= last; i++)
    if (w.first_tile(i, tiles) < w.first_tile(i + 1, tiles))
      most = fmaxf(most, w.state[(int64_t)(i + item) * ITEM_ROWS + r].x);
  for (int i = part; i <= last; i++) {
    if (w.first_tile(i, tiles) >= w.first_tile(i + 1, tiles)) continue;  // a part without tiles
    int64_t at = (int64_t)(i + item) * ITEM_ROWS + r;
    float2 state = w.state[at];
    float by = exp2f(state.x - most);
    mass = fmaf(by, state.y, mass);
#pragma unroll
    for (int j = 0; j < MAX_DIMS_EACH; j++)
      if (t + j * ANY_THREADS < a.value_dim)
        sums[j] = fmaf(by, w.sums[at * a.value_dim + t + j * ANY_THREADS], sums[j]);
  }
  ItemPlace place(w, item);
  RowSource values = values_of(s, place.b, place.kv_head(a, w));
  float inverse = mass > 0 || isnan(mass) ? 1 / mass : 0;
#pragma unroll
  for (int j = 0; j < MAX_DIMS_EACH; j++)
    if (t + j * ANY_THREADS < a.value_dim) y[t + j * ANY_THREADS] = sums[j] * inverse;
  __syncthreads();
  if (values.packed && warp == 0) rotate_row<true>(values.store.rotation, y, y + a.value_dim, t);
  __syncthreads();
  const float *centre = values.centre(), *balance = values.balance();
  int64_t head = place.head(a, w, row), query = place.query(a, row);
  char *out = row_at(a.out, place.b, head, query);
  for (int d = t; d < a.value_dim; d += ANY_THREADS)
    store_element(out, a.out.dtype, d, y[d] * (balance ? balance[d] : 1) + (centre && mass > 0 ? centre[d] : 0));
  if (t == 0) {
    float lse = mass > 0 || isnan(mass) ? (most + log2f(mass)) / LOG2_OF_E : -INFINITY;
    a.lse[place.b * a.lse_stride[0] + head * a.lse_stride[1] + query * a.lse_stride[2]] = lse;
  }
}

}  // namespace cuda
}  // namespace kvq
