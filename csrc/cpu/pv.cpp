// pv: weighted sum of the values of every token, by the second half of attend's tasks and its last phase.
#include "checks.h"

namespace kvq {

namespace {

void pv(const Tensor &p, const Tensors &values, const Tensor &exact_values, int64_t length, int64_t num_sinks,
        const Tensor &out) {
  Attention a{};
  a.length = length, a.num_sinks = num_sinks, a.exact_len = size_at(exact_values, 2);
  int64_t batch = size_at(p, 0), heads = size_at(exact_values, 1), dim = size_at(exact_values, 3);
  check_heads(a, p, "p", heads);
  a.value_dim = (int)dim;
  a.p = dense_of("p", p, {-1, -1, -1, length + a.exact_len});
  a.exact_values = dense_of("exact_values", exact_values, {batch, heads, -1, dim});
  a.values = store_of("values", values, true, batch, heads, length, dim);
  a.out = dense_of("out", out, {batch, p.size(1), p.size(2), dim});
  const Kernels &k = kernels();
  run_phases(k, a, false, k.pv, true);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CPU, m) { m.impl("pv", TORCH_BOX(&pv)); }

}  // namespace kvq
