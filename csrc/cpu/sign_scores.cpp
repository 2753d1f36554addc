// sign_scores: estimated logits from the signs of the keys. A task is SCAN_LEN tokens of one head, for all its rows.
#include "run.h"
#include "sparse_problems.h"

namespace kvq {

namespace {

void sign_scores(const Tensor &planes, const Tensor &terms, const Tensor &sign, const Tensor &factor,
                 const Tensor &bias, int64_t head_dim, double scale, int64_t start, const Tensor &out) {
  SignScan s = sign_scores_problem(planes, terms, sign, factor, bias, head_dim, scale, start, out);
  const Kernels &k = kernels();
  run_parallel(s.batch * s.heads * ceil_div(s.tokens, SCAN_LEN), scratch_bytes(round_up(s.dim, TILE)),
               [&](int64_t i, char *scratch) { k.sign_scores(s, i, scratch); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CPU, m) { m.impl("sign_scores", TORCH_BOX(&sign_scores)); }

}  // namespace kvq
