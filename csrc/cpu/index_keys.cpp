// index_keys: centre, balance, rotate, and the signs and scalars of each key. A task is one block of 32 tokens of one
// head, on the grid of blocks of a store, so that the signs are those that encode gives.
#include "run.h"
#include "sparse_problems.h"

namespace kvq {

namespace {

void index_keys(const Tensor &x, const Tensor &query_centre, const Tensor &centre, const Tensor &balance,
                const Tensor &signs, const Tensor &blocks, const Tensor &matrix, int64_t start, const Tensor &sign,
                const Tensor &factor, const Tensor &bias) {
  Indexing n = index_keys_problem(x, query_centre, centre, balance, signs, blocks, matrix, start, sign, factor, bias);
  const Kernels &k = kernels();
  run_parallel(n.batch * n.heads * n.blocks, scratch_bytes(round_up(n.dim, TILE)), [&](int64_t i, char *scratch) {
    k.index_keys(n, i / n.blocks / n.heads, i / n.blocks % n.heads, i % n.blocks, scratch);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CPU, m) { m.impl("index_keys", TORCH_BOX(&index_keys)); }

}  // namespace kvq
