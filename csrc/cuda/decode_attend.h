// Attention of few rows (decoding): one launch over packed and exact tokens, and for some shapes one that combines.
#pragma once

#include <cuda_runtime.h>

#include "structs.h"

namespace kvq {
namespace cuda {

// Whether launch_decode has a kernel for the problem: bfloat16 or float16, 1 to 128 rows a head, head dims and bits
// in its table, tensors aligned to 16 bytes and packed without gaps.
bool decode_fits(const Attention &a);
// Bytes of scratch that launch_decode needs; none where CTAs end the rows themselves.
int64_t decode_scratch_bytes(const Attention &a);
void launch_decode(const Attention &a, void *scratch, cudaStream_t stream);

// One pair of head dims: whether there is a kernel (0 or 1), bytes of scratch, launch.
enum Action { FITS, BYTES, LAUNCH };
#define KVQ_DECODE(dims) int64_t decode_##dims(Action, const Attention &, void *scratch, cudaStream_t)
KVQ_DECODE(64);
KVQ_DECODE(80);
KVQ_DECODE(96);
KVQ_DECODE(128);
KVQ_DECODE(192);
KVQ_DECODE(256);
KVQ_DECODE(near);  // any of these, where there are no packed tokens and few exact ones
#undef KVQ_DECODE

}  // namespace cuda
}  // namespace kvq
