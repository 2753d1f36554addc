// gather_selected: a warp copies a row at a time, several rows under way, so that reads of host memory are whole and
// many.
#include "rows.cuh"
#include "sparse.h"

namespace kvq {
namespace cuda {

namespace {

constexpr int WARPS = 8, AT_ONCE = 4;

// Rows of `units` words of type T; a warp takes 32 / lanes rows at once where a row is shorter than it.
template <class T>
__global__ void __launch_bounds__(WARPS *WARP)
    gather_selected(const __grid_constant__ Gathering g, int units, int lanes) {
  const Selection &s = g.selection;
  int b = blockIdx.y / (int)s.selections, k = blockIdx.y % (int)s.selections,
      count = __ldg(s.count + b * s.count_stride + k);
  int h = (int)(k * g.heads / s.selections), each = WARP / lanes, lane = lane_id() % lanes;
  const char *x = g.x + b * g.x_stride[0] + h * g.x_stride[1];
  char *out = g.out + b * g.out_stride[0] + k * g.out_stride[1];
  const int32_t *indices = s.indices + b * s.index_stride[0] + k * s.index_stride[1];
  int stride = (int)gridDim.x * WARPS * each,
      first = (int)(blockIdx.x * WARPS + threadIdx.x / WARP) * each + lane_id() / lanes;
  for (int at = first; at < count; at += stride * AT_ONCE) {
    const char *from[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      int row = min(at + i * stride, count - 1);
      from[i] = x + (int64_t)min((uint32_t)__ldg(indices + row), (uint32_t)(g.tokens - 1)) * g.x_stride[2];
    }
    for (int unit = lane; unit < units; unit += lanes) {
      T value[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) value[i] = ((const T *)from[i])[unit];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
        if (at + i * stride < count) ((T *)(out + (int64_t)(at + i * stride) * g.out_stride[2]))[unit] = value[i];
    }
  }
}

template <class T>
void launch(const Gathering &g, int num_multiprocessors, cudaStream_t stream) {
  int units = (int)(g.row_bytes / (int)sizeof(T)), lanes = 1;
  while (lanes < WARP && lanes < units) lanes *= 2;
  int64_t heads = g.batch * g.selection.selections, most = ceil_div(8 * num_multiprocessors, heads);
  int64_t blocks = ceil_div(g.selection.capacity, WARPS * (WARP / lanes));
  dim3 grid((unsigned)(blocks < most ? blocks : most), (unsigned)heads);
  gather_selected<T><<<grid, WARPS * WARP, 0, stream>>>(g, units, lanes);
}

}  // namespace

void launch_gather_selected(const Gathering &g, int num_multiprocessors, cudaStream_t stream) {
  if (!(g.batch * g.selection.selections * g.selection.capacity * g.row_bytes)) return;
  int64_t all = (int64_t)(uintptr_t)g.x | (int64_t)(uintptr_t)g.out | g.row_bytes;
  for (int i = 0; i < 3; i++) all |= g.x_stride[i] | g.out_stride[i];
  if (all % 16 == 0)
    launch<uint4>(g, num_multiprocessors, stream);
  else if (all % 4 == 0)
    launch<uint32_t>(g, num_multiprocessors, stream);
  else if (all % 2 == 0)
    launch<uint16_t>(g, num_multiprocessors, stream);
  else
    launch<uint8_t>(g, num_multiprocessors, stream);
}

}  // namespace cuda
}  // namespace kvq
