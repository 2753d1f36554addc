// sign_scores of four words a token, 97 to 128 dims, which may be copied as 16 bytes: a warp scores 128 tokens of one kv
// head for four rows (a query head and token each) at a time.
//
// Tensor cores multiply bytes: rows of A are the signs of 16 tokens, of which every bit is a byte of its own in a mask,
// 1, 2, 4 or 8; columns of B are, for each of four rows, the codes of its dims and ones, times what makes all products
// with a sign 8 times the code. Sums start at the bits of 2^23, so that they are floats. Of 64 tokens lane 4 g + c has
// tokens 8 g .. 8 g + 7 of row c, in product i those at 2 i and 2 i + 1, so that it stores them side by side. Signs come
// through shared memory with what scales them, one chunk ahead.
#pragma once

#include "sparse_scan.cuh"

namespace kvq {
namespace cuda {

constexpr int SCAN_CTAS = 6, SCALED = 8;  // every product with a sign is so many times a code
constexpr int FLOAT_BITS_OF_2_23 = 0x4B000000;

// A chunk in shared memory: signs of its tokens, factors, biases; units of 16 bytes.
constexpr int HALF_UNITS = CHUNK / 8, FACTORS = CHUNK, BIASES = FACTORS + HALF_UNITS, CHUNK_UNITS = BIASES + HALF_UNITS;

// Place of token 8 r + k among the rows of a chunk in shared memory, free of bank conflicts for loads at equal k.
__device__ __forceinline__ int slot_of(int token) { return token ^ (token >> 3 & 7); }

// Eight halves as one copy, or one after another where `count` are left or they are not aligned.
__device__ __forceinline__ void stage_halves(uint4 *shared, const uint16_t *x, int count) {
  if (count >= 8 && (uintptr_t)x % 16 == 0) return copy_async<16>(shared, x);
  for (int i = 0; i < 8; i++) ((uint16_t *)shared)[i] = i < count ? x[i] : 0;
}

// Chunks of a head one after another, to shared memory.
struct ChunkSource {
  const uint32_t *signs;
  const uint16_t *factors, *biases;  // biases: null if absent

  __device__ __forceinline__ ChunkSource(const SignScan &s, const ScanPlace &at) {
    const SignIndex &x = s.index;
    signs = x.sign + at.b * x.sign_stride[0] + at.h * x.sign_stride[1] + s.start * x.sign_stride[2];
    factors = x.factor + at.b * x.factor_stride[0] + at.h * x.factor_stride[1] + s.start;
    biases = x.bias ? x.bias + at.b * x.bias_stride[0] + at.h * x.bias_stride[1] + s.start : nullptr;
  }
  __device__ __forceinline__ void stage(uint4 *shared, const SignScan &s, int first, int lane) const {
    int left = (int)s.tokens - first;
#pragma unroll
    for (int j = 0; j < CHUNK / WARP; j++) {
      int token = lane + WARP * j;
      if (token < left) copy_async<16>(shared + slot_of(token), signs + (first + token) * s.index.sign_stride[2]);
    }
    int unit = lane % HALF_UNITS, token = 8 * unit;
    if (lane < HALF_UNITS)
      stage_halves(shared + FACTORS + unit, factors + first + token, left - token);
    else if (biases)
      stage_halves(shared + BIASES + unit, biases + first + token, left - token);
  }
};

// Four rows: columns 2 r and 2 r + 1 of B are the codes of row r and ones. A lane has word c of column g, and the terms
// of row c.
struct ScanQueries {
  uint32_t codes[8];  // bit s of the bytes of a word
  float delta, low, total, base;
  bool used;
  int64_t head;
  int m;

