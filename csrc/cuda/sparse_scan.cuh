// What the kernels of sign_scores share: which chunks of tokens a warp scores, and how it keeps and stores scores.
#pragma once

#include "halves.cuh"
#include "rows.cuh"
#include "sparse.h"
#include "sparse_asm.cuh"

namespace kvq {
namespace cuda {

constexpr int CHUNK = 128, PART = 64, SCAN_WARPS = 4, SCAN_ROWS = 4;

// Chunks of 128 tokens, of each of which a warp scores four rows; those of a kv head and block of rows follow each
// other. Warps of all blocks of threads have an even share.
struct ScanPlan {
  int chunks, row_blocks, all;
  int64_t workers;
  ScanPlan(const SignScan &s, int num_multiprocessors, int ctas) {
    chunks = (int)ceil_div(s.tokens, CHUNK), row_blocks = (int)ceil_div(s.group * s.queries, SCAN_ROWS);
    all = (int)(chunks * s.batch * s.heads * row_blocks);
    int64_t blocks = ceil_div(all, SCAN_WARPS), most = (int64_t)num_multiprocessors * ctas;
    workers = (blocks < most ? blocks : most) * SCAN_WARPS;
  }
  unsigned grid() const { return (unsigned)(workers / SCAN_WARPS); }
  __device__ __forceinline__ int first_chunk(int warp) const {
    return (int)(((int64_t)blockIdx.x * SCAN_WARPS + warp) * all / workers);
  }
};

struct ScanPlace {
  int b, h, first_row, first;  // token of the chunk, counted from `start`
  __device__ __forceinline__ ScanPlace(int b, int h, int first) : b(b), h(h), first_row(0), first(first) {}
  __device__ __forceinline__ ScanPlace(const SignScan &s, const ScanPlan &plan, int chunk) {
    int item = chunk / plan.chunks, head = item / plan.row_blocks;
    first = (chunk - item * plan.chunks) * CHUNK, first_row = (item - head * plan.row_blocks) * SCAN_ROWS;
    b = head / (int)s.heads, h = head - b * (int)s.heads;
  }
  // To the first chunk of the next rows or head.
  __device__ __forceinline__ void next_rows(const SignScan &s, const ScanPlan &plan) {
    first = 0, first_row += SCAN_ROWS;
    if (first_row >= plan.row_blocks * SCAN_ROWS) first_row = 0, h++;
    if (h >= s.heads) h = 0, b++;
  }
};

// Scores of tokens 2 i and 2 i + 1 of a lane's eight, kept until all are there.
template <class Out>
struct KeptScores;
template <>
struct KeptScores<__half> {
  uint32_t kept[4];
  __device__ __forceinline__ void put(int i, float x, float y) { kept[i] = pair_of<__half>(x, y); }
  __device__ __forceinline__ void store(__half *to, int count) const {
    int offset = (int)((uintptr_t)to % 16);
    if (count >= 8 && offset == 0) {
      *(uint4 *)to = make_uint4(kept[0], kept[1], kept[2], kept[3]);
      return;
    }
    if (count >= 8 && offset % 8 == 0) {
      ((uint2 *)to)[0] = make_uint2(kept[0], kept[1]);
      ((uint2 *)to)[1] = make_uint2(kept[2], kept[3]);
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
struct KeptScores<float> {
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

}  // namespace cuda
}  // namespace kvq
