// qk: unscaled scores of every token, by the first half of attend's tasks.
#include "problems.h"
#include "run.h"

namespace kvq {

namespace {

void qk(const Tensor &q, const Tensors &keys, const Tensor &exact_keys, int64_t length, int64_t num_sinks,
        const Tensor &out) {
  Attention a = qk_problem(q, keys, exact_keys, length, num_sinks, out);
  const Kernels &k = kernels();
  run_phases(k, a, true, k.qk, false);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CPU, m) { m.impl("qk", TORCH_BOX(&qk)); }

}  // namespace kvq
