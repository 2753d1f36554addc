// Launchers of the kernels: what the op files call and the .cu files define. They enqueue and return; nothing waits.
#pragma once

#include <cuda_runtime_api.h>

#include "structs.h"

namespace kvq {
namespace cuda {

void launch_rotate(const Vectors &, cudaStream_t);
void launch_encode(const Coding &, cudaStream_t);
// encode on tensor cores, for one head dim, of keys, of values, or of both if of the same bits; what is absent is null.
// encode.cpp says what they take.
void launch_encode_64(const Coding *keys, const Coding *values, int num_multiprocessors, cudaStream_t);
void launch_encode_128(const Coding *keys, const Coding *values, int num_multiprocessors, cudaStream_t);
void launch_encode_256(const Coding *keys, const Coding *values, int num_multiprocessors, cudaStream_t);
void launch_decode(const Coding &, cudaStream_t);
void launch_merge(const Pieces &, cudaStream_t);

}  // namespace cuda
}  // namespace kvq
