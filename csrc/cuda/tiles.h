// Attention of any shape in tiles (attend, qk, pv): what the host plans and the kernels share.
//
// A CTA takes a block of rows of one key/value head and one split of its packed or of its exact tokens, a tile of 32 or
// 64 tokens at a time: the tile is unpacked to halves in shared memory, multiplied by tensor cores, and forgotten.
// Queries are prepared once a call (prepare.cu), the splits are added up once a row (finish.cu).
//
// A word of 32 codes unfolds into four phases of eight: place p of a tile holds code 4 (p % 8) + p % 32 / 8 of its
// word. Coordinates of packed keys and rotated queries, and packed tokens wherever a tile has them side by side, lie in
// places.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "structs.h"

namespace kvq {
namespace cuda {
namespace tiles {

__host__ __device__ constexpr int code_of(int place) { return (place & ~31) + 4 * (place & 7) + (place >> 3 & 3); }
__host__ __device__ constexpr int place_of(int code) { return (code & ~31) + 8 * (code & 3) + (code >> 2 & 7); }

// Where byte k of the low parts of a row lies: the four of 16 that a lane multiplies side by side.
__host__ __device__ constexpr int low_place(int k) { return (k & ~15) + 4 * (k % 8 / 2) + k % 2 + 2 * (k / 8 % 2); }

enum Mode { ATTEND, SCORES, SUMS };            // attend, qk, pv
enum MaskKind : uint8_t { MIXED, ALL, NONE };  // of the rows and tokens of a tile: which are attended
constexpr int MASK_QUERIES = 64;               // query tokens that share one kind

// A prepared row: queries are stored over their units, powers of two that bring the largest coordinate to 128 .. 256.
struct RowInfo {
  float rotated_unit, bias, rotated_square, plain_unit;  // bias q . centre, square |R (q * balance)|^2
};

struct Plan {
  Attention a;
  // [flat rows, query_pad]: R (q * balance) in places, and q as it is; null if not needed. The low parts are what is
  // left when they are rounded to halves: halves if precise, else those of the rotated alone, as upper bytes of halves.
  __half *rotated, *plain;
  void *rotated_low, *plain_low;
  int query_pad;  // D rounded up to 32
  RowInfo *info;  // [flat rows]
  // [mask_batches, mask_heads, mask_blocks, num_tiles] or null; packed tiles first. Sizes are 1 where the mask
  // broadcasts.
  MaskKind *mask_kinds;
  int mask_batches, mask_heads, mask_blocks;
  float two_by_cap;  // 2 / softcap
  int tile_len, packed_tiles, num_tiles, split_tiles;
  bool precise;
  bool gapless_keys, gapless_values;  // words of a head lie side by side, aligned to 16 bytes
  bool quads_keys, quads_values;      // rows of exact tokens are aligned to four elements
};

// A kernel for blocks of `rows` rows, of which `blocks` fit a multiprocessor.
struct Kernel {
  int rows, tile_len, blocks;
  bool precise;
  int (*shared_bytes)(const Plan &);
  void (*launch)(const Plan &, cudaStream_t);
};

struct Kernels {
  const Kernel *first;
  int count;  // in ascending order of rows
};
extern const Kernels attend_kernels_64, attend_kernels_128, attend_kernels_256, attend_kernels_512;
extern const Kernels precise_kernels_128, precise_kernels_512, score_kernels, sum_kernels_128, sum_kernels_512;

// tiles_plan.cpp
// The kernel with the fewest rows a CTA that hold all, or with the most that fit the shared memory.
const Kernel &choose_kernel(const Attention &a, Mode mode, int multiprocessors, int shared_bytes);
// The plan of a problem and the bytes of scratch that place_scratch shares out.
Plan make_plan(const Attention &a, const Kernel &kernel, Mode mode, int multiprocessors);
int64_t place_scratch(Plan &plan, Mode mode, char *memory);
// Query tokens of one part of a long call: as many as keep its scratch below 512 MB, at least one.
int64_t part_queries(const Attention &a, const Kernel &kernel, Mode mode, int multiprocessors);
// The problem of query tokens first .. first + count alone.
Attention part_of(const Attention &a, int64_t first, int64_t count);

void launch_prepare(const Plan &, cudaStream_t);     // prepare.cu
void launch_mask_kinds(const Plan &, cudaStream_t);  // tiles_mask.cu

}  // namespace tiles

// Sums the splits of every row, turns packed sums back, and writes out and lse; finish.cu. Reads of `a`
//   partial [batch * heads * row_blocks * splits, row_block, value_dim] float32: sums of weights times values, those of
//           packed splits before R^T, balance and centre; not read where the state's maximum is -inf
//   state   [.., row_block, 2]: the maximum of the row's logits times log2(e) (0 without normalise), and the sum of the
//           weights 2^(logit log2(e) - maximum)
// with splits = packed_splits + exact_splits, packed ones first.
void launch_finish(const Attention &a, cudaStream_t stream);

}  // namespace cuda
}  // namespace kvq
