// merge: attention over the union of pieces from their outputs and log-sum-exps. One output row a task.
#include "checks.h"

namespace kvq {

namespace {

void merge(const Tensor &outs, const Tensor &lses, const Tensor &out, const Tensor &lse) {
  Pieces p;
  KVQ_CHECK(outs.dim() == 5, "outs", "have 5 dims", text(outs));
  int64_t batch = outs.size(1), dim = outs.size(4);
  p.pieces = outs.size(0), p.heads = outs.size(2), p.queries = outs.size(3), p.dim = (int)dim;
  p.outs_dtype = dtype_of("outs", outs);
  KVQ_CHECK(outs.is_cpu() && (dim <= 1 || outs.stride(4) == 1), "outs", "be on the CPU with a contiguous last dim",
            text(outs));
  for (int i = 0; i < 4; i++) p.outs_stride[i] = outs.stride(i);
  p.outs = (const char *)outs.data_ptr();
  p.lses = floats_of("lses", lses, {p.pieces, batch, p.heads, p.queries}, p.lses_stride);
  p.out = dense_of("out", out, {batch, p.heads, p.queries, dim});
  p.lse = floats_of("lse", lse, {batch, p.heads, p.queries}, p.lse_stride);
  const Kernels &k = kernels();
  run_parallel(batch * p.heads * p.queries, scratch_bytes(round_up(dim, TILE)),
               [&](int64_t i, char *scratch) { k.merge(p, i, scratch); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CPU, m) { m.impl("merge", TORCH_BOX(&merge)); }

}  // namespace kvq
