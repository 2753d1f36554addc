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

// By tensor cores; one of both may be null.
void launch_halves(const Coding *keys, const Coding *values, int num_multiprocessors, cudaStream_t stream) {
  int dim = (keys ? keys : values)->store.dim;
  if (dim == 64) launch_encode_64(keys, values, num_multiprocessors, stream);
  if (dim == 128) launch_encode_128(keys, values, num_multiprocessors, stream);
  if (dim == 256) launch_encode_256(keys, values, num_multiprocessors, stream);
}

int64_t num_blocks(const Coding &c) { return c.batch * c.heads * c.blocks; }

void launch(const Coding &c, int num_multiprocessors, cudaStream_t stream) {
  if (!num_blocks(c)) return;
  if (!fits(c)) return launch_encode(c, stream);
  launch_halves(c.along_tokens ? nullptr : &c, c.along_tokens ? &c : nullptr, num_multiprocessors, stream);
}

void encode(const Tensor &x, const Tensor &levels, const Tensor &centre, const Tensor &balance, const Tensor &signs,
            const Tensor &blocks, const Tensor &matrix, int64_t rule, bool along_tokens, int64_t start,
            const Tensor &sign, const Tensor &mag, const Tensor &scale) {
  Call call("x", x);
  Coding c =
      encode_problem(x, levels, centre, balance, signs, blocks, matrix, rule, along_tokens, start, sign, mag, scale);
  call.check_grid("x", num_blocks(c));
  launch(c, call.num_multiprocessors(), call.stream());
  call.check("encode");
}

void encode_kv(const Tensor &keys, const Tensor &values, const Tensors &key_codec, const Tensors &value_codec,
               int64_t key_rule, int64_t value_rule, int64_t start, const Tensor &key_sign, const Tensor &key_mag,
               const Tensor &key_scale, const Tensor &value_sign, const Tensor &value_mag, const Tensor &value_scale) {
  Call call("keys", keys);
  Codings kv = encode_kv_problem(keys, values, key_codec, value_codec, key_rule, value_rule, start, key_sign, key_mag,
                                 key_scale, value_sign, value_mag, value_scale);
  call.check_grid("keys", num_blocks(kv.keys) + num_blocks(kv.values));
  const Store &k = kv.keys.store, &v = kv.values.store;
  bool alike = k.dim == v.dim && k.bits == v.bits, none = !num_blocks(kv.keys) || !num_blocks(kv.values);
  if (alike && !none && fits(kv.keys) && fits(kv.values)) {
    launch_halves(&kv.keys, &kv.values, call.num_multiprocessors(), call.stream());
  } else {
    launch(kv.keys, call.num_multiprocessors(), call.stream());
    launch(kv.values, call.num_multiprocessors(), call.stream());
  }
  call.check("encode_kv");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CUDA, m) {
  m.impl("encode", TORCH_BOX(&encode));
  m.impl("encode_kv", TORCH_BOX(&encode_kv));
}

}  // namespace cuda
}  // namespace kvq
