// encode: centre, balance, rotate, quantise and pack in one pass over x. A task is one block of 32 tokens of one head,
// on the grid of blocks of the store, so that a word of values is written by one task.
#include "checks.h"

namespace kvq {

namespace {

void encode(const Tensor &x, const Tensor &levels, const Tensor &centre, const Tensor &balance, const Tensor &signs,
            const Tensor &blocks, const Tensor &matrix, int64_t rule, bool along_tokens, int64_t start,
            const Tensor &sign, const Tensor &mag, const Tensor &scale) {
  Coding c;
  int64_t batch = size_at(x, 0), dim = size_at(x, 3);
  c.heads = size_at(x, 1), c.tokens = size_at(x, 2), c.start = start;
  c.x = dense_of("x", x, {-1, -1, -1, -1});
  KVQ_CHECK(start >= 0 && start <= INT64_MAX - c.tokens, "start", "be at least 0 and not overflow", start);
  KVQ_CHECK(rule >= 0 && rule < NUM_SCALE_RULES, "rule", "be an index of SCALE_RULES", rule);
  c.rule = (int)rule, c.along_tokens = along_tokens;
  c.store = store_of("store", {sign, mag, scale, levels, centre, balance, signs, blocks, matrix}, along_tokens, batch,
                     c.heads, start + c.tokens, dim);
  int64_t count = c.tokens ? ceil_div(start % TILE + c.tokens, TILE) : 0;
  const Kernels &k = kernels();
  run_parallel(batch * c.heads * count, scratch_bytes(round_up(dim, TILE)), [&](int64_t i, char *scratch) {
    k.encode(c, i / count / c.heads, i / count % c.heads, i % count, scratch);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CPU, m) { m.impl("encode", TORCH_BOX(&encode)); }

}  // namespace kvq
