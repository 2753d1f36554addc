// What is asked once of every device, as the cards of a machine may differ.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>

namespace kvq {
namespace cuda {

// What `ask` says of the current device. Each lambda has answers of its own.
template <class Ask>
auto once_a_device(const Ask &ask) -> decltype(ask()) {
  constexpr int MOST = 64;
  static std::once_flag asked[MOST];
  static decltype(ask()) answers[MOST];
  int device = 0;
  cudaGetDevice(&device);
  if (device >= MOST) return ask();
  std::call_once(asked[device], [&] { answers[device] = ask(); });
  return answers[device];
}

}  // namespace cuda
}  // namespace kvq
