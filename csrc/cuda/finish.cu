// The sum of all splits of a row, R^T, balance and centre, and the output. Up to eight warps share the splits of a row;
// the first of them turns the sum and writes it. Rows of few splits have one warp each, four rows a CTA.
#include "pack.cuh"
#include "rotation.cuh"
#include "tiles.h"

namespace kvq {
namespace cuda {

namespace {

constexpr int CTA_WARPS = 8;
constexpr float LOG2_E = 1.4426950408889634f;

struct Total {
  float packed, exact, maximum;  // sums of weights relative to the maximum
};

// Maximum and sums of the weights of all splits, in every lane.
__device__ Total total_of(const Attention &a, const float *state, float sink, int lane) {
  int splits = (int)(a.packed_splits + a.exact_splits);
  Total total = {0, 0, a.normalise ? sink : 0};
  for (int s = lane; s < splits; s += WARP) total.maximum = fmaxf(total.maximum, state[2 * s * a.row_block]);
  total.maximum = warp_max(total.maximum);
  for (int s = lane; s < splits; s += WARP) {
    const float *here = state + 2 * s * a.row_block;
    if (here[0] == -INFINITY) continue;
    (s < a.packed_splits ? total.packed : total.exact) += exp2f(here[0] - total.maximum) * here[1];
  }
  total.packed = warp_sum(total.packed), total.exact = warp_sum(total.exact);
  return total;
}

// sums [value_dim] = sum of the splits from, from + step, .. below `to`.
__device__ void add_splits(const Attention &a, const float *partial, const float *state, float maximum, int from,
                           int to, int step, float *sums, int lane) {
  for (int column = 4 * lane; column < a.value_dim; column += 4 * WARP) {
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
    for (int s = from; s < to; s += step) {
      float top = state[2 * s * a.row_block];
      if (top == -INFINITY) continue;
      float by = exp2f(top - maximum);
      float4 x = *(const float4 *)(partial + s * a.row_block * a.value_pad + column);
      sum.x = fmaf(by, x.x, sum.x), sum.y = fmaf(by, x.y, sum.y), sum.z = fmaf(by, x.z, sum.z),
      sum.w = fmaf(by, x.w, sum.w);
    }
    *(float4 *)(sums + column) = sum;
  }
}

__device__ void write_row(const Attention &a, int64_t b, int64_t h, int64_t head, int64_t query, const Total &total,
                          float sink, const float *packed, const float *exact, int lane) {
  const Store &s = a.shared ? a.keys : a.values;
  const float *centre = centre_at(s, b, h), *balance = balance_at(s, b, h);
  float mass = total.packed + total.exact, by = 1;
  if (a.normalise) {
    bool empty = total.maximum == -INFINITY && mass == 0;
    if (a.sink_logits && !empty) mass += exp2f(sink - total.maximum);
    by = empty ? 0 : 1 / mass;
    float lse = empty ? -INFINITY : (total.maximum + log2f(mass)) / LOG2_E;
    if (lane == 0) a.lse[b * a.lse_stride[0] + head * a.lse_stride[1] + query * a.lse_stride[2]] = lse;
  }
  char *out = row_at(a.out, b, head, query);
  for (int d = lane; d < a.value_dim; d += WARP) {
    float x = packed[d];
    if (balance) x *= balance[d];
    if (centre) x = fmaf(centre[d], total.packed, x);
    store_element(out, a.out.dtype, d, (x + exact[d]) * by);
  }
}

// `warps` warps a row.
__global__ void __launch_bounds__(CTA_WARPS *WARP, 2) finish(const __grid_constant__ Attention a, int warps) {
  extern __shared__ float4 memory[];
  int lane = lane_id(), warp = threadIdx.x / WARP, part = warp % warps, dim = a.value_dim;
  uint32_t flat = blockIdx.x * (blockDim.x / WARP / warps) + warp / warps,
           count = (uint32_t)(a.batch * a.heads * a.rows);
  bool used = flat < count;
  if (!used) flat = count - 1;
  uint32_t head = flat / (uint32_t)a.rows, row = flat % (uint32_t)a.rows, h = head % (uint32_t)a.heads;
  uint32_t member = row / (uint32_t)a.queries, block = row / (uint32_t)a.row_block;  // of the group, of rows
  int64_t splits = a.packed_splits + a.exact_splits;
  int64_t first = (head * a.row_blocks + block) * splits * a.row_block + row - block * a.row_block;  // of its states
  const float *state = a.state + 2 * first, *partial = a.partial + first * a.value_pad;
  int64_t query_head = h * a.group + member;
  float sink = a.sink_logits ? a.sink_logits[query_head] * LOG2_E : -INFINITY;
  float *packed = (float *)memory + warp * 3 * dim, *exact = packed + dim, *other = exact + dim;  // of this warp
  Total total = total_of(a, state, sink, lane);
  add_splits(a, partial, state, total.maximum, part, (int)a.packed_splits, warps, packed, lane);
  add_splits(a, partial, state, total.maximum, (int)a.packed_splits + part, (int)splits, warps, exact, lane);
  __syncthreads();
  if (part != 0 || !used) return;
  for (int d = lane; d < dim; d += WARP)
    for (int p = 1; p < warps; p++) packed[d] += packed[3 * p * dim + d], exact[d] += exact[3 * p * dim + d];
  if (a.packed_splits) rotate_row<true>(a.shared ? a.keys.rotation : a.values.rotation, packed, other, lane);
  __syncwarp();
  write_row(a, head / (uint32_t)a.heads, h, query_head, row - member * a.queries, total, sink, packed, exact, lane);
}

}  // namespace

void launch_finish(const Attention &a, cudaStream_t stream) {
  int64_t rows = a.batch * a.heads * a.rows, splits = a.packed_splits + a.exact_splits;
  int warps = 1;
  while (warps < CTA_WARPS && 4 * warps < splits) warps *= 2;
  int cta_warps = warps < 4 ? 4 : warps, bytes = 3 * cta_warps * a.value_dim * (int)sizeof(float);
  finish<<<(unsigned)ceil_div(rows, cta_warps / warps), cta_warps * WARP, bytes, stream>>>(a, warps);
}

}  // namespace cuda
}  // namespace kvq
