// What is asked once of every device, as the cards of a machine may differ.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>

namespace kvq {
namespace cuda {

// What `ask` says of the current device. Each lambda has answers of its own. A lock, not std::call_once, whose helpers
// the library would export.
template <class Ask>
auto once_a_device(const Ask &ask) -> decltype(ask()) {
  constexpr int MOST = 64;
  static std::mutex mutex;
  static bool asked[MOST];
  static decltype(ask()) answers[MOST];
  int device = 0;
  cudaGetDevice(&device);
  if (device >= MOST) return ask();
  std::lock_guard<std::mutex> lock(mutex);
  if (!asked[device]) answers[device] = ask(), asked[device] = true;
  return answers[device];
}

}  // namespace cuda
}  // namespace kvq
