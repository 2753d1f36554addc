// Queries of attend and qk, once a call, one warp a row: q . centre, R (q * balance) in the order of packed
// coordinates, and q itself, as halves over the row's unit (tiles.h).
#include "pack.cuh"
#include "rotation.cuh"
#include "tiles.h"
#include "tiles_exact.cuh"

namespace kvq {
namespace cuda {
namespace tiles {

namespace {

constexpr int WARPS = 4;

// Halves of x [dim] over its unit, zeros up to `pad`; coordinates at their places with `packed`. Their low parts as
// halves into `low` or as bytes into `low_bytes`, if not null.
__device__ void write_row(const float *x, int dim, int pad, float factor, bool packed, __half *high, __half *low,
                          uint8_t *low_bytes, int lane) {
  for (int i = lane; i < pad; i += WARP) {
    int d = packed ? code_of(i) : i;
    float v = d < dim ? x[d] * factor : 0;
    high[i] = __float2half_rn(v);
    __half rest = __float2half_rn(low_part(v));
    if (low) low[i] = rest;
    if (low_bytes) low_bytes[low_place(i)] = (uint8_t)((__half_as_ushort(rest) + 0x80) >> 8);
  }
}

__device__ float largest(const float *x, int dim, int lane) {
  float most = 0;
  for (int d = lane; d < dim; d += WARP) most = fmaxf(most, fabsf(x[d]));
  return warp_max(most);
}

__global__ void __launch_bounds__(WARPS *WARP, 4) prepare(const __grid_constant__ Plan plan) {
  extern __shared__ float4 memory[];
  const Attention &a = plan.a;
  int lane = lane_id(), dim = a.dim, pad = plan.query_pad;
  float *x = (float *)memory + threadIdx.x / WARP * 2 * dim;
  int64_t flat = (int64_t)blockIdx.x * WARPS + threadIdx.x / WARP;
  if (flat >= a.batch * a.heads * a.rows) return;
  uint32_t head = (uint32_t)flat / (uint32_t)a.rows, row = (uint32_t)flat % (uint32_t)a.rows;
  uint32_t b = head / (uint32_t)a.heads, h = head % (uint32_t)a.heads, member = row / (uint32_t)a.queries;
  const char *q = row_at(a.q, b, h * a.group + member, row % (uint32_t)a.queries);
  const float *centre = centre_at(a.keys, b, h), *balance = balance_at(a.keys, b, h);
  RowInfo info = {0, 0, 0, 0};
  for (int d = lane; d < dim; d += WARP) {
    x[d] = load_element(q, a.q.dtype, d);
    if (centre) info.bias = fmaf(x[d], centre[d], info.bias);
  }
  info.bias = warp_sum(info.bias);
  __syncwarp();
  if (plan.plain) {
    Unit unit = unit_of(largest(x, dim, lane));
    info.plain_unit = unit.unit;
    __half *low = plan.precise ? (__half *)plan.plain_low + flat * pad : nullptr;
    write_row(x, dim, pad, unit.factor, false, plan.plain + flat * pad, low, nullptr, lane);
    __syncwarp();
  }
  if (plan.rotated) {
    if (balance)
      for (int d = lane; d < dim; d += WARP) x[d] *= balance[d];
    rotate_row<false>(a.keys.rotation, x, x + dim, lane);
    float square = 0;
    for (int d = lane; d < dim; d += WARP) square = fmaf(x[d], x[d], square);
    info.rotated_square = warp_sum(square);
    Unit unit = unit_of(largest(x, dim, lane));
    info.rotated_unit = unit.unit;
    __half *low = plan.precise ? (__half *)plan.rotated_low + flat * pad : nullptr;
    uint8_t *low_bytes = plan.precise ? nullptr : (uint8_t *)plan.rotated_low + flat * pad;
    write_row(x, dim, pad, unit.factor, true, plan.rotated + flat * pad, low, low_bytes, lane);
  }
  if (lane == 0) plan.info[flat] = info;
}

}  // namespace

void launch_prepare(const Plan &plan, cudaStream_t stream) {
  if (!plan.info) return;
  int64_t rows = plan.a.batch * plan.a.heads * plan.a.rows;
  int bytes = WARPS * 2 * plan.a.dim * (int)sizeof(float);
  prepare<<<(unsigned)ceil_div(rows, WARPS), WARPS * WARP, bytes, stream>>>(plan);
}

}  // namespace tiles
}  // namespace cuda
}  // namespace kvq
