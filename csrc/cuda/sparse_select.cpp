// top_p_select on CUDA devices, sign_scores and it in one, and these behind attention to exact tokens.
#include "attend_run.h"
#include "sparse.h"
#include "sparse_problems.h"

namespace kvq {
namespace cuda {

namespace {

void check_size(const Call &call, const TopP &p, const Tensor &scores, const Tensor &indices) {
  int64_t heads = p.batch * p.selection.selections, rows = p.batch * p.query_heads * p.queries;
  KVQ_CHECK(p.columns < (int64_t)1 << 30, "scores", "have fewer than 2**30 columns", text(scores));
  KVQ_CHECK(heads < 1 << 16, "indices", "have fewer than 2**16 selections in all", text(indices));
  call.check_grid("scores", rows * ceil_div(p.columns, 1 << 12));
}

void check_scan(const SignScan &s, const Tensor &sign) {
  KVQ_CHECK(s.index.sign || !s.tokens, "sign", "hold the tokens of scores", text(sign));
}

// Whether there is anything to select from; clears the count if there is not.
bool has_scores(const TopP &p, const Tensor &count) {
  bool some = p.batch * p.query_heads * p.queries * p.columns > 0;
  if (!some && p.batch * p.selection.selections > 0) torch::stable::zero_(const_cast<Tensor &>(count));
  return some;
}

void top_p_select(const Tensor &scores, const Tensor &exact_lse, const OptionalTensor &mask,
                  const OptionalTensor &candidates, double top_p, const Tensor &indices, const Tensor &count) {
  Call call("scores", scores);
  TopP p = top_p_select_problem(scores, exact_lse, mask, candidates, top_p, indices, count);
  check_size(call, p, scores, indices);
  if (!has_scores(p, count)) return;
  int processors = call.num_multiprocessors();
  launch_top_p_select(p, processors, call.scratch(top_p_scratch_bytes(p, processors)), call.stream());
  call.check("top_p_select");
}

void sign_top_p_select(const Tensor &planes, const Tensor &terms, const Tensor &sign, const Tensor &factor,
                       const Tensor &bias, int64_t head_dim, double scale, int64_t start, const Tensor &exact_lse,
                       double top_p, const Tensor &scores, const Tensor &indices, const Tensor &count) {
  Call call("scores", scores);
  SignScan s = sign_scores_problem(planes, terms, sign, factor, bias, head_dim, scale, start, scores, "scores");
  TopP p = top_p_select_problem(scores, exact_lse, std::nullopt, std::nullopt, top_p, indices, count);
  check_scan(s, sign);
  check_size(call, p, scores, indices);
  if (!has_scores(p, count)) return;
  int processors = call.num_multiprocessors();
  launch_sign_top_p_select(s, p, processors, call.scratch(sign_top_p_scratch_bytes(s, p, processors)), call.stream());
  call.check("sign_top_p_select");
}

void attend_top_p_select(const Tensor &q, const Tensors &keys, const Tensors &values, const Tensor &exact_keys,
                         const Tensor &exact_values, const OptionalTensor &sink_logits, const Tensor &query_centre,
                         const Tensor &centre, const Tensor &balance, const Tensor &signs, const Tensor &blocks,
                         const Tensor &matrix, const Tensor &sign, const Tensor &factor, const Tensor &bias,
                         double scale, double top_p, const Tensor &out, const Tensor &lse, const Tensor &planes,
                         const Tensor &terms, const Tensor &scores, const Tensor &indices, const Tensor &count) {
  Call call("q", q);
  QueryCoding c = quantise_query_problem(q, query_centre, centre, balance, signs, blocks, matrix, scale, planes, terms);
  Attention a =
      attend_problem(q, keys, values, exact_keys, exact_values, std::nullopt, sink_logits, 0, 0, 0, scale, 0, out, lse);
  SignScan s = sign_scores_problem(planes, terms, sign, factor, bias, c.dim, scale, 0, scores, "scores");
  TopP p = top_p_select_problem(scores, lse, std::nullopt, std::nullopt, top_p, indices, count);
  check_scan(s, sign);
  check_size(call, p, scores, indices);
  call.check_grid("q", c.batch * c.heads * c.group * c.queries);
  int processors = call.num_multiprocessors();
  bool some = has_scores(p, count), fits = some && attend_top_p_select_fits(c, a, s, p, processors);
  if (!fits) {
    launch_quantise_query(c, call.stream());
    run_attention(call, a);
  }
  if (some) {
    char *scratch = call.scratch(sign_top_p_scratch_bytes(s, p, processors));
    if (fits)
      launch_attend_top_p_select(c, a, s, p, processors, scratch, call.stream());
    else
      launch_sign_top_p_select(s, p, processors, scratch, call.stream());
  }
  call.check("attend_top_p_select");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CUDA, m) {
  m.impl("top_p_select", TORCH_BOX(&top_p_select));
  m.impl("sign_top_p_select", TORCH_BOX(&sign_top_p_select));
  m.impl("attend_top_p_select", TORCH_BOX(&attend_top_p_select));
}

}  // namespace cuda
}  // namespace kvq
