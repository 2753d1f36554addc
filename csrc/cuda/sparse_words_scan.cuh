// sign_scores of four words a token, an even number of dims from 98 to 128, which may be copied as 16 bytes: a warp
// scores 128 tokens of one kv head for four rows (a query head and token each) at a time.
//
// Tensor cores count bits: rows of A are the signs of 16 tokens; the eight columns of B are two planes of four rows.
// Two products give all four planes, a third, of ones, the number of negative signs. Of 64 tokens lane 4 g + c has
// tokens 8 g .. 8 g + 7 of row c, in product i those at 2 i and 2 i + 1, so that it stores them side by side. Signs
// come through shared memory with what scales them, one chunk ahead.
#pragma once

#include "sparse_scan.cuh"

namespace kvq {
namespace cuda {

constexpr int SCAN_CTAS = 6;

// A chunk in shared memory: signs of its tokens, factors, biases; units of 16 bytes.
constexpr int HALF_UNITS = CHUNK / 8, FACTORS = CHUNK, BIASES = FACTORS + HALF_UNITS, CHUNK_UNITS = BIASES + HALF_UNITS;

// Place of token 8 r + k among the rows of a chunk in shared memory, free of bank conflicts for loads at equal k.
__device__ __forceinline__ int slot_of(int token) { return token ^ (token >> 3 & 7); }

// Zeros in both chunks of a warp, where there are no biases.
__device__ __forceinline__ void clear_biases(const SignScan &s, uint4 *shared, int lane) {
  if (s.index.bias) return;
  for (int buffer = 0; buffer < 2; buffer++)
    if (lane < HALF_UNITS) shared[buffer * CHUNK_UNITS + BIASES + lane] = make_uint4(0, 0, 0, 0);
}

// What a lane copies of chunks that follow each other: four tokens, and factors or biases of eight.
struct ChunkSource {
  const uint32_t *signs;
  const uint16_t *halves;  // null if absent
  int left;                // tokens from the chunk's first one on

  __device__ __forceinline__ ChunkSource(const SignScan &s, const ScanPlace &at, int lane) {
    const SignIndex &x = s.index;
    signs = x.sign + at.b * x.sign_stride[0] + at.h * x.sign_stride[1] + (s.start + at.first + lane) * x.sign_stride[2];
    int64_t token = s.start + at.first + lane % HALF_UNITS * 8;
    if (lane < HALF_UNITS)
      halves = x.factor + at.b * x.factor_stride[0] + at.h * x.factor_stride[1] + token;
    else
      halves = x.bias ? x.bias + at.b * x.bias_stride[0] + at.h * x.bias_stride[1] + token : nullptr;
    left = (int)s.tokens - at.first;
  }
  // `shared` is the chunk's place.
  __device__ __forceinline__ void stage(uint4 *shared, const SignScan &s, int lane) const {
    int64_t stride = s.index.sign_stride[2] * WARP;
#pragma unroll
    for (int j = 0; j < CHUNK / WARP; j++)
      if (left >= CHUNK || lane + WARP * j < left)
        copy_async<16>(shared + slot_of(lane + WARP * j), signs + j * stride);
    uint4 *to = shared + FACTORS + lane;  // biases follow factors
    int count = left - lane % HALF_UNITS * 8;
    if (!halves) return;
    if (count >= 8 && (uintptr_t)halves % 16 == 0) return copy_async<16>(to, halves);
    for (int i = 0; i < 8; i++) ((uint16_t *)to)[i] = i < count ? halves[i] : 0;
  }
  // To the next chunk of the same head, if there is one.
  __device__ __forceinline__ bool step(const SignScan &s) {
    signs += CHUNK * s.index.sign_stride[2], left -= CHUNK;
    if (halves) halves += CHUNK;
    return left > 0;
  }
};

// A number x from 0 to 2^23, added to INTEGER, is the bits of the float ZERO + x: no conversion.
constexpr int INTEGER = 0x4B000000;
constexpr float ZERO = 8388608;

// Four rows: columns 2 r and 2 r + 1 of B are two planes of row r. A lane has word c of column g, and the terms of row
// c.
template <class Out>
struct ScanQueries {
  uint32_t planes[2];
  float delta, low, total, base;
  Out *out;  // of the chunk's first token 8 g; null without a row

