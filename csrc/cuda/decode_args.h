// What the decode kernels need of an Attention, in few bytes: the parameters of a launch are always cold.
#pragma once

#include "structs.h"

namespace kvq {
namespace cuda {

struct DenseArgs {
  char *data;
  int stride[3];  // batch, head, token
};

struct StoreArgs {
  const uint32_t *sign, *mag;
  const uint16_t *scale;
  const float *levels, *centre, *balance;
  Rotation rotation;
  int sign_stride[2], mag_stride[2], scale_stride[2], centre_stride[2], balance_stride[2];  // batch, head
};

struct DecodeArgs {
  int heads, group, queries, rows, start, length, num_sinks, exact_len;
  float scale, softcap;
  DenseArgs q, exact_keys, exact_values;
  StoreArgs keys, values;
  const char *mask;  // null if absent
  int mask_stride[4], mask_bytes;
  DenseArgs out;
  float *lse;
  int lse_stride[3];
  const float *sink_logits;
};

inline bool fits_int(const int64_t *strides, int count) {
  for (int i = 0; i < count; i++)
    if (strides[i] < 0 || strides[i] > 0x7fffffff) return false;
  return true;
}

inline bool aligned(const void *data) { return (uintptr_t)data % 16 == 0; }

inline bool aligned(const Dense &x) {
  bool good = aligned(x.data);
  for (int64_t stride : x.stride) good = good && stride % 8 == 0;
  return good;
}

// Whether what belongs to a store as a whole may be read in units of 16 bytes.
inline bool plain(const Store &s) {
  bool good = aligned(s.centre) && aligned(s.balance) && aligned(s.rotation.signs) && aligned(s.rotation.blocks);
  for (int i = 0; i < 2; i++) good = good && s.centre_stride[i] % 4 == 0 && s.balance_stride[i] % 4 == 0;
  return good;
}

inline bool to_args(const Dense &x, DenseArgs &args) {
  args.data = x.data;
  for (int i = 0; i < 3; i++) args.stride[i] = (int)x.stride[i];
  return fits_int(x.stride, 3);
}

inline bool to_args(const Store &s, StoreArgs &args) {
  args = {s.sign, s.mag, s.scale, s.level_data, s.centre, s.balance, s.rotation, {}, {}, {}, {}, {}};
  for (int i = 0; i < 2; i++) {
    args.sign_stride[i] = (int)s.sign_stride[i], args.mag_stride[i] = (int)s.mag_stride[i];
    args.scale_stride[i] = (int)s.scale_stride[i], args.centre_stride[i] = (int)s.centre_stride[i];
    args.balance_stride[i] = (int)s.balance_stride[i];
  }
  return fits_int(s.sign_stride, 2) && fits_int(s.mag_stride, 2) && fits_int(s.scale_stride, 2);
}

// False if a size or stride does not fit; `args` is then of no use.
inline bool to_args(const Attention &a, DecodeArgs &args) {
  args.heads = (int)a.heads, args.group = (int)a.group, args.queries = (int)a.queries, args.rows = (int)a.rows;
  args.start = (int)a.start, args.length = (int)a.length, args.num_sinks = (int)a.num_sinks;
  args.exact_len = (int)a.exact_len, args.scale = a.scale, args.softcap = a.softcap;
  bool good =
      to_args(a.q, args.q) && to_args(a.out, args.out) && to_args(a.keys, args.keys) && to_args(a.values, args.values);
  if (a.exact_len) good = to_args(a.exact_keys, args.exact_keys) && to_args(a.exact_values, args.exact_values) && good;
  args.mask = (const char *)a.mask.data, args.mask_bytes = a.mask.boolean ? 1 : 4;
  for (int i = 0; i < 4; i++) args.mask_stride[i] = (int)a.mask.stride[i];
  for (int i = 0; i < 3; i++) args.lse_stride[i] = (int)a.lse_stride[i];
  args.lse = a.lse, args.sink_logits = a.sink_logits;
  good = good && fits_int(a.lse_stride, 3) && (!args.mask || fits_int(a.mask.stride, 4));
  return good && a.rows <= 0x7fff && a.batch * a.heads <= 0xffff && a.length + a.exact_len <= 0x3fffffff;
}

}  // namespace cuda
}  // namespace kvq
