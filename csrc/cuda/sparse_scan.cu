// sign_scores: a warp scores 128 tokens of one kv head for four rows (a query head and token each) at a time.
//
// Tensor cores count bits: rows of A are the signs of 16 tokens, 128 dims of them; the eight columns of B are two
// planes of four rows. Two products give all four planes, a third, of ones, the number of negative signs. Of 64 tokens
// lane 4 g + c holds tokens 8 g .. 8 g + 7 of row c, in product i those at 2 i and 2 i + 1, so that it stores them side
// by side. Signs of 128 dims come through shared memory with what scales them, 16 bytes a copy, one chunk ahead.
#include "rows.cuh"
#include "sparse.h"
#include "sparse_asm.cuh"

namespace kvq {
namespace cuda {

namespace {

constexpr int CHUNK = 128, PART = 64, WARPS = 4, ROWS = 4, STEP_WORDS = 4, CTAS = 6;
constexpr float EXACT = 8388608;  // 2^23: the float of a small count is its bits over those of 2^23

__device__ __forceinline__ float float_of_count(int x) { return __int_as_float(0x4B000000 | x) - EXACT; }

// Place of token 8 r + k among the rows of a chunk in shared memory, free of bank conflicts for loads at equal k.
__device__ __forceinline__ int slot_of(int token) { return token ^ (token >> 3 & 7); }

struct Place {
  int b, h, first;  // token of the chunk, counted from `start`
  __device__ __forceinline__ Place(const SignScan &s, int chunk, int chunks) {
    int head = chunk / chunks;
    first = (chunk - head * chunks) * CHUNK, b = head / (int)s.heads, h = head - b * (int)s.heads;
  }
};

__device__ __forceinline__ const uint32_t *signs_at(const SignScan &s, const Place &at) {
  const SignIndex &x = s.index;
  return x.sign + at.b * x.sign_stride[0] + at.h * x.sign_stride[1] + (s.start + at.first) * x.sign_stride[2];
}

// A chunk in shared memory: signs of its tokens, factors, biases.
constexpr int HALF_UNITS = CHUNK / 8, FACTORS = CHUNK, BIASES = FACTORS + HALF_UNITS, CHUNK_UNITS = BIASES + HALF_UNITS;

// Eight halves as one copy, or one after another where `count` are left or they are not aligned.
__device__ __forceinline__ void stage_halves(uint4 *shared, const uint16_t *x, int count) {
  if (count >= 8 && (uintptr_t)x % 16 == 0) return copy_async<16>(shared, x);
  for (int i = 0; i < 8; i++) ((uint16_t *)shared)[i] = i < count ? x[i] : 0;
}

__device__ __forceinline__ void stage(const SignScan &s, const Place &at, uint4 *shared, int lane) {
  const uint32_t *signs = signs_at(s, at);
  const SignIndex &x = s.index;
#pragma unroll
  for (int j = 0; j < CHUNK / WARP; j++) {
    int token = lane + WARP * j;
    if (at.first + token < s.tokens) copy_async<16>(shared + slot_of(token), signs + token * x.sign_stride[2]);
  }
  int unit = lane % HALF_UNITS, first = at.first + 8 * unit;
  if (lane < HALF_UNITS)
    stage_halves(shared + FACTORS + unit,
                 x.factor + at.b * x.factor_stride[0] + at.h * x.factor_stride[1] + s.start + first,
                 (int)s.tokens - first);
  else if (x.bias)
    stage_halves(shared + BIASES + unit, x.bias + at.b * x.bias_stride[0] + at.h * x.bias_stride[1] + s.start + first,
                 (int)s.tokens - first);
}

// Eight halves from x on, of which `count` are there, two a word.
__device__ __forceinline__ void load_halves(uint32_t (&to)[4], const uint16_t *x, int count) {
  if (count >= 8 && (uintptr_t)x % 16 == 0) {
    uint4 all = __ldg((const uint4 *)x);
    to[0] = all.x, to[1] = all.y, to[2] = all.z, to[3] = all.w;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t low = 2 * i < count ? x[2 * i] : 0, high = 2 * i + 1 < count ? x[2 * i + 1] : 0;
    to[i] = low | high << 16;
  }
}

__device__ __forceinline__ void staged_halves(uint32_t (&to)[4], const uint4 &from) {
  to[0] = from.x, to[1] = from.y, to[2] = from.z, to[3] = from.w;
}

__device__ __forceinline__ float2 floats_of_halves(uint32_t pair) { return __half22float2(*(const __half2 *)&pair); }

// Scores of tokens 2 i and 2 i + 1 of a lane's eight, kept until all are there.
template <class Out>
struct Scores;
template <>
struct Scores<__half> {
  uint32_t kept[4];
  __device__ __forceinline__ void put(int i, float x, float y) {
    __half2 pair = __floats2half2_rn(x, y);
    kept[i] = *(uint32_t *)&pair;
  }
  __device__ __forceinline__ void store(__half *to, int count) const {
    int offset = (int)((uintptr_t)to % 16);
    if (count >= 8 && offset == 0) {
      *(uint4 *)to = make_uint4(kept[0], kept[1], kept[2], kept[3]);
      return;
    }
    if (count >= 8 && offset % 4 == 0) {
#pragma unroll
      for (int i = 0; i < 4; i++) ((uint32_t *)to)[i] = kept[i];
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (i < count) ((uint16_t *)to)[i] = (uint16_t)(kept[i / 2] >> (16 * (i & 1)));
  }
};
template <>
struct Scores<float> {
  float kept[8];
  __device__ __forceinline__ void put(int i, float x, float y) { kept[2 * i] = x, kept[2 * i + 1] = y; }
  __device__ __forceinline__ void store(float *to, int count) const {
    if (count >= 8 && (uintptr_t)to % 16 == 0) {
      ((float4 *)to)[0] = make_float4(kept[0], kept[1], kept[2], kept[3]);
      ((float4 *)to)[1] = make_float4(kept[4], kept[5], kept[6], kept[7]);
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (i < count) to[i] = kept[i];
  }
};

// Word `word` of plane `plane` of row `row`, 0 where there is none.
__device__ __forceinline__ uint32_t plane_word(const SignScan &s, const Place &at, int row, int plane, int word) {
  if (row >= s.group * s.queries || word * WORD_BITS >= s.dim) return 0;
  const QueryCode &c = s.code;
  int head = row / (int)s.queries, m = row - head * (int)s.queries;
  return __ldg(c.planes + at.b * c.plane_stride[0] + (at.h * s.group + head) * c.plane_stride[1] +
               m * c.plane_stride[2] + plane * c.plane_stride[3] + word);
}

// Signs of tokens first + 2 i and the next of each g, then of the next two: fragments of two products.
template <bool STAGED>
__device__ __forceinline__ void load_signs(uint32_t (&a)[4], const SignScan &s, const Place &at, const uint4 *shared,
                                           int first, int i, int word, int lane) {
  if constexpr (STAGED) {
    load_straight(a, shared + slot_of(first + 8 * (lane & 7) + 2 * i + (lane >> 3)));
  } else {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int token = first + 8 * (lane >> 2) + 2 * i + j;
      bool there = at.first + token < s.tokens && word * WORD_BITS < s.dim;
      a[j] = there ? __ldg(signs_at(s, at) + token * s.index.sign_stride[2] + word) : 0;
    }
  }
}

template <class Out, bool STAGED>
__device__ __forceinline__ void score_rows(const SignScan &s, const Place &at, const uint4 *shared, int first,
                                           int first_row, const uint32_t (&factor)[4], const uint32_t (&bias)[4],
                                           int count, int lane) {
  int g = lane >> 2, c = lane & 3, row = first_row + c;
  bool used = row < s.group * s.queries;
  int head = used ? row / (int)s.queries : 0, m = used ? row - head * (int)s.queries : 0;
  int64_t hq = at.h * s.group + head;
  const float *terms =
      s.code.terms + at.b * s.code.term_stride[0] + hq * s.code.term_stride[1] + m * s.code.term_stride[2];
  float delta = __ldg(terms), low = __ldg(terms + 1), total = __ldg(terms + 2), base = __ldg(terms + 3);
  uint32_t planes[2];
  planes[0] = plane_word(s, at, first_row + (g >> 1), g & 1, c),
  planes[1] = plane_word(s, at, first_row + (g >> 1), 2 + (g & 1), c);
  Scores<Out> scores;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    int inner[2][2][4] = {}, ones[2][4] = {};
    for (int word = c; word == c || (!STAGED && (word - c) * WORD_BITS < s.dim); word += STEP_WORDS) {
      uint32_t a[4];
      load_signs<STAGED>(a, s, at, shared, first, i, word, lane);
      if (!STAGED && word != c)
        for (int p = 0; p < 2; p++) planes[p] = plane_word(s, at, first_row + (g >> 1), 2 * p + (g & 1), word);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        mma_bits(inner[j][0], a[2 * j], a[2 * j + 1], planes[0]);
        mma_bits(inner[j][1], a[2 * j], a[2 * j + 1], planes[1]);
        mma_bits(ones[j], a[2 * j], a[2 * j + 1], ~0u);
      }
    }
    if (!STAGED && s.dim > STEP_WORDS * WORD_BITS)
      for (int p = 0; p < 2; p++) planes[p] = plane_word(s, at, first_row + (g >> 1), 2 * p + (g & 1), c);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      float2 by = floats_of_halves(factor[i + j]), add = floats_of_halves(bias[i + j]);
      float y[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int *u = inner[j][0] + 2 * r, *v = inner[j][1] + 2 * r;
        float ip = float_of_count(u[0] + 2 * u[1] + 4 * v[0] + 8 * v[1]), pop = float_of_count(ones[j][2 * r]);
        float x = __fadd_rn(__fmul_rn(low, fmaf(-2, pop, (float)s.dim)), __fmul_rn(delta, fmaf(-2, ip, total)));
        x = __fmul_rn(x, r ? by.y : by.x);
        if (s.index.bias) x = __fadd_rn(x, __fmul_rn(s.scale, r ? add.y : add.x));
        y[r] = __fadd_rn(x, base);
      }
      scores.put(i + j, y[0], y[1]);
    }
  }
  if (!used) return;
  Out *out = (Out *)s.out.data + at.b * s.out.stride[0] + hq * s.out.stride[1] + m * s.out.stride[2] + at.first +
             first + 8 * g;
  scores.store(out, count);
}

template <class Out, bool STAGED>
__global__ void __launch_bounds__(WARPS *WARP, STAGED ? CTAS : 4)
    sign_scores(const __grid_constant__ SignScan s, int chunks, int num_chunks) {
  extern __shared__ uint4 memory[];
  int lane = lane_id(), warp = warp_id(), rows = (int)(s.group * s.queries);
  uint4 *shared = memory + warp * 2 * CHUNK_UNITS;
  int64_t workers = (int64_t)gridDim.x * WARPS, worker = (int64_t)blockIdx.x * WARPS + warp;
  int chunk = (int)(worker * num_chunks / workers), stop = (int)((worker + 1) * num_chunks / workers);
  if (STAGED && chunk < stop) stage(s, Place(s, chunk, chunks), shared, lane);
  if (STAGED) close_copies();
  for (int buffer = 0; chunk < stop; chunk++, buffer ^= 1) {
    Place at(s, chunk, chunks);
    const SignIndex &x = s.index;
    const uint4 *staged = shared + buffer * CHUNK_UNITS;
    const uint16_t *factors = x.factor + at.b * x.factor_stride[0] + at.h * x.factor_stride[1] + s.start + at.first;
    const uint16_t *biases = x.bias + at.b * x.bias_stride[0] + at.h * x.bias_stride[1] + s.start + at.first;
    if (STAGED) {
      if (chunk + 1 < stop) stage(s, Place(s, chunk + 1, chunks), shared + (buffer ^ 1) * CHUNK_UNITS, lane);
      close_copies();
      wait_copy_groups<1>();
      __syncwarp();
    }
#pragma unroll 1
    for (int part = 0; part < CHUNK; part += PART) {
      int first = part + 8 * (lane >> 2), count = max(min((int)s.tokens - at.first - first, 8), 0);
      uint32_t factor[4], bias[4] = {};
      if (STAGED) {
        staged_halves(factor, staged[FACTORS + first / 8]);
        if (x.bias) staged_halves(bias, staged[BIASES + first / 8]);
      } else {
        load_halves(factor, factors + first, count);
        if (x.bias) load_halves(bias, biases + first, count);
      }
      for (int row = 0; row < rows; row += ROWS)
        score_rows<Out, STAGED>(s, at, staged, part, row, factor, bias, count, lane);
    }
    __syncwarp();  // before the copies of the chunk after the next
  }
}

template <class Out>
void launch(const SignScan &s, int num_multiprocessors, cudaStream_t stream) {
  int chunks = (int)ceil_div(s.tokens, CHUNK);
  int64_t num_chunks = chunks * s.batch * s.heads, ctas = ceil_div(num_chunks, WARPS),
          most = (int64_t)num_multiprocessors * CTAS;
  unsigned grid = (unsigned)(ctas < most ? ctas : most);
  const SignIndex &x = s.index;
  bool whole = s.dim > 96 && s.dim <= 128 && (uintptr_t)x.sign % 16 == 0;
  for (int64_t stride : x.sign_stride) whole = whole && stride % 4 == 0;
  if (whole)
    sign_scores<Out, true><<<grid, WARPS * WARP, WARPS * 2 * CHUNK_UNITS * 16, stream>>>(s, chunks, (int)num_chunks);
  else
    sign_scores<Out, false><<<grid, WARPS * WARP, 0, stream>>>(s, chunks, (int)num_chunks);
}

}  // namespace

void launch_sign_scores(const SignScan &s, int num_multiprocessors, cudaStream_t stream) {
  if (!(s.batch * s.heads * s.group * s.queries * s.tokens)) return;
  if (s.out.dtype == FLOAT16)
    launch<__half>(s, num_multiprocessors, stream);
  else
    launch<float>(s, num_multiprocessors, stream);
}

}  // namespace cuda
}  // namespace kvq
