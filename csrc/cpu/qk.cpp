// qk: unscaled scores of every token, by the first half of attend's tasks.
#include "checks.h"

namespace kvq {

namespace {

void qk(const Tensor &q, const Tensors &keys, const Tensor &exact_keys, int64_t length, int64_t num_sinks,
        const Tensor &out) {
  Attention a{};
  a.length = length, a.num_sinks = num_sinks, a.exact_len = size_at(exact_keys, 2);
  int64_t batch = size_at(q, 0), heads = size_at(exact_keys, 1), dim = size_at(q, 3);
  check_heads(a, q, "q", heads);
  a.dim = (int)dim;
  a.q = dense_of("q", q, {-1, -1, -1, -1});
  a.exact_keys = dense_of("exact_keys", exact_keys, {batch, heads, -1, dim});
  a.keys = store_of("keys", keys, false, batch, heads, length, dim);
  a.out = dense_of("out", out, {batch, q.size(1), q.size(2), length + a.exact_len});
  const Kernels &k = kernels();
  run_phases(k, a, true, k.qk, false);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CPU, m) { m.impl("qk", TORCH_BOX(&qk)); }

}  // namespace kvq
