// The host twin of csrc/cuda/call.h: scratch is memory of the CPU, filled with NaN.
#pragma once

#include "launch.h"
#include "problems.h"

#define STD_CUDA_CHECK(expression) STD_TORCH_CHECK((expression) == cudaSuccess, "emulated CUDA call failed: " #expression)

namespace kvq {
namespace cuda {

class Call {
 public:
  Call(const char *, const Tensor &) {}
  cudaStream_t stream() const { return nullptr; }
  int num_multiprocessors() const { return emulated::num_multiprocessors(); }
  char *scratch(int64_t bytes) {
    memory_.assign(bytes + FENCE + 256, (char)0xff);
    size_ = bytes;
    return memory_.data() + 256 - (uintptr_t)memory_.data() % 256;
  }
  void check_grid(const char *, int64_t) const {}
  void check(const char *kernels) const {
    if (memory_.empty()) return;
    const char *end = memory_.data() + 256 - (uintptr_t)memory_.data() % 256 + size_;
    for (const char *x = end; x < memory_.data() + memory_.size(); x++)
      STD_TORCH_CHECK(*x == (char)0xff, "written behind the scratch of ", kernels);
  }

 private:
  static constexpr int64_t FENCE = 4096;
  std::vector<char> memory_;
  int64_t size_ = 0;
};

}  // namespace cuda
}  // namespace kvq
