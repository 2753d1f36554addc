// rotate: one warp a vector, through two rows of shared memory.
#include "launch.h"
#include "rotation.cuh"

namespace kvq {
namespace cuda {

namespace {

constexpr int WARPS = 4;

// Offset in elements of vector `index`.
__device__ int64_t offset_of(const Vectors &v, const int64_t *stride, uint32_t index) {
  int64_t offset = 0;
  for (int i = v.leading - 1; i >= 0; i--) {
    offset += index % (uint32_t)v.size[i] * stride[i];
    index /= (uint32_t)v.size[i];
  }
  return offset;
}

template <bool INVERSE>
__global__ void __launch_bounds__(WARPS *WARP) rotate(const __grid_constant__ Vectors v) {
  extern __shared__ float4 memory[];
  int lane = lane_id(), dim = v.rotation.dim;
  float *row = (float *)memory + warp_id() * 2 * dim;
  uint32_t i = blockIdx.x * WARPS + warp_id();
  if (i >= v.count) return;
  const char *x = v.x + element_size(v.x_dtype) * offset_of(v, v.x_stride, i);
  char *out = v.out + element_size(v.out_dtype) * offset_of(v, v.out_stride, i);
  for (int d = lane; d < dim; d += WARP) row[d] = load_element(x, v.x_dtype, d);
  rotate_row<INVERSE>(v.rotation, row, row + dim, lane);
  for (int d = lane; d < dim; d += WARP) store_element(out, v.out_dtype, d, row[d]);
}

}  // namespace

void launch_rotate(const Vectors &v, cudaStream_t stream) {
  if (!v.count) return;
  int bytes = WARPS * 2 * v.rotation.dim * (int)sizeof(float);
  unsigned grid = (unsigned)ceil_div(v.count, WARPS);
  if (v.inverse)
    rotate<true><<<grid, WARPS * WARP, bytes, stream>>>(v);
  else
    rotate<false><<<grid, WARPS * WARP, bytes, stream>>>(v);
}

}  // namespace cuda
}  // namespace kvq
