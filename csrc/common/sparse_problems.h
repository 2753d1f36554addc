// The arguments of each operator of sparse attention, checked, as the struct that its kernels take.
#pragma once

#include "problems.h"
#include "sparse_structs.h"

namespace kvq {

QueryCoding quantise_query_problem(const Tensor &q, const Tensor &query_centre, const Tensor &centre,
                                   const Tensor &balance, const Tensor &signs, const Tensor &blocks,
                                   const Tensor &matrix, double scale, const Tensor &planes, const Tensor &terms);

Indexing index_keys_problem(const Tensor &x, const Tensor &query_centre, const Tensor &centre, const Tensor &balance,
                            const Tensor &signs, const Tensor &blocks, const Tensor &matrix, int64_t start,
                            const Tensor &sign, const Tensor &factor, const Tensor &bias);

SignScan sign_scores_problem(const Tensor &planes, const Tensor &terms, const Tensor &sign, const Tensor &factor,
                             const Tensor &bias, int64_t head_dim, double scale, int64_t start, const Tensor &out,
                             const char *out_name = "out");

TopP top_p_select_problem(const Tensor &scores, const Tensor &exact_lse, const OptionalTensor &mask,
                          const OptionalTensor &candidates, double top_p, const Tensor &indices, const Tensor &count);

Selected qk_selected_problem(const Tensor &q, const Tensors &keys, const Tensor &indices, const Tensor &count,
                             double scale, const Tensor &out);
Selected attend_selected_problem(const Tensor &q, const Tensors &keys, const Tensors &values, const Tensor &indices,
                                 const Tensor &count, const OptionalTensor &mask, double scale, double softcap,
                                 const Tensor &out, const Tensor &lse);

// x may be in host memory while all else is on a GPU.
Gathering gather_selected_problem(const Tensor &x, const Tensor &indices, const Tensor &count, const Tensor &out);

}  // namespace kvq
