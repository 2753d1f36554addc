#include "call.h"

namespace kvq {
namespace cuda {

namespace {

void merge(const Tensor &outs, const Tensor &lses, const Tensor &out, const Tensor &lse) {
  Call call("outs", outs);
  Pieces p = merge_problem(outs, lses, out, lse);
  call.check_grid("out", p.batch * p.heads * p.queries);
  launch_merge(p, call.stream());
  call.check("merge");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CUDA, m) { m.impl("merge", TORCH_BOX(&merge)); }

}  // namespace cuda
}  // namespace kvq
