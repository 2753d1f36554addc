// What the op files and the bodies share: the structs and one table of functions per instruction set. No torch, no std.
#pragma once

#include "structs.h"

namespace kvq {

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
};

// Scratch of one worker for head dims padded to `pad`: three tiles, words, bit columns, weights and two vectors.
static inline int64_t scratch_bytes(int64_t pad) {
  return 4 * (3 * TILE * pad + MAX_BITS * pad + TILE * MAX_BITS * (MAX_HEAD_DIM / WORD_BITS) + 2 * TILE * TILE + TILE +
              2 * pad);
}

extern const Kernels scalar_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
extern const Kernels avx512vnni_kernels;
#elif defined(__aarch64__)
extern const Kernels neon_kernels;
#endif

}  // namespace kvq
