// merge: one warp an output row.
#include "launch.h"
#include "rows.cuh"
#include "sparse_asm.cuh"

namespace kvq {
namespace cuda {

namespace {

constexpr int WARPS = 4, LANE_DIMS = 4;  // loads of a lane that are under way together

__global__ void __launch_bounds__(WARPS *WARP) merge(const __grid_constant__ Pieces p) {
  int lane = lane_id();
  uint32_t row = blockIdx.x * WARPS + warp_id();
  if (row >= p.batch * p.heads * p.queries) return;
  wait_for_kernels_ahead(), let_next_kernel_begin();
  uint32_t flat_head = row / (uint32_t)p.queries;
  int64_t m = row % (uint32_t)p.queries, b = flat_head / (uint32_t)p.heads, h = flat_head % (uint32_t)p.heads;
  const float *lses = p.lses + b * p.lses_stride[1] + h * p.lses_stride[2] + m * p.lses_stride[3];
  const char *outs =
      p.outs + element_size(p.outs_dtype) * (b * p.outs_stride[1] + h * p.outs_stride[2] + m * p.outs_stride[3]);
  float top = -INFINITY, mass = 0;
  for (int64_t i = 0; i < p.pieces; i++) top = fmaxf(top, lses[i * p.lses_stride[0]]);
  float base = top == -INFINITY ? 0 : top;
  for (int64_t i = 0; i < p.pieces; i++) mass += expf(lses[i * p.lses_stride[0]] - base);
  float by = mass > 0 || isnan(mass) ? 1 / mass : 0;
  char *out = row_at(p.out, b, h, m);
  for (int first = lane; first < p.dim; first += LANE_DIMS * WARP) {
    float sums[LANE_DIMS] = {}, x[LANE_DIMS];
    for (int64_t i = 0; i < p.pieces; i++) {
      float weight = expf(lses[i * p.lses_stride[0]] - base);
      load_spread(x, outs + element_size(p.outs_dtype) * i * p.outs_stride[0], p.outs_dtype, first, p.dim);
#pragma unroll
      for (int j = 0; j < LANE_DIMS; j++) sums[j] = weight != 0 ? fmaf(weight, x[j], sums[j]) : sums[j];
    }
#pragma unroll
    for (int j = 0; j < LANE_DIMS; j++)
      if (first + j * WARP < p.dim) store_element(out, p.out.dtype, first + j * WARP, sums[j] * by);
  }
  if (lane == 0) p.lse[b * p.lse_stride[0] + h * p.lse_stride[1] + m * p.lse_stride[2]] = base + logf(mass);
}

}  // namespace

void launch_merge(const Pieces &p, cudaStream_t stream) {
  int64_t rows = p.batch * p.heads * p.queries;
  if (rows) launch_behind(merge, dim3(ceil_div(rows, WARPS)), WARPS * WARP, 0, stream, p);
}

}  // namespace cuda
}  // namespace kvq
