// The queries of one key/value head, rotated and cut into bytes: every CTA does this for itself while its first tiles
// are on their way.
#pragma once

#include "decode_exact.cuh"
#include "fixed_rotation.cuh"
#include "rows.cuh"

namespace kvq {
namespace cuda {

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// N words at an address that is a multiple of their size.
template <int N, class From>
__device__ __forceinline__ void load_words(uint32_t (&to)[N], const From *from) {
  if constexpr (N == 1) {
    to[0] = *(const uint32_t *)from;
  } else if constexpr (N == 2) {
    uint2 v = *(const uint2 *)from;
    to[0] = v.x, to[1] = v.y;
  } else {
    static_assert(N == 4, "one, two or four words");
    uint4 v = *(const uint4 *)from;
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }
}

template <int N, class To>
__device__ __forceinline__ void store_words(To *to, const uint32_t (&from)[N]) {
  if constexpr (N == 1)
    *(uint32_t *)to = from[0];
  else if constexpr (N == 2)
    *(uint2 *)to = make_uint2(from[0], from[1]);
  else
    *(uint4 *)to = make_uint4(from[0], from[1], from[2], from[3]);
}

// Row = group member * M + query token, of key/value head h of sequence b.
struct QueryPlace {
  int b, head, token;
  __device__ __forceinline__ QueryPlace(const DecodeArgs &a, int b, int h, int row) : b(b) {
    int queries = a.queries, member = queries == 1 ? row : row / queries;
    head = h * a.group + member, token = row - member * queries;
  }
  __device__ __forceinline__ int64_t at(const int *stride) const {
    return (int64_t)b * stride[0] + (int64_t)head * stride[1] + (int64_t)token * stride[2];
  }
};

template <class T>
__device__ __forceinline__ const T *query_of(const DecodeArgs &a, int b, int h, int row) {
  return (const T *)a.q.data + QueryPlace(a, b, h, row).at(a.q.stride);
}

__device__ __forceinline__ RowMask mask_of_row(const DecodeArgs &a, int b, int h, int row) {
  RowMask mask{nullptr, 0, a.mask_bytes == 1};
  if (!a.mask) return mask;
  mask.stride = a.mask_stride[3] * a.mask_bytes;
  mask.data = a.mask + a.mask_bytes * QueryPlace(a, b, h, row).at(a.mask_stride) + a.num_sinks * mask.stride;
  return mask;
}

// Bytes of a row from its rotated coordinates, `N` of lane: x [.., i] is coordinate first + i * stride.
template <int DIM, int N>
__device__ __forceinline__ void store_row(const float (&x)[N], int first, int stride, float bias, float scale,
                                          float step, int place, char *bytes, RowInfo *info, int lane) {
  using Q = QueryMap<DIM>;
  char *upper = bytes + place * Q::ROW_BYTES, *lower = upper + ROWS * Q::ROW_BYTES;
  uint32_t bits = 0;  // not negative, so ordered as integers are; a NaN is above all and makes the row's scores NaN
#pragma unroll
  for (int i = 0; i < N; i++) bits = max(bits, __float_as_uint(fabsf(x[i])));
  float most = __uint_as_float(__reduce_max_sync(~0u, bits));
  for (int o = 16; o; o >>= 1) bias += __shfl_xor_sync(~0u, bias, o);
  float inverse = most > 0 ? __fdividef(QUERY_TOP, most) : 0;
  int total = 0;
#pragma unroll
  for (int i = 0; i < N; i++) {
    int n = __float2int_rn(fminf(fmaxf(x[i] * inverse, -QUERY_TOP), QUERY_TOP)), high = (n + 128) >> 8;
    int at = Q::byte_of(first + i * stride);
    upper[at] = (char)high, lower[at] = (char)(n - 256 * high);
    total += n;
  }
  total = __reduce_add_sync(~0u, total);
  if (lane == 0) info[place] = {most * (1.0f / QUERY_TOP) * step * scale, bias * scale, total / 2};
}

// The queries of a CTA in shared memory: bytes [2 limbs][ROWS][ROW_BYTES], a row of floats a warp to rotate it in, what
// rows are besides their bytes, and the rows as they came, [ROWS][DIM + 8] against bank conflicts.
template <int DIM>
struct Queries {
  static constexpr int ROW = 2 * ROWS * QueryMap<DIM>::ROW_BYTES, INFO = ROW + 4 * WARPS * DIM;
  static constexpr int RAW = INFO + ROWS * (int)sizeof(RowInfo), BYTES = RAW + 2 * ROWS * (DIM + 8);
  char *bytes;
  float *rows;
  RowInfo *info;
  void *raw;
  __device__ __forceinline__ explicit Queries(char *memory)
      : bytes(memory), rows((float *)(memory + ROW)), info((RowInfo *)(memory + INFO)), raw(memory + RAW) {}
};

// One row of queries and its way to the bytes, by a warp; a row beyond the last is zero. `load` leaves what it reads as
// it is, so that other loads may follow before it has arrived.
template <class T, int DIM>
struct QueryRows {
  static constexpr int N = (DIM + 31) / 32;
  static constexpr bool IN_REGISTERS = DIM == 32 * fixed::largest_power(N) && DIM >= 64;
  const T *from;
  const float *centre, *balance;
  fixed::WarpRotation<IN_REGISTERS ? N : 2> rotation;
  float c[N], b[N];
  uint32_t pair[IN_REGISTERS ? N / 2 : 1];  // of the row's elements, where a lane's lie side by side
  T element[IN_REGISTERS ? 1 : N];
  bool valid;

