// attend: softmax attention on packed and exact tokens. Phases: queries to the rotated space (32 rows a task), partial
// results of every split, then their sum and one inverse rotation a row; the body is never rebuilt in memory.
#include "problems.h"
#include "run.h"

namespace kvq {

namespace {

void attend(const Tensor &q, const Tensors &keys, const Tensors &values, const Tensor &exact_keys,
            const Tensor &exact_values, const OptionalTensor &mask, const OptionalTensor &sink_logits, int64_t start,
            int64_t length, int64_t num_sinks, double scale, double softcap, const Tensor &out, const Tensor &lse) {
  Attention a = attend_problem(q, keys, values, exact_keys, exact_values, mask, sink_logits, start, length, num_sinks,
                               scale, softcap, out, lse);
  const Kernels &k = kernels(a.q.dtype);
  run_phases(k, a, true, k.attend, true);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CPU, m) { m.impl("attend", TORCH_BOX(&attend)); }

}  // namespace kvq
