// attend_selected, with a merge too, qk_selected and gather_selected on CUDA devices.
#include "call.h"
#include "sparse.h"
#include "sparse_problems.h"

namespace kvq {
namespace cuda {

namespace {

void check_count(const Call &call, const Selected &s, const Tensor &q) {
  int64_t rows = s.attention.batch * s.attention.heads * s.attention.rows;
  KVQ_CHECK(rows < 1 << 20, "q", "have fewer than 2**20 rows of all sequences, heads and tokens", text(q));
  KVQ_CHECK(s.tokens < INT32_MAX && s.selection.capacity < (int64_t)1 << 30, "keys", "have fewer than 2**30 tokens",
            s.tokens);
  call.check_grid("q", rows * 8);
}

void qk_selected(const Tensor &q, const Tensors &keys, const Tensor &indices, const Tensor &count, double scale,
                 const Tensor &out) {
  Call call("q", q);
  Selected s = qk_selected_problem(q, keys, indices, count, scale, out);
  check_count(call, s, q);
  KVQ_CHECK(s.selection.capacity < 1 << 20, "indices", "have a capacity below 2**20", text(indices));
  launch_qk_selected(s, call.stream());
  call.check("qk_selected");
}

void attend_selected(const Tensor &q, const Tensors &keys, const Tensors &values, const Tensor &indices,
                     const Tensor &count, const OptionalTensor &mask, double scale, double softcap, const Tensor &out,
                     const Tensor &lse) {
  Call call("q", q);
  Selected s = attend_selected_problem(q, keys, values, indices, count, mask, scale, softcap, out, lse);
  check_count(call, s, q);
  int processors = call.num_multiprocessors();
  launch_attend_selected(s, processors, call.scratch(attend_selected_scratch_bytes(s, processors)), call.stream());
  call.check("attend_selected");
}

void merge_selected(const Tensor &q, const Tensors &keys, const Tensors &values, const Tensor &indices,
                    const Tensor &count, const OptionalTensor &mask, double scale, double softcap, const Tensor &outs,
                    const Tensor &lses, const Tensor &out, const Tensor &lse) {
  Call call("q", q);
  Selected s = attend_selected_problem(q, keys, values, indices, count, mask, scale, softcap, out, lse);
  Pieces p = merge_problem(outs, lses, out, lse);
  KVQ_CHECK(p.pieces == 2, "outs", "have two pieces", text(outs));
  check_count(call, s, q);
  int processors = call.num_multiprocessors();
  char *scratch = call.scratch(attend_selected_scratch_bytes(s, processors));
  launch_merge_selected(s, p, processors, scratch, call.stream());
  call.check("merge_selected");
}

// What kernels can read of memory on the CPU is pinned.
void check_readable(const Tensor &x) {
  if (!x.is_cpu() || !x.numel()) return;
  cudaPointerAttributes attributes{};
  cudaError_t error = cudaPointerGetAttributes(&attributes, x.data_ptr());
  KVQ_CHECK(error == cudaSuccess && attributes.type == cudaMemoryTypeHost, "x",
            "be in pinned memory if it is on the CPU", text(x));
}

void gather_selected(const Tensor &x, const Tensor &indices, const Tensor &count, const Tensor &out) {
  Call call("out", out);
  Gathering g = gather_selected_problem(x, indices, count, out);
  check_readable(x);
  KVQ_CHECK(g.batch * g.selection.selections < 1 << 16, "indices", "have fewer than 2**16 selections in all",
            text(indices));
  KVQ_CHECK(g.selection.capacity < (int64_t)1 << 28, "indices", "have a capacity below 2**28", text(indices));
  launch_gather_selected(g, call.num_multiprocessors(), call.stream());
  call.check("gather_selected");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CUDA, m) {
  m.impl("qk_selected", TORCH_BOX(&qk_selected));
  m.impl("attend_selected", TORCH_BOX(&attend_selected));
  m.impl("merge_selected", TORCH_BOX(&merge_selected));
  m.impl("gather_selected", TORCH_BOX(&gather_selected));
}

}  // namespace cuda
}  // namespace kvq
