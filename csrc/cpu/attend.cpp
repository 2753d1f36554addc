// attend: softmax attention on packed and exact tokens. Phases: queries to the rotated space (32 rows a task), partial
// results of every split, then their sum and one inverse rotation a row; the body is never rebuilt in memory.
#include "checks.h"

namespace kvq {

namespace {

void attend(const Tensor &q, const Tensors &keys, const Tensors &values, const Tensor &exact_keys,
            const Tensor &exact_values, const std::optional<Tensor> &mask, const std::optional<Tensor> &sink_logits,
            int64_t start, int64_t length, int64_t num_sinks, double scale, double softcap, const Tensor &out,
            const Tensor &lse) {
  Attention a{};
  a.length = length, a.start = start, a.num_sinks = num_sinks, a.exact_len = size_at(exact_keys, 2);
  a.scale = (float)scale, a.softcap = (float)softcap, a.normalise = true, a.shared = values.empty();
  int64_t batch = size_at(q, 0), heads = size_at(exact_keys, 1), dim = size_at(q, 3),
          value_dim = a.shared ? dim : size_at(exact_values, 3);
  check_heads(a, q, "q", heads);
  KVQ_CHECK(start >= 0 && start <= length, "start", "be from 0 to length", start);
  a.dim = (int)dim, a.value_dim = (int)value_dim;
  a.q = dense_of("q", q, {-1, -1, -1, -1});
  a.exact_keys = dense_of("exact_keys", exact_keys, {batch, heads, -1, dim});
  a.keys = store_of("keys", keys, false, batch, heads, length, dim);
  if (!a.shared) {
    a.exact_values = dense_of("exact_values", exact_values, {batch, heads, a.exact_len, value_dim});
    a.values = store_of("values", values, true, batch, heads, length, value_dim);
  }
  a.out = dense_of("out", out, {batch, q.size(1), q.size(2), value_dim});
  a.lse = floats_of("lse", lse, {batch, q.size(1), q.size(2)}, a.lse_stride);
  if (mask) a.mask = mask_of(*mask, {batch, q.size(1), q.size(2), length + a.exact_len});
  if (sink_logits) {
    int64_t stride;
    a.sink_logits = floats_of("sink_logits", *sink_logits, {q.size(1)}, &stride);
    KVQ_CHECK(sink_logits->is_contiguous(), "sink_logits", "be contiguous", "stride " + std::to_string(stride));
  }
  const Kernels &k = kernels(a.q.dtype);
  run_phases(k, a, true, k.attend, true);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CPU, m) { m.impl("attend", TORCH_BOX(&attend)); }

}  // namespace kvq
