// merge: attention over the union of pieces from their outputs and log-sum-exps. One output row a task.
#include "problems.h"
#include "run.h"

namespace kvq {

namespace {

void merge(const Tensor &outs, const Tensor &lses, const Tensor &out, const Tensor &lse) {
  Pieces p = merge_problem(outs, lses, out, lse);
  const Kernels &k = kernels();
  run_parallel(p.batch * p.heads * p.queries, scratch_bytes(round_up(p.dim, TILE)),
               [&](int64_t i, char *scratch) { k.merge(p, i, scratch); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CPU, m) { m.impl("merge", TORCH_BOX(&merge)); }

}  // namespace kvq
