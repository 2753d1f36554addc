// The launch ahead of scan_select: attention to sinks and window, codes of queries, cleared memory.
#pragma once

#include <cuda_runtime_api.h>

#include "sparse_structs.h"

namespace kvq {
namespace cuda {

// Whether there is a kernel for both: attention to few exact tokens of a usual 128 dims, up to four rows a head.
bool near_takes(const QueryCoding &, const Attention &);
// Clears so many bytes, aligned to 16, too.
void launch_near(const QueryCoding &, const Attention &, void *cleared, int64_t bytes, cudaStream_t);

}  // namespace cuda
}  // namespace kvq
