// Launchers of the kernels: what the op files call and the .cu files define. They enqueue and return; nothing waits.
#pragma once

#include <cuda_runtime_api.h>

#include "structs.h"

namespace kvq {
namespace cuda {

void launch_rotate(const Vectors &, cudaStream_t);

}  // namespace cuda
}  // namespace kvq