  __device__ __forceinline__ ScanQueries(const SignScan &s, const ScanPlace &at, int lane) {
    int g = lane >> 2, c = lane & 3, row = at.first_row + (g >> 1), rows = (int)(s.group * s.queries);
    const QueryCode &code = s.code;
    planes[0] = planes[1] = 0;
    if (row < rows) {
      int head = s.queries == 1 ? row : row / (int)s.queries, m = row - head * (int)s.queries;
      const uint32_t *from = code.planes + at.b * code.plane_stride[0] +
                             (at.h * s.group + head) * code.plane_stride[1] + m * code.plane_stride[2] +
                             (g & 1) * code.plane_stride[3] + c;
      planes[0] = fresh(from), planes[1] = fresh(from + 2 * code.plane_stride[3]);
    }
    row = at.first_row + c, out = nullptr;
    bool used = row < rows;
    int own = !used ? 0 : s.queries == 1 ? row : row / (int)s.queries, m = used ? row - own * (int)s.queries : 0;
    int64_t head = at.h * s.group + own;
    const float *terms = code.terms + at.b * code.term_stride[0] + head * code.term_stride[1] + m * code.term_stride[2];
    delta = fresh(terms), low = fresh(terms + 1), total = fresh(terms + 2), base = fresh(terms + 3);
    if (used)
      out =
          (Out *)s.out.data + at.b * s.out.stride[0] + head * s.out.stride[1] + m * s.out.stride[2] + at.first + 8 * g;
  }
};

// Factors and scaled biases of a lane's eight tokens, two at a time.
struct HalfScaling {
  uint32_t factor[4], bias[4];
  float scale;
  __device__ __forceinline__ HalfScaling(const uint4 &f, const uint4 &b, float scale)
      : factor{f.x, f.y, f.z, f.w}, bias{b.x, b.y, b.z, b.w}, scale(scale) {}
  __device__ __forceinline__ float2 factors(int i) const { return floats_of_pair<__half>(factor[i]); }
  __device__ __forceinline__ float2 biases(int i) const {
    float2 x = floats_of_pair<__half>(bias[i]);
    return make_float2(__fmul_rn(scale, x.x), __fmul_rn(scale, x.y));
  }
};

// Where a lane begins to load signs of 64 tokens.
__device__ __forceinline__ int first_slot(int lane) { return slot_of(8 * (lane & 7) + (lane >> 3)); }

// Signs of 64 tokens in shared memory, loaded as they are needed; `slot` is the lane's first one.
struct SharedSigns {
  const uint4 *signs;
  int slot;
  // Those of tokens 2 i and more of each eight.
  __device__ __forceinline__ void load(uint32_t (&words)[4], int i) const {
    load_straight(words, signs + (slot ^ 2 * i));
  }
};

// The same in registers.
struct SignWords {
  uint32_t words[2][4];
  __device__ __forceinline__ SignWords(const uint4 *signs, int slot) {
    load_straight(words[0], signs + slot), load_straight(words[1], signs + (slot ^ 4));
  }
  __device__ __forceinline__ void load(uint32_t (&to)[4], int i) const {
#pragma unroll
    for (int j = 0; j < 4; j++) to[j] = words[i / 2][j];
  }
};

// Scores of 64 tokens to scores.put(i, of token 2 i, of token 2 i + 1 of this lane).
template <class Scores, class Queries, class Signs, class Scaling>
__device__ __forceinline__ void score_words(Scores &scores, const Queries &q, const SignScan &s, const Signs &signs,
                                            const Scaling &scaling) {
  const int none[4] = {}, bits[4] = {INTEGER, INTEGER, INTEGER, INTEGER};
  const float dim = (float)s.dim + 2 * ZERO;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    uint32_t words[4];
    signs.load(words, i);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      int low[4], high[4], ones[4];
      mma_bits(low, words[2 * j], words[2 * j + 1], q.planes[0], none);
      mma_bits(high, words[2 * j], words[2 * j + 1], q.planes[1], none);
      mma_bits(ones, words[2 * j], words[2 * j + 1], ~0u, bits);
      float2 by = scaling.factors(i + j), add = scaling.biases(i + j);
      float y[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float ip = (float)(low[2 * r] + 2 * low[2 * r + 1] + 4 * (high[2 * r] + 2 * high[2 * r + 1]));
        float of_low = __fmul_rn(q.low, fmaf(-2, __int_as_float(ones[2 * r]), dim));
        float x = __fadd_rn(of_low, __fmul_rn(q.delta, fmaf(-2, ip, q.total)));
        x = __fadd_rn(__fmul_rn(x, r ? by.y : by.x), r ? add.y : add.x);
        y[r] = __fadd_rn(x, q.base);
      }
      scores.put(i + j, y[0], y[1]);
    }
  }
}

