// sign_scores: sparse_words_scan.cuh, and here what takes any head dim and alignment.
//
// Tensor cores count bits: rows of A are the signs of 16 tokens, 128 dims of them; the eight columns of B are two
// planes of four rows. Two products give all four planes, a third, of ones, the number of negative signs. Of 64 tokens
// lane 4 g + c holds tokens 8 g .. 8 g + 7 of row c, in product i those at 2 i and 2 i + 1.
#include "sparse_words_scan.cuh"

namespace kvq {
namespace cuda {

namespace {

constexpr int STEP_WORDS = 4, ANY_CTAS = 4;

// Eight halves from x on, of which `count` are there, two a word.
__device__ __forceinline__ void load_halves(uint32_t (&to)[4], const uint16_t *x, int count) {
  if (count >= 8 && (uintptr_t)x % 16 == 0) {
    uint4 all = *((const uint4 *)x);
    to[0] = all.x, to[1] = all.y, to[2] = all.z, to[3] = all.w;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t low = 2 * i < count ? x[2 * i] : 0, high = 2 * i + 1 < count ? x[2 * i + 1] : 0;
    to[i] = low | high << 16;
  }
}

// Word `word` of plane `plane` of row `row`, 0 where there is none.
__device__ __forceinline__ uint32_t plane_word(const SignScan &s, const ScanPlace &at, int row, int plane, int word) {
  if (row >= s.group * s.queries || word * WORD_BITS >= s.dim) return 0;
  const QueryCode &c = s.code;
  int head = row / (int)s.queries, m = row - head * (int)s.queries;
  return *(c.planes + at.b * c.plane_stride[0] + (at.h * s.group + head) * c.plane_stride[1] + m * c.plane_stride[2] +
           plane * c.plane_stride[3] + word);
}

// Signs of tokens first + 2 i and the next of each g, then of the next two: fragments of two products.
__device__ __forceinline__ void load_signs(uint32_t (&a)[4], const SignScan &s, const ScanPlace &at, int first, int i,
                                           int word, int lane) {
  const SignIndex &x = s.index;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    int token = at.first + first + 8 * (lane >> 2) + 2 * i + j;
    bool there = token < s.tokens && word * WORD_BITS < s.dim;
    a[j] = there ? *(x.sign + at.b * x.sign_stride[0] + at.h * x.sign_stride[1] + (s.start + token) * x.sign_stride[2] +
                     word)
                 : 0;
  }
}

template <class Out>
__device__ __forceinline__ void score_any_part(const SignScan &s, const ScanPlace &at, int first,
                                               const uint32_t (&factor)[4], const uint32_t (&bias)[4], int count,
                                               int lane) {
  int g = lane >> 2, c = lane & 3, row = at.first_row + c;
  bool used = row < s.group * s.queries;
  int head = used ? row / (int)s.queries : 0, m = used ? row - head * (int)s.queries : 0;
  int64_t hq = at.h * s.group + head;
  const float *terms =
      s.code.terms + at.b * s.code.term_stride[0] + hq * s.code.term_stride[1] + m * s.code.term_stride[2];
  float delta = *(terms), low = *(terms + 1), total = *(terms + 2), base = *(terms + 3);
  KeptScores<Out> scores;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    int inner[2][2][4] = {}, ones[2][4] = {};
    for (int word = c; (word - c) * WORD_BITS < s.dim; word += STEP_WORDS) {
      uint32_t a[4], planes[2];
      load_signs(a, s, at, first, i, word, lane);
      for (int p = 0; p < 2; p++) planes[p] = plane_word(s, at, at.first_row + (g >> 1), 2 * p + (g & 1), word);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        mma_bits(inner[j][0], a[2 * j], a[2 * j + 1], planes[0], inner[j][0]);
        mma_bits(inner[j][1], a[2 * j], a[2 * j + 1], planes[1], inner[j][1]);
        mma_bits(ones[j], a[2 * j], a[2 * j + 1], ~0u, ones[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
      float2 by = floats_of_pair<__half>(factor[i + j]), add = floats_of_pair<__half>(bias[i + j]);
      float y[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int *u = inner[j][0] + 2 * r, *v = inner[j][1] + 2 * r;
        float ip = (float)(u[0] + 2 * u[1] + 4 * v[0] + 8 * v[1]), pop = (float)ones[j][2 * r];
        float x = __fadd_rn(__fmul_rn(low, fmaf(-2, pop, (float)s.dim)), __fmul_rn(delta, fmaf(-2, ip, total)));
        x = __fmul_rn(x, r ? by.y : by.x);
        if (s.index.bias) x = __fadd_rn(x, __fmul_rn(s.scale, r ? add.y : add.x));
        y[r] = __fadd_rn(x, base);
      }
      scores.put(i + j, y[0], y[1]);
    }
  }
  if (!used || count <= 0) return;
  scores.store((Out *)s.out.data + at.b * s.out.stride[0] + hq * s.out.stride[1] + m * s.out.stride[2] + at.first +
                   first + 8 * g,
               count);
}

template <class Out>
__global__ void __launch_bounds__(SCAN_WARPS *WARP, ANY_CTAS)
    scan_any(const __grid_constant__ SignScan s, const __grid_constant__ ScanPlan plan) {
  int lane = lane_id(), chunk = plan.first_chunk(warp_id()), stop = plan.first_chunk(warp_id() + 1);
  const SignIndex &x = s.index;
  wait_for_kernels_ahead(), let_next_kernel_begin();
  for (; chunk < stop; chunk++) {
    ScanPlace at(s, plan, chunk);
    const uint16_t *factors = x.factor + at.b * x.factor_stride[0] + at.h * x.factor_stride[1] + s.start + at.first;
    const uint16_t *biases = x.bias + at.b * x.bias_stride[0] + at.h * x.bias_stride[1] + s.start + at.first;
#pragma unroll 1
    for (int part = 0; part < CHUNK; part += PART) {
      int first = part + 8 * (lane >> 2), count = max(min((int)s.tokens - at.first - first, 8), 0);
      uint32_t factor[4], bias[4] = {};
      load_halves(factor, factors + first, count);
      if (x.bias) load_halves(bias, biases + first, count);
      score_any_part<Out>(s, at, part, factor, bias, count, lane);
    }
  }
}

template <class Out>
void launch(const SignScan &s, int num_multiprocessors, cudaStream_t stream) {
  bool words = in_words(s);
  ScanPlan plan(s, num_multiprocessors, words ? SCAN_CTAS : ANY_CTAS);
  if (words)
    launch_behind(scan_words<Out>, dim3(plan.grid()), SCAN_WARPS * WARP, SCAN_WARPS * 2 * CHUNK_UNITS * 16, stream, s,
                  plan);
  else
    launch_behind(scan_any<Out>, dim3(plan.grid()), SCAN_WARPS * WARP, 0, stream, s, plan);
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
