#include "call.h"

namespace kvq {
namespace cuda {

namespace {

void rotate(const Tensor &x, const Tensor &signs, const Tensor &blocks, const Tensor &matrix, bool inverse,
            const Tensor &out) {
  Call call("x", x);
  Vectors v = rotate_problem(x, signs, blocks, matrix, inverse, out);
  call.check_grid("x", v.count);
  launch_rotate(v, call.stream());
  call.check("rotate");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CUDA, m) { m.impl("rotate", TORCH_BOX(&rotate)); }

}  // namespace cuda
}  // namespace kvq
