// The code of a query, by a warp: element 32 w + lane of it in lane `lane`, so that a ballot is a word. Queries of 64,
// 128 and 256 dims are turned in registers, where lane l has elements N l .. N l + N - 1: all that is needed is asked
// for at once.
#pragma once

#include "decode_args.h"
#include "fixed_rotation.cuh"
#include "rotation.cuh"
#include "sparse.h"
#include "sparse_asm.cuh"

namespace kvq {
namespace cuda {

constexpr int TOP_CODE = (1 << QUERY_BITS) - 1;

__device__ __forceinline__ const float *vector_at(const HeadVectors &v, int64_t batch, int64_t head) {
  return v.data ? v.data + batch * v.stride[0] + head * v.stride[1] : nullptr;
}

__device__ __forceinline__ float warp_min(float x) { return -warp_max(-x); }

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
__device__ __forceinline__ void code_query(const QueryCoding &c, const QueryRow &row, int dim, const float *y,
                                           float base, int lane) {
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

// The rotation of a query, whose signs of two rounds are loaded beforehand.
template <int N>
struct QueryRotation : fixed::WarpRotation<N> {
  float second[N];

  __device__ __forceinline__ void load(const Rotation &r, int lane) {
    fixed::WarpRotation<N>::load(r, false, lane);
    if (r.rounds > 1) fixed::load_floats(second, r.signs + N * WARP + N * lane);
  }
  __device__ __forceinline__ void turn(float (&x)[N], const Rotation &r, int lane) const {
    for (int k = 0; k < r.rounds; k++) {
      float later[N];
      if (k > 1) fixed::load_floats(later, r.signs + k * N * WARP + N * lane);
#pragma unroll
      for (int i = 0; i < N; i++) x[i] *= k == 0 ? this->sign[i] : k == 1 ? second[i] : later[i];
      fixed::hadamard<N>(x, lane);
    }
    if (this->blocks) this->turn_blocks(x, false, lane);
  }
};

// The code of query `number` of 32 N dims, behind the kernels ahead, by a rotation without a matrix, all of it aligned
// to 16 bytes. `y` [32 N] in shared memory is of this warp alone; `meanwhile` is done while loads are on their way.
template <int N, class Meanwhile>
__device__ __forceinline__ void quantise_row(const QueryCoding &c, uint32_t number, float *y, int lane,
                                             Meanwhile meanwhile) {
  QueryRow row(c, number);
  QueryRotation<N> rotation;
  float x[N], own[N], of_key[N], by[N], base = 0;
  wait_for_kernels_ahead();
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = load_element(row.q, c.q.dtype, N * lane + i);
  rotation.load(c.rotation, lane);
  if (row.query_centre) fixed::load_floats(own, row.query_centre + N * lane);
  if (row.centre) fixed::load_floats(of_key, row.centre + N * lane);
  if (row.balance) fixed::load_floats(by, row.balance + N * lane);
  meanwhile();
#pragma unroll
  for (int i = 0; i < N; i++) {
    if (row.centre) base = fmaf(x[i], of_key[i], base);
    if (row.query_centre) x[i] -= own[i];
    if (row.balance) x[i] *= by[i];
  }
  base = warp_sum(base);
  rotation.turn(x, c.rotation, lane);
#pragma unroll
  for (int i = 0; i < N; i++) y[N * lane + i] = x[i];
  __syncwarp();
  code_query(c, row, N * WARP, y, base, lane);
}

// Whether all that is loaded beside the queries may be read in units of 16 bytes, and the rotation is one of registers.
inline bool fits_registers(const QueryCoding &c) {
  auto in_units = [](const HeadVectors &v) { return aligned(v.data) && v.stride[0] % 4 == 0 && v.stride[1] % 4 == 0; };
  const Rotation &r = c.rotation;
  if (r.matrix || !aligned(r.signs) || !aligned(r.blocks)) return false;
  return in_units(c.query_centre) && in_units(c.centre) && in_units(c.balance);
}

}  // namespace cuda
}  // namespace kvq
