// decode: rebuilds tokens of a store. A task is one block of 32 tokens of one head.
#include "checks.h"

namespace kvq {

namespace {

void decode(const Tensors &packed, bool along_tokens, int64_t start, const Tensor &out) {
  Coding c;
  int64_t batch = size_at(out, 0), dim = size_at(out, 3);
  c.heads = size_at(out, 1), c.tokens = size_at(out, 2), c.start = start;
  c.x = dense_of("out", out, {-1, -1, -1, -1});
  KVQ_CHECK(start >= 0 && start <= INT64_MAX - c.tokens, "start", "be at least 0 and not overflow", start);
  c.along_tokens = along_tokens;
  c.store = store_of("packed", packed, along_tokens, batch, c.heads, start + c.tokens, dim);
  int64_t count = c.tokens ? ceil_div(start % TILE + c.tokens, TILE) : 0;
  const Kernels &k = kernels();
  run_parallel(batch * c.heads * count, scratch_bytes(round_up(dim, TILE)), [&](int64_t i, char *scratch) {
    k.decode(c, i / count / c.heads, i / count % c.heads, i % count, scratch);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CPU, m) { m.impl("decode", TORCH_BOX(&decode)); }

}  // namespace kvq
