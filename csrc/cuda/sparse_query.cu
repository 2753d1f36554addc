// quantise_query and index_keys: a warp a vector, element 32 w + lane of it in lane `lane`, so that a ballot is a word.
// Queries of 64, 128 and 256 dims are turned in registers, where lane l has elements N l .. N l + N - 1: all that is
// needed is asked for at once.
#include "decode_args.h"
#include "fixed_rotation.cuh"
#include "rotation.cuh"
#include "sparse.h"
#include "sparse_asm.cuh"

namespace kvq {
namespace cuda {

namespace {

constexpr int WARPS = 4, LANE_DIMS = 4, TOP_CODE = (1 << QUERY_BITS) - 1;
constexpr float HALF_MAX = 65504;

__device__ const float *vector_at(const HeadVectors &v, int64_t batch, int64_t head) {
  return v.data ? v.data + batch * v.stride[0] + head * v.stride[1] : nullptr;
}

__device__ float warp_min(float x) { return -warp_max(-x); }

// A query and what belongs to its head.
struct QueryRow {
  int64_t b, hq, m;
  const char *q;
  const float *query_centre, *centre, *balance;
  __device__ __forceinline__ QueryRow(const QueryCoding &c, uint32_t row) {
    uint32_t flat = row / (uint32_t)c.queries, heads = (uint32_t)(c.heads * c.group);
    m = row % (uint32_t)c.queries, b = flat / heads, hq = flat % heads;
    int64_t h = (uint32_t)hq / (uint32_t)c.group;
    q = row_at(c.q, b, hq, m), query_centre = vector_at(c.query_centre, b, h);
    centre = vector_at(c.centre, b, h), balance = vector_at(c.balance, b, h);
  }
};

// Codes of y [dim] in shared memory, a turned query, and its terms.
__device__ __forceinline__ void code_query(const QueryCoding &c, const QueryRow &row, const float *y, float base,
                                           int lane) {
  int dim = c.dim;
  float low = INFINITY, high = -INFINITY;
  bool finite = isfinite(base);
  for (int d = lane; d < dim; d += WARP)
    low = fminf(low, y[d]), high = fmaxf(high, y[d]), finite = finite && isfinite(y[d]);
  low = warp_min(low), high = warp_max(high), finite = __all_sync(ALL_LANES, finite);
  float delta = (high - low) / TOP_CODE;
  uint32_t *planes =
      c.code.planes + row.b * c.code.plane_stride[0] + row.hq * c.code.plane_stride[1] + row.m * c.code.plane_stride[2];
  int sum = 0;
  for (int word = 0; word * WORD_BITS < dim; word++) {
    int d = word * WORD_BITS + lane, code = 0;
    if (d < dim && finite && delta > 0) code = min(max((int)rintf((y[d] - low) / delta), 0), TOP_CODE);
    sum += code;
    for (int j = 0; j < QUERY_BITS; j++) {
      uint32_t bits = __ballot_sync(ALL_LANES, code >> j & 1);
      if (lane == j) planes[j * c.code.plane_stride[3] + word] = bits;
    }
  }
  float total = (float)__reduce_add_sync(ALL_LANES, sum);
  float values[4] = {c.scale * delta, c.scale * low, total, c.scale * base};
  float *terms =
      c.code.terms + row.b * c.code.term_stride[0] + row.hq * c.code.term_stride[1] + row.m * c.code.term_stride[2];
  float mine = lane == 0 ? values[0] : lane == 1 ? values[1] : lane == 2 ? values[2] : values[3];
  if (lane < 4) terms[lane] = finite ? mine : NAN;
}

// Queries of 32 N dims by rotations without a matrix, all of it aligned to 16 bytes.
template <int N>
__global__ void __launch_bounds__(WARPS *WARP)
    quantise_in_registers(const __grid_constant__ QueryCoding c, uint32_t count) {
  __shared__ __align__(16) float memory[WARPS][N * WARP];
  int lane = lane_id();
  uint32_t number = blockIdx.x * WARPS + warp_id();
  if (number >= count) return;
  QueryRow row(c, number);
  fixed::WarpRotation<N> rotation;
  float x[N], own[N], of_key[N], by[N], base = 0;
  wait_for_kernels_ahead(), let_next_kernel_begin();
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = load_element(row.q, c.q.dtype, N * lane + i);
  rotation.load(c.rotation, false, lane);
  if (row.query_centre) fixed::load_floats(own, row.query_centre + N * lane);
  if (row.centre) fixed::load_floats(of_key, row.centre + N * lane);
  if (row.balance) fixed::load_floats(by, row.balance + N * lane);
#pragma unroll
  for (int i = 0; i < N; i++) {
    if (row.centre) base = fmaf(x[i], of_key[i], base);
    if (row.query_centre) x[i] -= own[i];
    if (row.balance) x[i] *= by[i];
  }
  base = warp_sum(base);
  rotation.turn(x, c.rotation, false, lane);
  float *y = memory[warp_id()];
#pragma unroll
  for (int i = 0; i < N; i++) y[N * lane + i] = x[i];
  __syncwarp();
  code_query(c, row, y, base, lane);
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
  code_query(c, row, y, base, lane);
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

namespace {

bool in_units(const HeadVectors &v) { return aligned(v.data) && v.stride[0] % 4 == 0 && v.stride[1] % 4 == 0; }

// Whether all that is loaded before the queries may be read in units of 16 bytes.
bool fits_registers(const QueryCoding &c) {
  const Rotation &r = c.rotation;
  if (r.matrix || !aligned(r.signs) || !aligned(r.blocks)) return false;
  return in_units(c.query_centre) && in_units(c.centre) && in_units(c.balance);
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