template <class Scores, class Queries, class Scaling>
__device__ __forceinline__ void score_part(Scores &scores, const Queries &q, const SignScan &s, const uint4 *signs,
                                           int slot, const Scaling &scaling) {
  score_words(scores, q, s, SharedSigns{signs, slot}, scaling);
}

inline bool in_words(const SignScan &s) {
  bool good = s.dim > 96 && s.dim <= 128 && s.dim % 2 == 0 && (uintptr_t)s.index.sign % 16 == 0;
  for (int64_t stride : s.index.sign_stride) good = good && stride % 4 == 0;
  return good;
}

template <class Out>
__global__ void __launch_bounds__(SCAN_WARPS *WARP, SCAN_CTAS)
    scan_words(const __grid_constant__ SignScan s, const __grid_constant__ ScanPlan plan) {
  extern __shared__ uint4 memory[];
  int lane = lane_id(), warp = warp_id(), g = lane >> 2;
  uint4 *shared = memory + warp * 2 * CHUNK_UNITS;
  int chunk = plan.first_chunk(warp), left = plan.first_chunk(warp + 1) - chunk;
  clear_biases(s, shared, lane);
  wait_for_kernels_ahead(), let_next_kernel_begin();
  if (left <= 0) return;
  ScanPlace at(s, plan, chunk), ahead = at;
  ScanQueries<Out> queries(s, at, lane);
  ChunkSource source(s, ahead, lane);
  source.stage(shared, s, lane);
  close_copies();
  for (int buffer = 0; left > 0; left--, buffer ^= 1) {
    const uint4 *staged = shared + buffer * CHUNK_UNITS;
    if (left > 1) {
      if (!source.step(s)) ahead.next_rows(s, plan), source = ChunkSource(s, ahead, lane);
      source.stage(shared + (buffer ^ 1) * CHUNK_UNITS, s, lane);
    }
    close_copies();
    wait_copy_groups<1>();
    __syncwarp();
#pragma unroll
    for (int part = 0; part < CHUNK; part += PART) {
      int count = (int)s.tokens - at.first - part - 8 * g;
      KeptScores<Out> scores;
      score_part(scores, queries, s, staged + part, first_slot(lane),
                 HalfScaling(staged[FACTORS + part / 8 + g], staged[BIASES + part / 8 + g], s.scale));
      if (queries.out && count > 0) scores.store(queries.out + part, count);
    }
    __syncwarp();  // before the copies of the chunk after the next
    at.first += CHUNK;
    if (queries.out) queries.out += CHUNK;
    if (at.first >= s.tokens && left > 1) at = ahead, queries = ScanQueries<Out>(s, at, lane);  // of the next rows
  }
}

}  // namespace cuda
}  // namespace kvq
