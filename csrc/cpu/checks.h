// Tensors of the operators to the plain structs of kernels.h, with checks that name the argument, the rule and the
// value.
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "kernels.h"

namespace kvq {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using Sizes = std::initializer_list<int64_t>;  // -1: any

#define KVQ_CHECK(condition, name, rule, value) STD_TORCH_CHECK(condition, name, " must ", rule, ", got ", value)

std::string text(const Tensor &x);  // "float32 [1, 8, 32, 128]"
int64_t size_at(const Tensor &x, int64_t dim);

// A dense float tensor of four dims with these sizes and a contiguous last dim.
Dense dense_of(const char *name, const Tensor &x, Sizes sizes);
// A float32 tensor with these sizes and its strides.
float *floats_of(const char *name, const Tensor &x, Sizes sizes, int64_t *strides);
Dtype dtype_of(const char *name, const Tensor &x);

Rotation rotation_of(const Tensor &signs, const Tensor &blocks, const Tensor &matrix, int64_t dim);
// The nine tensors of a store for [batch, heads] that holds at least `tokens` tokens of `dim` coordinates.
Store store_of(const char *name, const Tensors &packed, bool along_tokens, int64_t batch, int64_t heads, int64_t tokens,
               int64_t dim);
// The mask, broadcast to [batch, heads, queries, columns].
Mask mask_of(const Tensor &mask, Sizes sizes);

// Grow-only memory of a thread, aligned to 64 bytes: `call` for what all workers of a call share, `worker` for one
// worker.
char *call_scratch(int64_t bytes);
char *worker_scratch(int64_t bytes);

// Runs run(i, scratch of the worker) for i = 0 .. count on torch's threads.
template <class Run>
void run_parallel(int64_t count, int64_t scratch, const Run &run) {
  if (count <= 0) return;
  torch::stable::parallel_for(0, count, 1, [&](int64_t from, int64_t to) {
    char *memory = worker_scratch(scratch);
    for (int64_t i = from; i < to; i++) run(i, memory);
  });
}

// isa.cpp: the kernels in use. Only attend asks by the dtype of its query; all other work is done in float32.
const Kernels &kernels(Dtype query = FLOAT32);

// plan.cpp: the parts of attend, qk and pv that are alike.
void check_heads(Attention &a, const Tensor &q, const char *name, int64_t heads);
// The phases: prepare (with queries), the tasks, finish (unless the tasks write the output themselves).
void run_phases(const Kernels &k, const Attention &a, bool prepare, void (*task)(const Attention &, int64_t, char *),
                bool finish);

}  // namespace kvq
