#include "call.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/macros.h>

namespace kvq {
namespace cuda {

namespace {

int device_of(const char *name, const Tensor &x) {
  KVQ_CHECK(x.is_cuda(), name, "be on a CUDA device like the other tensors", device_text(x));
  return x.get_device_index();
}

}  // namespace

Call::Call(const char *name, const Tensor &first) : device_(device_of(name, first)), guard_(device_) {
  expect_device(device_);
  STD_CUDA_CHECK(cudaSetDevice(device_));  // this library has a CUDA runtime of its own
  void *stream;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream));
  stream_ = (cudaStream_t)stream;
}

int Call::num_multiprocessors() const {
  int count;
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device_));
  return count;
}

char *Call::scratch(int64_t bytes) {
  torch::stable::Device device(torch::headeronly::DeviceType::CUDA, device_);
  memory_ = torch::stable::empty({bytes}, ScalarType::Byte, std::nullopt, device);
  return (char *)memory_->data_ptr();
}

void Call::check_grid(const char *name, int64_t count) const {
  KVQ_CHECK(count <= INT32_MAX, name, "be work for fewer than 2**31 blocks of threads", count);
}

void Call::check(const char *kernels) const {
  cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, "torch_kvq: the launch of ", kernels, " failed: ", cudaGetErrorString(error));
}

}  // namespace cuda
}  // namespace kvq
