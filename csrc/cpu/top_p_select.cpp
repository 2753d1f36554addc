// top_p_select: the threshold of every row, a row a task; then the union of each selection, a selection a task.
#include <algorithm>

#include "run.h"
#include "sparse_problems.h"

namespace kvq {

namespace {

std::vector<int32_t> columns_of(const uint32_t *kept, int64_t columns) {
  std::vector<int32_t> found;
  for (int64_t i = 0; i < columns; i += TILE)
    for (uint32_t bits = kept[i / TILE]; bits; bits &= bits - 1) found.push_back((int32_t)(i + __builtin_ctz(bits)));
  return found;
}

// The `most` columns with the largest shares, the earlier of equal ones, in order.
void keep_largest(std::vector<int32_t> &columns, int64_t most, const float *shares) {
  std::nth_element(columns.begin(), columns.begin() + most, columns.end(), [&](int32_t a, int32_t b) {
    return shares[a] > shares[b] || (shares[a] == shares[b] && a < b);
  });
  columns.resize(most);
  std::sort(columns.begin(), columns.end());
}

// Writes one selection. `memory` holds a row of scores, one of shares and one of bits.
void write_selection(const Kernels &k, const TopP &p, const RowCut *rows, int64_t index, char *memory) {
  const Selection &s = p.selection;
  int64_t b = index / s.selections, selection = index % s.selections, row_bytes = 4 * select_row_len(p.columns);
  uint32_t *kept = (uint32_t *)(memory + 2 * row_bytes);
  k.select_union(p, rows, index, kept, memory);
  std::vector<int32_t> columns = columns_of(kept, p.columns);
  if ((int64_t)columns.size() > s.capacity) {
    float *shares = (float *)(memory + row_bytes);
    k.select_shares(p, rows, index, shares, memory);
    keep_largest(columns, s.capacity, shares);
  }
  int32_t *out = s.indices + b * s.index_stride[0] + selection * s.index_stride[1];
  const int32_t *names =
      p.candidates ? p.candidates + b * p.candidate_stride[0] + selection * p.candidate_stride[1] : nullptr;
  for (size_t i = 0; i < columns.size(); i++) out[i] = names ? names[columns[i]] : columns[i];
  s.count[b * s.count_stride + selection] = (int32_t)columns.size();
}

void top_p_select(const Tensor &scores, const Tensor &exact_lse, const OptionalTensor &mask,
                  const OptionalTensor &candidates, double top_p, const Tensor &indices, const Tensor &count) {
  TopP p = top_p_select_problem(scores, exact_lse, mask, candidates, top_p, indices, count);
  const Kernels &k = kernels();
  int64_t num_rows = p.batch * p.query_heads * p.queries, bytes = select_scratch_bytes(p.columns);
  RowCut *rows = (RowCut *)call_scratch(num_rows * sizeof(RowCut));
  run_parallel(num_rows, bytes, [&](int64_t i, char *scratch) { rows[i] = k.select_row(p, i, scratch); });
  run_parallel(p.batch * p.selection.selections, bytes,
               [&](int64_t i, char *scratch) { write_selection(k, p, rows, i, scratch); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CPU, m) { m.impl("top_p_select", TORCH_BOX(&top_p_select)); }

}  // namespace kvq
