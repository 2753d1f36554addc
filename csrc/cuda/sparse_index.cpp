// quantise_query, index_keys and sign_scores on CUDA devices.
#include "call.h"
#include "sparse.h"
#include "sparse_problems.h"

namespace kvq {
namespace cuda {

namespace {

void quantise_query(const Tensor &q, const Tensor &query_centre, const Tensor &centre, const Tensor &balance,
                    const Tensor &signs, const Tensor &blocks, const Tensor &matrix, double scale, const Tensor &planes,
                    const Tensor &terms) {
  Call call("q", q);
  QueryCoding c = quantise_query_problem(q, query_centre, centre, balance, signs, blocks, matrix, scale, planes, terms);
  call.check_grid("q", c.batch * c.heads * c.group * c.queries);
  launch_quantise_query(c, call.stream());
  call.check("quantise_query");
}

void index_keys(const Tensor &x, const Tensor &query_centre, const Tensor &centre, const Tensor &balance,
                const Tensor &signs, const Tensor &blocks, const Tensor &matrix, int64_t start, const Tensor &sign,
                const Tensor &factor, const Tensor &bias) {
  Call call("x", x);
  Indexing n = index_keys_problem(x, query_centre, centre, balance, signs, blocks, matrix, start, sign, factor, bias);
  call.check_grid("x", n.batch * n.heads * n.tokens);
  launch_index_keys(n, call.stream());
  call.check("index_keys");
}

void sign_scores(const Tensor &planes, const Tensor &terms, const Tensor &sign, const Tensor &factor,
                 const Tensor &bias, int64_t head_dim, double scale, int64_t start, const Tensor &out) {
  Call call("out", out);
  SignScan s = sign_scores_problem(planes, terms, sign, factor, bias, head_dim, scale, start, out);
  KVQ_CHECK(s.index.sign || !s.tokens, "sign", "hold the tokens of out", text(sign));
  KVQ_CHECK(s.tokens < INT32_MAX / 2, "out", "have fewer than 2**30 tokens", text(out));
  call.check_grid("out", s.batch * s.heads * s.tokens);
  launch_sign_scores(s, call.num_multiprocessors(), call.stream());
  call.check("sign_scores");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CUDA, m) {
  m.impl("quantise_query", TORCH_BOX(&quantise_query));
  m.impl("index_keys", TORCH_BOX(&index_keys));
  m.impl("sign_scores", TORCH_BOX(&sign_scores));
}

}  // namespace cuda
}  // namespace kvq
