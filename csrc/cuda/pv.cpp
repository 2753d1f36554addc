// pv: weighted sum of the values of every token.
#include "tiles_run.h"

namespace kvq {
namespace cuda {

namespace {

void pv(const Tensor &p, const Tensors &values, const Tensor &exact_values, int64_t length, int64_t num_sinks,
        const Tensor &out) {
  Call call("p", p);
  tiles::run(call, pv_problem(p, values, exact_values, length, num_sinks, out), tiles::SUMS);
  call.check("pv");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CUDA, m) { m.impl("pv", TORCH_BOX(&pv)); }

}  // namespace cuda
}  // namespace kvq
