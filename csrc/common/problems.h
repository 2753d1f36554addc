// The arguments of each operator, checked, as the struct that its kernels take; scratch is left to the device.
#pragma once

#include <optional>

#include "checks.h"

namespace kvq {

using OptionalTensor = std::optional<Tensor>;

Vectors rotate_problem(const Tensor &x, const Tensor &signs, const Tensor &blocks, const Tensor &matrix, bool inverse,
                       const Tensor &out);

Coding encode_problem(const Tensor &x, const Tensor &levels, const Tensor &centre, const Tensor &balance,
                      const Tensor &signs, const Tensor &blocks, const Tensor &matrix, int64_t rule, bool along_tokens,
                      int64_t start, const Tensor &sign, const Tensor &mag, const Tensor &scale);
struct Codings {
  Coding keys, values;
};
Codings encode_kv_problem(const Tensor &keys, const Tensor &values, const Tensors &key_codec,
                          const Tensors &value_codec, int64_t key_rule, int64_t value_rule, int64_t start,
                          const Tensor &key_sign, const Tensor &key_mag, const Tensor &key_scale,
                          const Tensor &value_sign, const Tensor &value_mag, const Tensor &value_scale);
Coding decode_problem(const Tensors &packed, bool along_tokens, int64_t start, const Tensor &out);

Attention attend_problem(const Tensor &q, const Tensors &keys, const Tensors &values, const Tensor &exact_keys,
                         const Tensor &exact_values, const OptionalTensor &mask, const OptionalTensor &sink_logits,
                         int64_t start, int64_t length, int64_t num_sinks, double scale, double softcap,
                         const Tensor &out, const Tensor &lse);
Attention qk_problem(const Tensor &q, const Tensors &keys, const Tensor &exact_keys, int64_t length, int64_t num_sinks,
                     const Tensor &out);
Attention pv_problem(const Tensor &p, const Tensors &values, const Tensor &exact_values, int64_t length,
                     int64_t num_sinks, const Tensor &out);

Pieces merge_problem(const Tensor &outs, const Tensor &lses, const Tensor &out, const Tensor &lse);

}  // namespace kvq
