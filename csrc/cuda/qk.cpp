// qk: unscaled scores of every token.
#include "tiles_run.h"

namespace kvq {
namespace cuda {

namespace {

void qk(const Tensor &q, const Tensors &keys, const Tensor &exact_keys, int64_t length, int64_t num_sinks,
        const Tensor &out) {
  Call call("q", q);
  tiles::run(call, qk_problem(q, keys, exact_keys, length, num_sinks, out), tiles::SCORES);
  call.check("qk");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CUDA, m) { m.impl("qk", TORCH_BOX(&qk)); }

}  // namespace cuda
}  // namespace kvq
