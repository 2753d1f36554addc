#include "decode_attend.h"

namespace kvq {
namespace cuda {

int64_t decode_96(Action, const Attention &, void *, cudaStream_t) { return 0; }

}  // namespace cuda
}  // namespace kvq
