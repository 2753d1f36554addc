// quantise_query: centre, balance, rotate and code in 4 bits. A task is 32 rows.
#include "run.h"
#include "sparse_problems.h"

namespace kvq {

namespace {

void quantise_query(const Tensor &q, const Tensor &query_centre, const Tensor &centre, const Tensor &balance,
                    const Tensor &signs, const Tensor &blocks, const Tensor &matrix, double scale, const Tensor &planes,
                    const Tensor &terms) {
  QueryCoding c =
      quantise_query_problem(q, query_centre, centre, balance, signs, blocks, matrix, scale, planes, terms);
  const Kernels &k = kernels();
  int64_t rows = c.batch * c.heads * c.group * c.queries;
  run_parallel(ceil_div(rows, TILE), scratch_bytes(round_up(c.dim, TILE)),
               [&](int64_t i, char *scratch) { k.quantise_query(c, i, scratch); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CPU, m) { m.impl("quantise_query", TORCH_BOX(&quantise_query)); }

}  // namespace kvq
