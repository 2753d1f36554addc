#include "problems.h"

namespace kvq {

Vectors rotate_problem(const Tensor &x, const Tensor &signs, const Tensor &blocks, const Tensor &matrix, bool inverse,
                       const Tensor &out) {
  int64_t last = x.dim() - 1;
  KVQ_CHECK(last >= 0 && last <= MAX_LEADING, "x", "have 1 to 16 dims", text(x));
  bool same = x.dim() == out.dim();
  for (int64_t i = 0; same && i <= last; i++) same = x.size(i) == out.size(i);
  KVQ_CHECK(same, "out", "have the shape of x, " + text(x), text(out));
  check_place("x", x);
  check_place("out", out);
  Vectors v{};
  v.rotation = rotation_of(signs, blocks, matrix, x.size(last));
  v.x_dtype = dtype_of("x", x), v.out_dtype = dtype_of("out", out);
  KVQ_CHECK(x.stride(last) == 1 && out.stride(last) == 1, "x and out", "have a contiguous last dim",
            "strides that are not");
  v.inverse = inverse, v.count = x.numel() / v.rotation.dim, v.leading = (int)last;
  for (int64_t i = 0; i < last; i++)
    v.size[i] = x.size(i), v.x_stride[i] = x.stride(i), v.out_stride[i] = out.stride(i);
  v.x = (const char *)x.data_ptr(), v.out = (char *)out.data_ptr();
  return v;
}

namespace {

// Tokens start .. start + N of a store and the dense [B, H, N, D] tensor `x`.
Coding coding_of(const char *x_name, const Tensor &x, const char *store_name, const Tensors &packed, bool along_tokens,
                 int64_t start) {
  Coding c{};
  int64_t batch = size_at(x, 0), dim = size_at(x, 3);
  c.batch = batch, c.heads = size_at(x, 1), c.tokens = size_at(x, 2), c.start = start;
  c.x = dense_of(x_name, x, {-1, -1, -1, -1});
  KVQ_CHECK(start >= 0 && start <= INT64_MAX - c.tokens, "start", "be at least 0 and not overflow", start);
  c.along_tokens = along_tokens;
  c.blocks = c.tokens ? ceil_div(start % BLOCK_LEN + c.tokens, BLOCK_LEN) : 0;
  c.store = store_of(store_name, packed, along_tokens, batch, c.heads, start + c.tokens, dim);
  return c;
}

// Those of encode, whose errors call the store and the rule so.
Coding encoding_of(const char *x_name, const Tensor &x, const char *store_name, const Tensors &packed,
                   const char *rule_name, int64_t rule, bool along_tokens, int64_t start) {
  KVQ_CHECK(rule >= 0 && rule < NUM_SCALE_RULES, rule_name, "be an index of SCALE_RULES", rule);
  Coding c = coding_of(x_name, x, store_name, packed, along_tokens, start);
  c.rule = (int)rule;
  return c;
}

// The nine tensors of a store from levels, centre, balance, signs, blocks and matrix.
Tensors packed_of(const char *name, const Tensors &codec, const Tensor &sign, const Tensor &mag, const Tensor &scale) {
  KVQ_CHECK(codec.size() == NUM_PACKED_FIELDS - 3, name, "be six tensors", codec.size());
  return {sign, mag, scale, codec[0], codec[1], codec[2], codec[3], codec[4], codec[5]};
}

}  // namespace

Coding encode_problem(const Tensor &x, const Tensor &levels, const Tensor &centre, const Tensor &balance,
                      const Tensor &signs, const Tensor &blocks, const Tensor &matrix, int64_t rule, bool along_tokens,
                      int64_t start, const Tensor &sign, const Tensor &mag, const Tensor &scale) {
  return encoding_of("x", x, "store", {sign, mag, scale, levels, centre, balance, signs, blocks, matrix}, "rule", rule,
                     along_tokens, start);
}

Codings encode_kv_problem(const Tensor &keys, const Tensor &values, const Tensors &key_codec,
                          const Tensors &value_codec, int64_t key_rule, int64_t value_rule, int64_t start,
                          const Tensor &key_sign, const Tensor &key_mag, const Tensor &key_scale,
                          const Tensor &value_sign, const Tensor &value_mag, const Tensor &value_scale) {
  Tensors packed_keys = packed_of("key_codec", key_codec, key_sign, key_mag, key_scale);
  Tensors packed_values = packed_of("value_codec", value_codec, value_sign, value_mag, value_scale);
  return {encoding_of("keys", keys, "key", packed_keys, "key_rule", key_rule, false, start),
          encoding_of("values", values, "value", packed_values, "value_rule", value_rule, true, start)};
}

Coding decode_problem(const Tensors &packed, bool along_tokens, int64_t start, const Tensor &out) {
  return coding_of("out", out, "packed", packed, along_tokens, start);
}

namespace {

// Heads, rows and counts of attend, qk and pv for queries (or weights) `q` and exact keys (or values).
void check_heads(Attention &a, const Tensor &q, const char *name, const Tensor &exact, const char *exact_name) {
  int64_t query_heads = size_at(q, 1), heads = size_at(exact, 1);
  a.batch = size_at(q, 0), a.queries = size_at(q, 2), a.heads = heads;
  KVQ_CHECK(q.dim() == 4, name, "have 4 dims", text(q));
  KVQ_CHECK(exact.dim() == 4, exact_name, "have 4 dims", text(exact));
  KVQ_CHECK(heads > 0 && query_heads % heads == 0, name, "have a multiple of " + std::to_string(heads) + " heads",
            text(q));
  a.group = query_heads / heads, a.rows = a.group * a.queries;
  KVQ_CHECK(a.length >= 0, "length", "be at least 0", a.length);
  KVQ_CHECK(a.num_sinks >= 0 && a.num_sinks <= a.exact_len, "num_sinks", "be from 0 to the number of exact tokens",
            a.num_sinks);
}

}  // namespace

Attention attend_problem(const Tensor &q, const Tensors &keys, const Tensors &values, const Tensor &exact_keys,
                         const Tensor &exact_values, const OptionalTensor &mask, const OptionalTensor &sink_logits,
                         int64_t start, int64_t length, int64_t num_sinks, double scale, double softcap,
                         const Tensor &out, const Tensor &lse) {
  Attention a{};
  a.length = length, a.start = start, a.num_sinks = num_sinks, a.exact_len = size_at(exact_keys, 2);
  a.scale = (float)scale, a.softcap = (float)softcap, a.normalise = true, a.shared = values.empty();
  int64_t batch = size_at(q, 0), heads = size_at(exact_keys, 1), dim = size_at(q, 3),
          value_dim = a.shared ? dim : size_at(exact_values, 3);
  check_heads(a, q, "q", exact_keys, "exact_keys");
  KVQ_CHECK(start >= 0 && start <= length, "start", "be from 0 to length", start);
  a.dim = (int)dim, a.value_dim = (int)value_dim;
  a.q = dense_of("q", q, {-1, -1, -1, -1});
  a.exact_keys = dense_of("exact_keys", exact_keys, {batch, heads, -1, dim});
  a.keys = store_of("keys", keys, false, batch, heads, length, dim);
  if (!a.shared) {
    a.exact_values = dense_of("exact_values", exact_values, {batch, heads, a.exact_len, value_dim});
    a.values = store_of("values", values, true, batch, heads, length, value_dim);
  }
  a.out = dense_of("out", out, {batch, q.size(1), q.size(2), value_dim});
  a.lse = floats_of("lse", lse, {batch, q.size(1), q.size(2)}, a.lse_stride);
  if (mask) a.mask = mask_of(*mask, {batch, q.size(1), q.size(2), length + a.exact_len});
  if (sink_logits) {
    int64_t stride;
    a.sink_logits = floats_of("sink_logits", *sink_logits, {q.size(1)}, &stride);
    KVQ_CHECK(sink_logits->is_contiguous(), "sink_logits", "be contiguous", "stride " + std::to_string(stride));
  }
  return a;
}

Attention qk_problem(const Tensor &q, const Tensors &keys, const Tensor &exact_keys, int64_t length, int64_t num_sinks,
                     const Tensor &out) {
  Attention a{};
  a.length = length, a.num_sinks = num_sinks, a.exact_len = size_at(exact_keys, 2);
  int64_t batch = size_at(q, 0), heads = size_at(exact_keys, 1), dim = size_at(q, 3);
  check_heads(a, q, "q", exact_keys, "exact_keys");
  a.dim = (int)dim;
  a.q = dense_of("q", q, {-1, -1, -1, -1});
  a.exact_keys = dense_of("exact_keys", exact_keys, {batch, heads, -1, dim});
  a.keys = store_of("keys", keys, false, batch, heads, length, dim);
  a.out = dense_of("out", out, {batch, q.size(1), q.size(2), length + a.exact_len});
  return a;
}

Attention pv_problem(const Tensor &p, const Tensors &values, const Tensor &exact_values, int64_t length,
                     int64_t num_sinks, const Tensor &out) {
  Attention a{};
  a.length = length, a.num_sinks = num_sinks, a.exact_len = size_at(exact_values, 2);
  int64_t batch = size_at(p, 0), heads = size_at(exact_values, 1), dim = size_at(exact_values, 3);
  check_heads(a, p, "p", exact_values, "exact_values");
  a.value_dim = (int)dim;
  a.p = dense_of("p", p, {-1, -1, -1, length + a.exact_len});
  a.exact_values = dense_of("exact_values", exact_values, {batch, heads, -1, dim});
  a.values = store_of("values", values, true, batch, heads, length, dim);
  a.out = dense_of("out", out, {batch, p.size(1), p.size(2), dim});
  return a;
}

Pieces merge_problem(const Tensor &outs, const Tensor &lses, const Tensor &out, const Tensor &lse) {
  Pieces p{};
  KVQ_CHECK(outs.dim() == 5, "outs", "have 5 dims", text(outs));
  check_place("outs", outs);
  int64_t batch = outs.size(1), dim = outs.size(4);
  p.pieces = outs.size(0), p.batch = batch, p.heads = outs.size(2), p.queries = outs.size(3), p.dim = (int)dim;
  p.outs_dtype = dtype_of("outs", outs);
  KVQ_CHECK(dim <= 1 || outs.stride(4) == 1, "outs", "have a contiguous last dim", text(outs));
  for (int i = 0; i < 4; i++) p.outs_stride[i] = outs.stride(i);
  p.outs = (const char *)outs.data_ptr();
  p.lses = floats_of("lses", lses, {p.pieces, batch, p.heads, p.queries}, p.lses_stride);
  p.out = dense_of("out", out, {batch, p.heads, p.queries, dim});
  p.lse = floats_of("lse", lse, {batch, p.heads, p.queries}, p.lse_stride);
  return p;
}

}  // namespace kvq
