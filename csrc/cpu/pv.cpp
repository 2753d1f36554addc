// pv: weighted sum of the values of every token, by the second half of attend's tasks and its last phase.
#include "problems.h"
#include "run.h"

namespace kvq {

namespace {

void pv(const Tensor &p, const Tensors &values, const Tensor &exact_values, int64_t length, int64_t num_sinks,
        const Tensor &out) {
  Attention a = pv_problem(p, values, exact_values, length, num_sinks, out);
  const Kernels &k = kernels();
  run_phases(k, a, false, k.pv, true);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CPU, m) { m.impl("pv", TORCH_BOX(&pv)); }

}  // namespace kvq