  static __device__ __forceinline__ int dim_of(int i, int lane) { return IN_REGISTERS ? N * lane + i : lane + 32 * i; }
  static __device__ __forceinline__ bool in_row(int i, int lane) { return DIM % 32 == 0 || dim_of(i, lane) < DIM; }

  // Row `row` of head h, whose keys are those of `store_head`.
  __device__ __forceinline__ void place(const DecodeArgs &a, int sequence, int h, int store_head, int row,
                                        bool is_valid, int lane) {
    const StoreArgs &k = a.keys;
    int first = IN_REGISTERS ? N * lane : 0;
    valid = is_valid;
    from = query_of<T>(a, sequence, h, valid ? row : 0) + first;
    centre = k.centre + (int64_t)sequence * k.centre_stride[0] + store_head * k.centre_stride[1] + first;
    balance = k.balance + (int64_t)sequence * k.balance_stride[0] + store_head * k.balance_stride[1] + first;
    hold(from), hold(centre), hold(balance);
  }

  __device__ __forceinline__ void load(const DecodeArgs &a, int lane) {
    const StoreArgs &k = a.keys;
    if constexpr (IN_REGISTERS) {
      load_words(pair, from);
      if (!k.rotation.matrix) rotation.load(k.rotation, false, lane);
      if (k.centre) fixed::load_floats(c, centre);
      if (k.balance) fixed::load_floats(b, balance);
    } else {
#pragma unroll
      for (int i = 0; i < N; i++) {
        int d = in_row(i, lane) ? dim_of(i, lane) : 0;
        element[i] = from[d], c[i] = k.centre ? centre[d] : 0, b[i] = k.balance ? balance[d] : 1;
      }
    }
  }

  // The row in floats, also as it came to `raw`.
  __device__ __forceinline__ void read(float (&q)[N], T *raw, int lane) {
    if constexpr (IN_REGISTERS) {
#pragma unroll
      for (int i = 0; i < N; i += 2) {
        pair[i / 2] = valid ? pair[i / 2] : 0;
        float2 two = floats_of_pair<T>(pair[i / 2]);
        q[i] = two.x, q[i + 1] = two.y;
      }
      store_words(raw + N * lane, pair);
    } else {
#pragma unroll
      for (int i = 0; i < N; i++) {
        q[i] = valid && in_row(i, lane) ? float_of(element[i]) : 0;
        if (in_row(i, lane)) raw[dim_of(i, lane)] = valid ? element[i] : from_float<T>(0);
      }
    }
  }

  __device__ __forceinline__ void store(const DecodeArgs &a, float step, int place, int warp,
                                        const Queries<DIM> &queries, int lane) {
    float q[N], bias = 0, *x = queries.rows + warp * DIM;
    read(q, (T *)queries.raw + place * (DIM + 8), lane);
    if (a.keys.centre)
#pragma unroll
      for (int i = 0; i < N; i++) bias = fmaf(q[i], c[i], bias);
    if (a.keys.balance)
#pragma unroll
      for (int i = 0; i < N; i++) q[i] *= b[i];
    const Rotation &r = a.keys.rotation;
    bool turned = false;
    if constexpr (IN_REGISTERS)
      if (!r.matrix) rotation.turn(q, r, false, lane), turned = true;
    if (!turned) {
#pragma unroll
      for (int i = 0; i < N; i++)
        if (in_row(i, lane)) x[dim_of(i, lane)] = q[i];
      __syncwarp();
      fixed::rotate_row<DIM>(x, r, false, lane);
#pragma unroll
      for (int i = 0; i < N; i++) q[i] = in_row(i, lane) ? x[dim_of(i, lane)] : 0;
      __syncwarp();
    }
    constexpr int STRIDE = IN_REGISTERS ? 1 : 32;
    store_row<DIM>(q, dim_of(0, lane), STRIDE, bias, a.scale * LOG2E, step, place, queries.bytes, queries.info, lane);
  }
};

}  // namespace cuda
}  // namespace kvq
