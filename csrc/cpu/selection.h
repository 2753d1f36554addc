// What the operators check of a selection that their kernels read.
#pragma once

#include "sparse_problems.h"

namespace kvq {

// The largest count. Throws unless counts are from 0 to the capacity and the valid indices from 0 to tokens - 1.
int64_t check_selection(const Selection &selection, int64_t batch, int64_t tokens);

}  // namespace kvq
