// gather_selected: copies the selected rows. A task is GATHER_LEN rows of one selection.
#include <cstring>

#include "run.h"
#include "selection.h"

namespace kvq {

namespace {

constexpr int64_t GATHER_LEN = 256;

void gather_selected(const Tensor &x, const Tensor &indices, const Tensor &count, const Tensor &out) {
  Gathering g = gather_selected_problem(x, indices, count, out);
  const Selection &s = g.selection;
  int64_t chunks = ceil_div(check_selection(s, g.batch, g.tokens), GATHER_LEN);
  run_parallel(g.batch * s.selections * chunks, 0, [&](int64_t i, char *) {
    int64_t b = i / chunks / s.selections, k = i / chunks % s.selections, from = i % chunks * GATHER_LEN;
    int64_t stop = std::min<int64_t>(from + GATHER_LEN, s.count[b * s.count_stride + k]);
    const int32_t *index = s.indices + b * s.index_stride[0] + k * s.index_stride[1];
    const char *rows = g.x + b * g.x_stride[0] + k * g.heads / s.selections * g.x_stride[1];
    char *to = g.out + b * g.out_stride[0] + k * g.out_stride[1];
    for (int64_t t = from; t < stop; t++)
      memcpy(to + t * g.out_stride[2], rows + index[t] * g.x_stride[2], g.row_bytes);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CPU, m) { m.impl("gather_selected", TORCH_BOX(&gather_selected)); }

}  // namespace kvq
