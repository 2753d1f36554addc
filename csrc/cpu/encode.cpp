// encode: centre, balance, rotate, quantise and pack in one pass over x. A task is one block of 32 tokens of one head,
// on the grid of blocks of the store, so that a word of values is written by one task.
#include "problems.h"
#include "run.h"

namespace kvq {

namespace {

void encode(const Tensor &x, const Tensor &levels, const Tensor &centre, const Tensor &balance, const Tensor &signs,
            const Tensor &blocks, const Tensor &matrix, int64_t rule, bool along_tokens, int64_t start,
            const Tensor &sign, const Tensor &mag, const Tensor &scale) {
  Coding c =
      encode_problem(x, levels, centre, balance, signs, blocks, matrix, rule, along_tokens, start, sign, mag, scale);
  const Kernels &k = kernels();
  run_parallel(c.batch * c.heads * c.blocks, scratch_bytes(round_up(c.store.dim, TILE)), [&](int64_t i, char *scratch) {
    k.encode(c, i / c.blocks / c.heads, i / c.blocks % c.heads, i % c.blocks, scratch);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CPU, m) { m.impl("encode", TORCH_BOX(&encode)); }

}  // namespace kvq
