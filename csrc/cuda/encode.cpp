#include "call.h"

namespace kvq {
namespace cuda {

namespace {

void encode(const Tensor &x, const Tensor &levels, const Tensor &centre, const Tensor &balance, const Tensor &signs,
            const Tensor &blocks, const Tensor &matrix, int64_t rule, bool along_tokens, int64_t start,
            const Tensor &sign, const Tensor &mag, const Tensor &scale) {
  Call call("x", x);
  Coding c = encode_problem(x, levels, centre, balance, signs, blocks, matrix, rule, along_tokens, start, sign, mag,
                            scale);
  call.check_grid("x", c.batch * c.heads * c.blocks);
  if (!(c.batch * c.heads * c.blocks)) return;
  launch_encode(c, call.stream());
  call.check("encode");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CUDA, m) { m.impl("encode", TORCH_BOX(&encode)); }

}  // namespace cuda
}  // namespace kvq
