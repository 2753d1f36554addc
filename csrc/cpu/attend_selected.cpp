// attend_selected: attention over the selected tokens, by attend's phases and tasks over the longest selection.
// All of it in float32, whatever the dtype of the query.
#include "run.h"
#include "selection.h"

namespace kvq {

namespace {

void attend_selected(const Tensor &q, const Tensors &keys, const Tensors &values, const Tensor &indices,
                     const Tensor &count, const OptionalTensor &mask, double scale, double softcap, const Tensor &out,
                     const Tensor &lse) {
  Selected s = attend_selected_problem(q, keys, values, indices, count, mask, scale, softcap, out, lse);
  int64_t most = check_selection(s.selection, s.attention.batch, s.tokens);
  // As sums of the packed part of attend, those of packed values are still to be rotated.
  (s.packed_values ? s.attention.length : s.attention.exact_len) = most;
  const Kernels &k = kernels();
  auto task = [&](const Attention &a, int64_t i, char *scratch) { k.attend_selected(s, a, i, scratch); };
  run_phases(k, s.attention, true, task, true);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CPU, m) { m.impl("attend_selected", TORCH_BOX(&attend_selected)); }

}  // namespace kvq
