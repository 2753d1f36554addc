#include "sparse_problems.h"

namespace kvq {

namespace {

int64_t words_of(int64_t dim) { return ceil_div(dim, WORD_BITS); }

HeadVectors head_vectors(const char *name, const Tensor &x, int64_t batch, int64_t heads, int64_t dim) {
  HeadVectors v;
  v.data = vectors_of(name, x, batch, heads, dim, v.stride);
  return v;
}

int64_t group_of(const char *name, const Tensor &q, int64_t heads) {
  KVQ_CHECK(q.dim() == 4, name, "have 4 dims", text(q));
  KVQ_CHECK(heads > 0 && q.size(1) % heads == 0, name, "have a multiple of " + std::to_string(heads) + " heads",
            text(q));
  return q.size(1) / heads;
}

void check_start(int64_t start, int64_t tokens) {
  KVQ_CHECK(start >= 0 && start <= INT64_MAX - tokens, "start", "be at least 0 and not overflow", start);
}

void check_capacity(const char *name, const Tensor &x, int64_t tokens) {
  KVQ_CHECK(size_at(x, 2) >= tokens, name, "have a capacity of at least " + std::to_string(tokens), text(x));
}

QueryCode code_of(const Tensor &planes, const Tensor &terms, int64_t batch, int64_t query_heads, int64_t queries,
                  int64_t dim) {
  QueryCode c;
  c.planes =
      (uint32_t *)ints_of("planes", planes, {batch, query_heads, queries, QUERY_BITS, words_of(dim)}, c.plane_stride);
  int64_t strides[4];
  c.terms = floats_of("terms", terms, {batch, query_heads, queries, 4}, strides);
  KVQ_CHECK(strides[3] == 1, "terms", "have a contiguous last dim", "stride " + std::to_string(strides[3]));
  for (int i = 0; i < 3; i++) c.term_stride[i] = strides[i];
  return c;
}

// An index that holds tokens up to `tokens`; `own_signs`: it may leave them to the store.
SignIndex index_of(const Tensor &sign, const Tensor &factor, const Tensor &bias, int64_t batch, int64_t heads,
                   int64_t tokens, int64_t dim, bool own_signs) {
  SignIndex s{};
  if (sign.numel() || !own_signs) {
    check_capacity("sign", sign, tokens);
    s.sign = (uint32_t *)ints_of("sign", sign, {batch, heads, -1, words_of(dim)}, s.sign_stride);
  }
  check_capacity("factor", factor, tokens);
  s.factor = halves_of("factor", factor, {batch, heads, -1}, s.factor_stride);
  if (bias.numel()) {
    check_capacity("bias", bias, tokens);
    s.bias = halves_of("bias", bias, {batch, heads, -1}, s.bias_stride);
  }
  return s;
}

// A selection for `query_heads` query heads of `heads` key/value heads.
Selection selection_of(const Tensor &indices, const Tensor &count, int64_t batch, int64_t query_heads, int64_t heads) {
  Selection s;
  s.selections = size_at(indices, 1), s.capacity = size_at(indices, 2);
  s.indices = ints_of("indices", indices, {batch, -1, -1}, s.index_stride);
  KVQ_CHECK(s.selections == query_heads || s.selections == heads, "indices",
            "have a selection for each of " + std::to_string(heads) + " key heads or each of " +
                std::to_string(query_heads) + " query heads",
            text(indices));
  s.count = ints_of("count", count, {batch, s.selections}, &s.count_stride);
  return s;
}

void check_half_or_float(const char *name, const Dense &x) {
  KVQ_CHECK(x.dtype != BFLOAT16, name, "be float32 or float16", "bfloat16");
}

}  // namespace

QueryCoding quantise_query_problem(const Tensor &q, const Tensor &query_centre, const Tensor &centre,
                                   const Tensor &balance, const Tensor &signs, const Tensor &blocks,
                                   const Tensor &matrix, double scale, const Tensor &planes, const Tensor &terms) {
  QueryCoding c{};
  c.q = dense_of("q", q, {-1, -1, -1, -1});
  int64_t query_heads = q.size(1), dim = q.size(3);
  c.batch = q.size(0), c.queries = q.size(2), c.heads = 1, c.dim = (int)dim;
  for (const Tensor *x : {&balance, &centre, &query_centre})
    if (x->numel() && x->dim() >= 2 && x->size(x->dim() - 2) > c.heads) c.heads = x->size(x->dim() - 2);
  if (c.heads == 1) c.heads = query_heads;  // the same vectors for all, or none
  c.group = group_of("q", q, c.heads);
  c.rotation = rotation_of(signs, blocks, matrix, dim);
  c.query_centre = head_vectors("query_centre", query_centre, c.batch, c.heads, dim);
  c.centre = head_vectors("centre", centre, c.batch, c.heads, dim);
  c.balance = head_vectors("balance", balance, c.batch, c.heads, dim);
  c.scale = (float)scale;
  c.code = code_of(planes, terms, c.batch, query_heads, c.queries, dim);
  return c;
}

Indexing index_keys_problem(const Tensor &x, const Tensor &query_centre, const Tensor &centre, const Tensor &balance,
                            const Tensor &signs, const Tensor &blocks, const Tensor &matrix, int64_t start,
                            const Tensor &sign, const Tensor &factor, const Tensor &bias) {
  Indexing n{};
  n.x = dense_of("x", x, {-1, -1, -1, -1});
  int64_t dim = x.size(3);
  n.batch = x.size(0), n.heads = x.size(1), n.tokens = x.size(2), n.start = start, n.dim = (int)dim;
  check_start(start, n.tokens);
  n.blocks = n.tokens ? ceil_div(start % BLOCK_LEN + n.tokens, BLOCK_LEN) : 0;
  n.rotation = rotation_of(signs, blocks, matrix, dim);
  n.query_centre = head_vectors("query_centre", query_centre, n.batch, n.heads, dim);
  n.centre = head_vectors("centre", centre, n.batch, n.heads, dim);
  n.balance = head_vectors("balance", balance, n.batch, n.heads, dim);
  KVQ_CHECK(!n.query_centre.data || bias.numel() || !factor.numel(), "bias",
            "hold a value a token where there is a query_centre", text(bias));
  n.index = index_of(sign, factor, bias, n.batch, n.heads, start + n.tokens, dim, true);
  return n;
}

SignScan sign_scores_problem(const Tensor &planes, const Tensor &terms, const Tensor &sign, const Tensor &factor,
                             const Tensor &bias, int64_t head_dim, double scale, int64_t start, const Tensor &out,
                             const char *out_name) {
  SignScan s{};
  KVQ_CHECK(sign.dim() == 4, "sign", "have 4 dims", text(sign));
  s.out = dense_of(out_name, out, {-1, -1, -1, -1});
  check_half_or_float(out_name, s.out);
  s.batch = out.size(0), s.heads = size_at(sign, 1), s.queries = out.size(2), s.tokens = out.size(3);
  s.group = group_of(out_name, out, s.heads);
  KVQ_CHECK(head_dim > 0 && head_dim <= MAX_HEAD_DIM, "head_dim", "be from 1 to 512", head_dim);
  s.dim = (int)head_dim, s.start = start, s.scale = (float)scale;
  check_start(start, s.tokens);
  s.code = code_of(planes, terms, s.batch, out.size(1), s.queries, head_dim);
  s.index = index_of(sign, factor, bias, s.batch, s.heads, start + s.tokens, head_dim, false);
  return s;
}

TopP top_p_select_problem(const Tensor &scores, const Tensor &exact_lse, const OptionalTensor &mask,
                          const OptionalTensor &candidates, double top_p, const Tensor &indices, const Tensor &count) {
  TopP t{};
  t.scores = dense_of("scores", scores, {-1, -1, -1, -1});
  check_half_or_float("scores", t.scores);
  t.batch = scores.size(0), t.query_heads = scores.size(1), t.queries = scores.size(2), t.columns = scores.size(3);
  t.exact_lse = floats_of("exact_lse", exact_lse, {t.batch, t.query_heads, t.queries}, t.lse_stride);
  KVQ_CHECK(top_p >= 0, "top_p", "be at least 0", top_p);
  t.top_p = (float)top_p;
  int64_t selections = size_at(indices, 1);
  KVQ_CHECK(selections > 0 && t.query_heads % selections == 0, "indices",
            "have a divisor of " + std::to_string(t.query_heads) + " selections", text(indices));
  t.selection = selection_of(indices, count, t.batch, t.query_heads, selections);
  if (candidates)
    t.candidates = ints_of("candidates", *candidates, {t.batch, selections, t.columns}, t.candidate_stride);
  if (mask) {
    t.mask_columns = candidates ? size_at(*mask, 3) : t.columns;
    t.mask = mask_of(*mask, {t.batch, t.query_heads, t.queries, t.mask_columns});
  }
  return t;
}

namespace {

// Keys or values that are selected from: one dense tensor or the nine of a store packed along D. Returns whether
// packed.
bool source_of(const char *name, const Tensors &from, int64_t batch, int64_t heads, int64_t tokens, int64_t dim,
               Dense &dense, Store &store) {
  KVQ_CHECK(from.size() == 1 || from.size() == NUM_PACKED_FIELDS, name, "be one tensor or nine", from.size());
  bool packed = from.size() > 1;
  if (packed)
    store = store_of(name, from, false, batch, heads, tokens, dim);
  else
    dense = dense_of(name, from[0], {batch, heads, tokens, dim});
  return packed;
}

int64_t capacity_of(const Tensors &from) {
  if (from.size() == 1) return size_at(from[0], 2);
  return from.size() == NUM_PACKED_FIELDS ? size_at(from[SCALE], 2) : 0;
}

Selected selected_of(const Tensor &q, const Tensors &keys, const Tensor &indices, const Tensor &count, double scale) {
  Selected s{};
  Attention &a = s.attention;
  KVQ_CHECK(!keys.empty(), "keys", "be one tensor or nine", "none");
  a.q = dense_of("q", q, {-1, -1, -1, -1});
  a.batch = q.size(0), a.heads = size_at(keys[0], 1), a.queries = q.size(2), a.dim = (int)q.size(3);
  a.group = group_of("q", q, a.heads), a.rows = a.group * a.queries, a.scale = (float)scale;
  s.tokens = capacity_of(keys);
  s.packed_keys = source_of("keys", keys, a.batch, a.heads, s.tokens, a.dim, a.exact_keys, a.keys);
  s.selection = selection_of(indices, count, a.batch, q.size(1), a.heads);
  a.by_head = s.selection.selections != a.heads;
  return s;
}

}  // namespace

Selected qk_selected_problem(const Tensor &q, const Tensors &keys, const Tensor &indices, const Tensor &count,
                             double scale, const Tensor &out) {
  Selected s = selected_of(q, keys, indices, count, scale);
  s.attention.out = dense_of("out", out, {q.size(0), q.size(1), q.size(2), s.selection.capacity});
  KVQ_CHECK(s.attention.out.dtype == FLOAT32, "out", "be float32", text(out));
  return s;
}

Selected attend_selected_problem(const Tensor &q, const Tensors &keys, const Tensors &values, const Tensor &indices,
                                 const Tensor &count, const OptionalTensor &mask, double scale, double softcap,
                                 const Tensor &out, const Tensor &lse) {
  Selected s = selected_of(q, keys, indices, count, scale);
  Attention &a = s.attention;
  a.softcap = (float)softcap, a.normalise = true, a.value_dim = (int)size_at(out, 3);
  int64_t tokens = capacity_of(values);
  s.packed_values = source_of("values", values, a.batch, a.heads, tokens, a.value_dim, a.exact_values, a.values);
  if (tokens < s.tokens) s.tokens = tokens;
  a.out = dense_of("out", out, {a.batch, q.size(1), a.queries, a.value_dim});
  a.lse = floats_of("lse", lse, {a.batch, q.size(1), a.queries}, a.lse_stride);
  if (mask) {
    a.mask = mask_of(*mask, {a.batch, q.size(1), a.queries, size_at(*mask, 3)});
    if (size_at(*mask, 3) != 1 && size_at(*mask, 3) < s.tokens) s.tokens = size_at(*mask, 3);
  }
  return s;
}

Gathering gather_selected_problem(const Tensor &x, const Tensor &indices, const Tensor &count, const Tensor &out) {
  Gathering g{};
  KVQ_CHECK(x.dim() == 4, "x", "have 4 dims", text(x));
  KVQ_CHECK(x.is_cpu() || in_place(x), "x", "be on the CPU or on " + place(), device_text(x));
  g.batch = x.size(0), g.heads = x.size(1), g.tokens = x.size(2);
  int64_t selections = size_at(indices, 1), size = (int64_t)x.element_size();
  KVQ_CHECK(g.heads > 0 && selections > 0 && selections % g.heads == 0, "indices",
            "have a multiple of " + std::to_string(g.heads) + " selections", text(indices));
  g.selection = selection_of(indices, count, g.batch, selections, selections);
  check_shape("out", out, {g.batch, selections, g.selection.capacity, x.size(3)});
  KVQ_CHECK(out.scalar_type() == x.scalar_type(), "out", "have the dtype of x, as in " + text(x), text(out));
  check_last_dim("x", x);
  check_last_dim("out", out);
  for (int i = 0; i < 3; i++) g.x_stride[i] = x.stride(i) * size, g.out_stride[i] = out.stride(i) * size;
  g.x = (const char *)x.data_ptr(), g.out = (char *)out.data_ptr(), g.row_bytes = x.size(3) * size;
  return g;
}

}  // namespace kvq
