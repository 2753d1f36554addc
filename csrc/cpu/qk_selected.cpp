// qk_selected: scores of the selected keys, by attend's tasks over the capacity of the selection.
#include "run.h"
#include "selection.h"

namespace kvq {

namespace {

void qk_selected(const Tensor &q, const Tensors &keys, const Tensor &indices, const Tensor &count, double scale,
                 const Tensor &out) {
  Selected s = qk_selected_problem(q, keys, indices, count, scale, out);
  check_selection(s.selection, s.attention.batch, s.tokens);
  s.attention.exact_len = s.selection.capacity;
  const Kernels &k = kernels();
  auto task = [&](const Attention &a, int64_t i, char *scratch) { k.qk_selected(s, a, i, scratch); };
  run_phases(k, s.attention, true, task, false);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CPU, m) { m.impl("qk_selected", TORCH_BOX(&qk_selected)); }

}  // namespace kvq
