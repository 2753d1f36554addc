// Tensors to the plain structs of structs.h, with checks that name the argument, the rule and the value. Compiled once
// a device: with KVQ_CUDA every tensor of a call must be on the CUDA device of expect_device, without on the CPU.
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "structs.h"

namespace kvq {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using Sizes = std::initializer_list<int64_t>;  // -1: any

#define KVQ_CHECK(condition, name, rule, value) STD_TORCH_CHECK(condition, name, " must ", rule, ", got ", value)

std::string text(const Tensor &x);  // "float32 [1, 8, 32, 128]"
int64_t size_at(const Tensor &x, int64_t dim);
std::string device_text(const Tensor &x);  // "cuda:0"

// Where the tensors of this call must be, "the CPU" or "cuda:0", and whether x is there.
std::string place();
bool in_place(const Tensor &x);
#if defined(KVQ_CUDA)
void expect_device(int index);  // of the calls of this thread from now on
#endif
void check_place(const char *name, const Tensor &x);

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

}  // namespace kvq
