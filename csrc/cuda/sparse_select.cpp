#include "call.h"
#include "sparse.h"
#include "sparse_problems.h"

namespace kvq {
namespace cuda {

namespace {

void top_p_select(const Tensor &scores, const Tensor &exact_lse, const OptionalTensor &mask,
                  const OptionalTensor &candidates, double top_p, const Tensor &indices, const Tensor &count) {
  Call call("scores", scores);
  TopP p = top_p_select_problem(scores, exact_lse, mask, candidates, top_p, indices, count);
  int64_t heads = p.batch * p.selection.selections, rows = p.batch * p.query_heads * p.queries;
  KVQ_CHECK(p.columns < (int64_t)1 << 30, "scores", "have fewer than 2**30 columns", text(scores));
  KVQ_CHECK(heads < 1 << 16, "indices", "have fewer than 2**16 selections in all", text(indices));
  call.check_grid("scores", rows * ceil_div(p.columns, 1 << 12));
  if (!heads) return;
  if (!rows || !p.columns) {
    torch::stable::zero_(const_cast<Tensor &>(count));
    return;
  }
  int processors = call.num_multiprocessors();
  launch_top_p_select(p, processors, call.scratch(top_p_scratch_bytes(p, processors)), call.stream());
  call.check("top_p_select");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CUDA, m) { m.impl("top_p_select", TORCH_BOX(&top_p_select)); }

}  // namespace cuda
}  // namespace kvq
