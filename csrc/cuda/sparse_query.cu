// quantise_query and index_keys: a warp a vector, sparse_query.cuh.
#include "sparse_query.cuh"

namespace kvq {
namespace cuda {

namespace {

constexpr int WARPS = 4, LANE_DIMS = 4;
constexpr float HALF_MAX = 65504;

template <int N>
__global__ void __launch_bounds__(WARPS *WARP)
    quantise_in_registers(const __grid_constant__ QueryCoding c, uint32_t count) {
  __shared__ __align__(16) float memory[WARPS][N * WARP];
  uint32_t number = blockIdx.x * WARPS + warp_id();
  if (number < count) quantise_row<N>(c, number, memory[warp_id()], lane_id(), [] { let_next_kernel_begin(); });
}

__global__ void __launch_bounds__(WARPS *WARP) quantise_query(const __grid_constant__ QueryCoding c, uint32_t count) {
  extern __shared__ float4 memory[];
  int lane = lane_id(), dim = c.dim;
  uint32_t number = blockIdx.x * WARPS + warp_id();
  if (number >= count) return;
  wait_for_kernels_ahead(), let_next_kernel_begin();
  float *y = (float *)memory + warp_id() * 2 * dim;
  QueryRow row(c, number);
  const char *q = row.q;
  const float *query_centre = row.query_centre, *centre = row.centre, *balance = row.balance;
  float base = 0;
  for (int first = lane; first < dim; first += LANE_DIMS * WARP) {
    float x[LANE_DIMS], own[LANE_DIMS], of_key[LANE_DIMS], by[LANE_DIMS];
    load_spread(x, q, c.q.dtype, first, dim);
    if (query_centre) load_spread_as(own, query_centre, first, dim);
    if (centre) load_spread_as(of_key, centre, first, dim);
    if (balance) load_spread_as(by, balance, first, dim);
#pragma unroll
    for (int j = 0; j < LANE_DIMS; j++) {
      if (centre) base = fmaf(x[j], of_key[j], base);
      if (query_centre) x[j] -= own[j];
      if (first + j * WARP < dim) y[first + j * WARP] = balance ? x[j] * by[j] : x[j];
    }
  }
  base = warp_sum(base);
  rotate_row<false>(c.rotation, y, y + dim, lane);
  code_query(c, row, dim, y, base, lane);
}

__device__ float within_half(float x) { return x > HALF_MAX ? HALF_MAX : x < -HALF_MAX ? -HALF_MAX : x; }

__global__ void __launch_bounds__(WARPS *WARP) index_keys(const __grid_constant__ Indexing n, uint32_t count) {
  extern __shared__ float4 memory[];
  int lane = lane_id(), dim = n.dim;
  uint32_t row = blockIdx.x * WARPS + warp_id();
  if (row >= count) return;
  float *y = (float *)memory + warp_id() * 2 * dim;
  uint32_t flat = row / (uint32_t)n.tokens;
  int64_t t = row % (uint32_t)n.tokens, b = flat / (uint32_t)n.heads, h = flat % (uint32_t)n.heads;
  const char *x = row_at(n.x, b, h, t);
  const float *query_centre = vector_at(n.query_centre, b, h), *centre = vector_at(n.centre, b, h);
  const float *balance = vector_at(n.balance, b, h);
  float bias = 0;
  for (int d = lane; d < dim; d += WARP) {
    float value = load_element(x, n.x.dtype, d);
    if (centre) value -= centre[d];
    if (query_centre) bias = fmaf(value, query_centre[d], bias);
    y[d] = balance ? value / balance[d] : value;
  }
  bias = warp_sum(bias);
  rotate_row<false>(n.rotation, y, y + dim, lane);
  const SignIndex &index = n.index;
  int64_t at = n.start + t;
  float total = 0, square = 0;
  for (int word = 0; word * WORD_BITS < dim; word++) {
    int d = word * WORD_BITS + lane;
    float value = d < dim ? y[d] : 0;
    total += fabsf(value), square = fmaf(value, value, square);
    uint32_t bits = __ballot_sync(ALL_LANES, value < 0);
    if (index.sign && lane == 0)
      index.sign[b * index.sign_stride[0] + h * index.sign_stride[1] + at * index.sign_stride[2] + word] = bits;
  }
  total = warp_sum(total), square = warp_sum(square);
  if (lane) return;
  float factor = total > 0 ? square / total : 0;
  ((__half *)index.factor)[b * index.factor_stride[0] + h * index.factor_stride[1] + at] =
      __float2half_rn(factor > HALF_MAX ? HALF_MAX : factor);
  if (n.query_centre.data)
    ((__half *)index.bias)[b * index.bias_stride[0] + h * index.bias_stride[1] + at] =
        __float2half_rn(within_half(bias));
}

}  // namespace

void launch_quantise_query(const QueryCoding &c, cudaStream_t stream) {
  int64_t count = c.batch * c.heads * c.group * c.queries;
  if (!count) return;
  dim3 grid((unsigned)ceil_div(count, WARPS));
  auto launch = [&](auto *kernel, int bytes) {
    launch_behind(kernel, grid, WARPS * WARP, bytes, stream, c, (uint32_t)count);
  };
  bool fits = fits_registers(c);
  if (fits && c.dim == 64)
    launch(quantise_in_registers<2>, 0);
  else if (fits && c.dim == 128)
    launch(quantise_in_registers<4>, 0);
  else if (fits && c.dim == 256)
    launch(quantise_in_registers<8>, 0);
  else
    launch(quantise_query, WARPS * 2 * c.dim * (int)sizeof(float));
}

void launch_index_keys(const Indexing &n, cudaStream_t stream) {
  int64_t count = n.batch * n.heads * n.tokens;
  int bytes = WARPS * 2 * n.dim * (int)sizeof(float);
  if (count) index_keys<<<(unsigned)ceil_div(count, WARPS), WARPS * WARP, bytes, stream>>>(n, (uint32_t)count);
}

}  // namespace cuda
}  // namespace kvq
