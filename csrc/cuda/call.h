// One call of an operator on a CUDA device: its device, its stream, its scratch.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>

#include "launch.h"
#include "problems.h"

namespace kvq {
namespace cuda {

class Call {
 public:
  // Makes the device of `first`, an argument called `name`, the current one, and the one all tensors must be on.
  Call(const char *name, const Tensor &first);
  cudaStream_t stream() const { return stream_; }  // the current one of that device
  int num_multiprocessors() const;
  // Memory for this call's kernels from torch's caching allocator, aligned to 256 bytes. What an earlier call returned
  // is free again: for kernels behind those that have it.
  char *scratch(int64_t bytes);
  // Throws unless a grid of `count` can be launched; `name` is the argument that asks for it.
  void check_grid(const char *name, int64_t count) const;
  // Throws what the launches of this call reported. `kernels` names them.
  void check(const char *kernels) const;

 private:
  int device_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
  std::optional<Tensor> memory_;
};

}  // namespace cuda
}  // namespace kvq