  __device__ __forceinline__ ScanQueries(const SignScan &s, const ScanPlace &at, int lane) {
    int g = lane >> 2, c = lane & 3, row = at.first_row + (g >> 1);
    const QueryCode &code = s.code;
    uint32_t planes[QUERY_BITS] = {};
    if (row < s.group * s.queries) {
      int head = row / (int)s.queries, m = row - head * (int)s.queries;
      const uint32_t *from = code.planes + at.b * code.plane_stride[0] +
                             (at.h * s.group + head) * code.plane_stride[1] + m * code.plane_stride[2] + c;
#pragma unroll
      for (int j = 0; j < QUERY_BITS; j++) planes[j] = __ldg(from + j * code.plane_stride[3]);
    }
#pragma unroll
    for (int bit = 0; bit < 8; bit++) {
      uint32_t bytes = g & 1 ? 0x01010101u : 0;
      if (!(g & 1))
#pragma unroll
        for (int j = 0; j < QUERY_BITS; j++) bytes |= (planes[j] >> bit & 0x01010101u) << j;
      codes[bit] = bytes << (3 - bit % 4);
    }
    row = at.first_row + c, used = row < s.group * s.queries;
    int own = used ? row / (int)s.queries : 0;
    m = used ? row - own * (int)s.queries : 0, head = at.h * s.group + own;
    const float *terms = code.terms + at.b * code.term_stride[0] + head * code.term_stride[1] + m * code.term_stride[2];
    delta = __ldg(terms), low = __ldg(terms + 1), total = __ldg(terms + 2), base = __ldg(terms + 3);
  }
};

// Bits s and s + 4 of the bytes of a word, as bytes that are 0 or 2^s.
__device__ __forceinline__ void unfold_signs(uint32_t (&bytes)[8], uint32_t word) {
  uint32_t upper = word >> 4;
#pragma unroll
  for (int bit = 0; bit < 4; bit++)
    bytes[bit] = word & 0x01010101u << bit, bytes[4 + bit] = upper & 0x01010101u << bit;
}

// Scores of 64 tokens at `signs` in shared memory, to scores.put(i, of token 2 i, of token 2 i + 1 of this lane).
template <class Scores>
__device__ __forceinline__ void score_part(Scores &scores, const ScanQueries &q, const SignScan &s, const uint4 *signs,
                                           const uint4 &factors, const uint4 &biases, int lane) {
  const float exact = 8388608, negative_two = -2.0f / SCALED;  // 2^23
  const uint32_t factor[4] = {factors.x, factors.y, factors.z, factors.w},
                 bias[4] = {biases.x, biases.y, biases.z, biases.w};
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    uint32_t words[4];
    load_straight(words, signs + slot_of(8 * (lane & 7) + 2 * i + (lane >> 3)));
#pragma unroll
    for (int j = 0; j < 2; j++) {
      uint32_t first[8], second[8];
      unfold_signs(first, words[2 * j]), unfold_signs(second, words[2 * j + 1]);
      int sums[4] = {FLOAT_BITS_OF_2_23, FLOAT_BITS_OF_2_23, FLOAT_BITS_OF_2_23, FLOAT_BITS_OF_2_23};
#pragma unroll
      for (int bit = 0; bit < 8; bit += 2)
        mma_int8<false>(sums, first[bit], second[bit], first[bit + 1], second[bit + 1], q.codes[bit], q.codes[bit + 1],
                        sums);
      float2 by = floats_of_pair<__half>(factor[i + j]), add = floats_of_pair<__half>(bias[i + j]);
      float y[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float ip = __int_as_float(sums[2 * r]) - exact, pop = __int_as_float(sums[2 * r + 1]);
        float of_low = __fmul_rn(q.low, fmaf(negative_two, pop, (float)s.dim - negative_two * exact));
        float x = __fadd_rn(of_low, __fmul_rn(q.delta, fmaf(negative_two, ip, q.total)));
        x = __fmul_rn(x, r ? by.y : by.x);
        if (s.index.bias) x = __fadd_rn(x, __fmul_rn(s.scale, r ? add.y : add.x));
        y[r] = __fadd_rn(x, q.base);
      }
      scores.put(i + j, y[0], y[1]);
    }
  }
}

template <class Out>
__global__ void __launch_bounds__(SCAN_WARPS *WARP, SCAN_CTAS)
    scan_words(const __grid_constant__ SignScan s, const __grid_constant__ ScanPlan plan) {
  extern __shared__ uint4 memory[];
  int lane = lane_id(), warp = warp_id();
  uint4 *shared = memory + warp * 2 * CHUNK_UNITS;
  ScanPlace at(s, plan, plan.first_chunk(warp)), ahead = at;
  int left = plan.first_chunk(warp + 1) - plan.first_chunk(warp);
  wait_for_kernels_ahead();
  if (left <= 0) return;
  ScanQueries queries(s, at, lane);
  ChunkSource source(s, at);
  auto stage = [&](int buffer) {
    source.stage(shared + buffer * CHUNK_UNITS, s, ahead.first, lane);
    if (ahead.step(s, plan)) source = ChunkSource(s, ahead);
  };
  stage(0);
  close_copies();
  for (int buffer = 0; left > 0; left--, buffer ^= 1) {
    const uint4 *staged = shared + buffer * CHUNK_UNITS;
    if (left > 1) stage(buffer ^ 1);
    close_copies();
    wait_copy_groups<1>();
    __syncwarp();
    Out *out = (Out *)s.out.data + at.b * s.out.stride[0] + queries.head * s.out.stride[1] +
               queries.m * s.out.stride[2] + at.first + 8 * (lane >> 2);
#pragma unroll 1
    for (int part = 0; part < CHUNK; part += PART) {
      int unit = part / 8 + (lane >> 2), count = (int)s.tokens - at.first - 8 * unit;
      KeptScores<Out> scores;
      score_part(scores, queries, s, staged + part, staged[FACTORS + unit], staged[BIASES + unit], lane);
      if (queries.used && count > 0) scores.store(out + part, count);
    }
    __syncwarp();  // before the copies of the chunk after the next
    if (at.step(s, plan)) queries = ScanQueries(s, at, lane);
  }
}

}  // namespace cuda
}  // namespace kvq
