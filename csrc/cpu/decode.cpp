// decode: rebuilds tokens of a store. A task is one block of 32 tokens of one head.
#include "problems.h"
#include "run.h"

namespace kvq {

namespace {

void decode(const Tensors &packed, bool along_tokens, int64_t start, const Tensor &out) {
  Coding c = decode_problem(packed, along_tokens, start, out);
  const Kernels &k = kernels();
  run_parallel(c.batch * c.heads * c.blocks, scratch_bytes(round_up(c.store.dim, TILE)), [&](int64_t i, char *scratch) {
    k.decode(c, i / c.blocks / c.heads, i / c.blocks % c.heads, i % c.blocks, scratch);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CPU, m) { m.impl("decode", TORCH_BOX(&decode)); }

}  // namespace kvq
