// attend on CUDA devices, of a problem that is checked.
#pragma once

#include "call.h"

namespace kvq {
namespace cuda {

// Takes scratch of the call, if it needs any.
void run_attention(Call &, const Attention &);

}  // namespace cuda
}  // namespace kvq
