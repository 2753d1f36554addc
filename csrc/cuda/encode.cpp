#include <algorithm>

#include "call.h"

namespace kvq {
namespace cuda {

namespace {

bool aligned(const void *data, std::initializer_list<int64_t> strides, int64_t bytes, int64_t element) {
  bool good = (uintptr_t)data % bytes == 0;
  for (int64_t stride : strides) good = good && stride * element % bytes == 0;
  return good;
}

// Whether tensor cores have a kernel for the call: 16-bit vectors of 64, 128 or 256 coordinates, one mixing round, no
// dense matrix, values without centre and balance, and rows that vector loads can read.
bool fits(const Coding &c) {
  const Store &s = c.store;
  bool dim = s.dim == 64 || s.dim == 128 || s.dim == 256, rotation = s.rotation.rounds == 1 && !s.rotation.matrix;
  int64_t largest = std::max({c.start + c.tokens, c.x.stride[2], s.sign_stride[2], s.mag_stride[2]});
  if (largest > INT32_MAX / 8) return false;  // positions and distances of tokens in bytes are 32-bit numbers
  if (!dim || !rotation || c.x.dtype == FLOAT32 || (c.along_tokens && (s.centre || s.balance))) return false;
  return aligned(c.x.data, {c.x.stride[0], c.x.stride[1], c.x.stride[2]}, 16, 2) &&
         aligned(s.rotation.blocks, {}, 16, 4);
}

void launch(const Coding &c, int num_multiprocessors, cudaStream_t stream) {
  if (!fits(c)) return launch_encode(c, stream);
  if (c.store.dim == 64) launch_encode_64(c, num_multiprocessors, stream);
  if (c.store.dim == 128) launch_encode_128(c, num_multiprocessors, stream);
  if (c.store.dim == 256) launch_encode_256(c, num_multiprocessors, stream);
}

void encode(const Tensor &x, const Tensor &levels, const Tensor &centre, const Tensor &balance, const Tensor &signs,
            const Tensor &blocks, const Tensor &matrix, int64_t rule, bool along_tokens, int64_t start,
            const Tensor &sign, const Tensor &mag, const Tensor &scale) {
  Call call("x", x);
  Coding c =
      encode_problem(x, levels, centre, balance, signs, blocks, matrix, rule, along_tokens, start, sign, mag, scale);
  call.check_grid("x", c.batch * c.heads * c.blocks);
  if (!(c.batch * c.heads * c.blocks)) return;
  launch(c, call.num_multiprocessors(), call.stream());
  call.check("encode");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CUDA, m) { m.impl("encode", TORCH_BOX(&encode)); }

}  // namespace cuda
}  // namespace kvq
