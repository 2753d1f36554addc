#include "call.h"

namespace kvq {
namespace cuda {

namespace {

void decode(const Tensors &packed, bool along_tokens, int64_t start, const Tensor &out) {
  Call call("out", out);
  Coding c = decode_problem(packed, along_tokens, start, out);
  call.check_grid("out", c.batch * c.heads * c.blocks);
  if (!(c.batch * c.heads * c.blocks)) return;
  launch_decode(c, call.stream());
  call.check("decode");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CUDA, m) { m.impl("decode", TORCH_BOX(&decode)); }

}  // namespace cuda
}  // namespace kvq
