// What the op files and the bodies share: the structs and one table of functions per instruction set. No torch, no std.
#pragma once

#include "sparse_structs.h"

namespace kvq {

// What top_p_select keeps of a row: scores from `threshold` on; `total`: log-sum-exp of the row and its exact part.
struct RowCut {
  float threshold, total;
};

struct Kernels {
  const char *name;
  // Up to 32 vectors. `scratch` is scratch_bytes of memory of this worker, as in all that follow.
  void (*rotate)(const Rotation &, bool inverse, const char *const *x, Dtype, char *const *out, Dtype, int count,
                 char *scratch);
  // One block of 32 tokens of one head; `block` counts from the block of `start`.
  void (*encode)(const Coding &, int64_t batch, int64_t head, int64_t block, char *scratch);
  void (*decode)(const Coding &, int64_t batch, int64_t head, int64_t block, char *scratch);
  void (*prepare)(const Attention &, int64_t tile, char *scratch);  // 32 flat rows of queries
  // One task.
  void (*attend)(const Attention &, int64_t task, char *scratch);
  void (*qk)(const Attention &, int64_t task, char *scratch);
  void (*pv)(const Attention &, int64_t task, char *scratch);
  void (*finish)(const Attention &, int64_t tile, char *scratch);  // 32 flat rows of outputs
  void (*merge)(const Pieces &, int64_t row, char *scratch);       // one output row

  void (*quantise_query)(const QueryCoding &, int64_t tile, char *scratch);  // 32 rows, counted (batch, head, token)
  void (*index_keys)(const Indexing &, int64_t batch, int64_t head, int64_t block, char *scratch);
  void (*sign_scores)(const SignScan &, int64_t task, char *scratch);  // SCAN_LEN tokens of one head
  // One row; then one selection: the columns that its rows keep, as bits, or the largest share of each column.
  RowCut (*select_row)(const TopP &, int64_t row, char *scratch);
  void (*select_union)(const TopP &, const RowCut *rows, int64_t selection, uint32_t *kept, char *scratch);
  void (*select_shares)(const TopP &, const RowCut *rows, int64_t selection, float *shares, char *scratch);
  // One task; the attention is that of the selection, or a part of it.
  void (*qk_selected)(const Selected &, const Attention &, int64_t task, char *scratch);
  void (*attend_selected)(const Selected &, const Attention &, int64_t task, char *scratch);
};

constexpr int64_t SCAN_LEN = 1024;

// Scratch of one worker for head dims padded to `pad`: three tiles, words, bit columns, weights and two vectors.
static inline int64_t scratch_bytes(int64_t pad) {
  return 4 * (3 * TILE * pad + MAX_BITS * pad + TILE * MAX_BITS * (MAX_HEAD_DIM / WORD_BITS) + 2 * TILE * TILE + TILE +
              2 * pad);
}

// Scratch of select_row and what follows: three rows of columns, with room for a vector behind them.
static inline int64_t select_row_len(int64_t columns) { return round_up(columns, TILE) + TILE; }
static inline int64_t select_scratch_bytes(int64_t columns) { return 4 * 3 * select_row_len(columns); }

extern const Kernels scalar_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
extern const Kernels avx512vpopcnt_kernels;
extern const Kernels avx512vnni_kernels;
#elif defined(__aarch64__)
extern const Kernels neon_kernels;
#endif

}  // namespace kvq
