// attend, qk and pv of one task, and the preparation of queries.
#pragma once

INLINE int pad_of(const Attention &a) { return a.dim_pad > a.value_pad ? a.dim_pad : a.value_pad; }

// 32 flat rows of queries: as float32, their bias q . centre, and R (q * balance).
static void prepare(const Attention &a, int64_t tile, char *scratch) {
  Scratch w = carve(scratch, pad_of(a));
  const Store &s = a.keys;
  int pad = a.dim_pad;
  int64_t end = a.batch * a.heads * a.rows;
  fill(w.a, TILE * pad, 0);
  for (int r = 0; r < TILE && tile * TILE + r < end; r++) {
    int64_t flat = tile * TILE + r, head = flat / a.rows, row = flat % a.rows, b = head / a.heads, h = head % a.heads;
    float *query = a.query + flat * pad, *x = w.a + r * pad;
    load_padded(row_at(a.q, b, h * a.group + row / a.queries, row % a.queries), a.q.dtype, a.dim, query);
    __builtin_memcpy(x, query, sizeof(float) * pad);
    a.bias[flat] =
        s.centre ? dot_row(query, s.centre + b * s.centre_stride[0] + h * s.centre_stride[1], a.dim) : 0;
    if (s.balance) {
      const float *balance = s.balance + b * s.balance_stride[0] + h * s.balance_stride[1];
      for (int i = 0; i < a.dim; i++) x[i] *= balance[i];
    }
  }
  if (!is_identity(s.rotation)) rotate_rows(s.rotation, false, w.a, pad, w.b);
  for (int r = 0; r < TILE && tile * TILE + r < end; r++) {
    int64_t flat = tile * TILE + r, row = flat % a.rows, within = row % a.row_block, first = row - within;
    int64_t rows = a.rows - first < a.row_block ? a.rows - first : a.row_block;
    float *to = a.rotated + (flat - within) * pad + within * TILE;
    for (int d = 0; d < pad; d += TILE) __builtin_memcpy(to + d * rows, w.a + r * pad + d, sizeof(float) * TILE);
  }
}

// weights [rows, 32] = by * (scale[token] * (R q) . code values + bias) for a block of packed keys.
INLINE void packed_scores(const Task &t, const Planes &planes, const Book &book, const float *scale, float by,
                          const Scratch &w) {
  const Attention &a = t.a;
  const float *query = a.rotated + t.flat * a.dim_pad;
  int words = (int)ceil_div(a.dim, WORD_BITS);
  fill(w.weights, t.rows * TILE, 0);
  if (t.rows <= FEW_ROWS) {
    packed_product(a.keys.bits, t.rows, planes, words, TILE, query, book, w.weights, TILE);
  } else {  // many rows: unpack once, 32 dims at a time
    Planes at = planes;
    for (int d = 0; d < a.dim; d += TILE, query += t.rows * TILE) {
      expand(a.keys.bits, at, TILE, book, w.b, TILE);
      dense_product(t.rows, w.b, TILE, TILE, TILE, query, TILE, 1, w.weights, TILE);
      for (int p = 0; p < a.keys.bits; p++) at.at[p] += TILE;
    }
  }
  for (int r = 0; r < t.rows; r++)
    for (int i = 0; i < TILE; i += LANES) {
      float *x = w.weights + r * TILE + i;
      store(x, (load(x) * load(scale + i) + splat(a.bias[t.flat + r])) * splat(by));
    }
}

// acc [rows, value_pad] += weights [rows, 32] times the code values of a block.
INLINE void packed_sums(const Task &t, const Store &s, const Planes &planes, const Book &book, const float *scale,
                        const Scratch &w) {
  for (int r = 0; r < t.rows; r++)
    for (int i = 0; i < TILE; i += LANES)
      store(w.weights + r * TILE + i, load(w.weights + r * TILE + i) * load(scale + i));
  int pad = t.a.value_pad;
  if (t.rows <= FEW_ROWS) {
    packed_product(s.bits, t.rows, planes, 1, pad, w.weights, book, t.acc, pad);
  } else {
    expand(s.bits, planes, pad, book, w.b, pad);
    dense_product(t.rows, w.b, pad, TILE, pad, w.weights, TILE, 1, t.acc, pad);
  }
}

// A tile [32, ld] of exact tokens as float32: a copy, or the tensor itself where its rows have the right form.
struct ExactTile {
  const float *rows;
  int64_t ld;
};
template <class Token>
INLINE ExactTile copy_exact(const Dense &x, int64_t b, int64_t h, int count, int dim, int pad, float *copy,
                            Token token) {
  for (int i = 0; i < count; i++) load_padded(row_at(x, b, h, token(i)), x.dtype, dim, copy + i * pad);
  fill(copy + count * pad, (int64_t)(TILE - count) * pad, 0);
  return {copy, pad};
}
INLINE ExactTile load_exact(const Dense &x, int64_t b, int64_t h, int64_t at, int count, int dim, int pad,
                            float *copy) {
  if (x.dtype == FLOAT32 && dim == pad && count == TILE) return {(const float *)row_at(x, b, h, at), x.stride[2]};
  return copy_exact(x, b, h, count, dim, pad, copy, [&](int i) { return at + i; });
}

// weights [rows, 32] = by * q . k for a tile of exact keys; calls between() once in 32 dims.
template <class Between>
INLINE void exact_products(const Task &t, const ExactTile &keys, float by, const Scratch &w, Between between) {
  const Attention &a = t.a;
  fill(w.weights, t.rows * TILE, 0);
  for (int d = 0; d < a.dim; d += TILE) {
    transpose(keys.rows + d, keys.ld, TILE, TILE, w.b, TILE);
    dense_product(t.rows, w.b, TILE, a.dim - d < TILE ? a.dim - d : TILE, TILE, a.query + t.flat * a.dim_pad + d,
                  a.dim_pad, 1, w.weights, TILE);
    between();
  }
  scale_row(w.weights, t.rows * TILE, by);
}
INLINE ExactTile exact_scores(const Task &t, int64_t at, int count, float by, const Scratch &w) {
  ExactTile keys = load_exact(t.a.exact_keys, t.b, t.h, at, count, t.a.dim, t.a.dim_pad, w.a);
  exact_products(t, keys, by, w, [] {});
  return keys;
}

INLINE ExactTile exact_values(const Task &t, int64_t at, int count, const Scratch &w) {
  return load_exact(t.a.exact_values, t.b, t.h, at, count, t.a.value_dim, t.a.value_pad, w.c);
}
INLINE void exact_sums(const Task &t, const ExactTile &values, int count, const Scratch &w) {
  int pad = t.a.value_pad;
  dense_product(t.rows, values.rows, values.ld, count, pad, w.weights, TILE, 1, t.acc, pad);
}

INLINE int tile_count(int64_t at, int64_t end) { return (int)(end - at < TILE ? end - at : TILE); }

static void attend(const Attention &a, int64_t index, char *scratch) {
  Task t = task_of(a, index);
  Scratch w = carve(scratch, pad_of(a));
  Range range = tokens_of(t);
  begin(t, w, -__builtin_inff());
#if defined(KVQ_WORD_DOTS)
  if (t.split < a.packed_splits && a.rows <= FEW_WORD_ROWS) {
    attend_words(t, range, w);
  } else
#endif
  if (t.split < a.packed_splits) {
    const Store &values = a.shared ? a.keys : a.values;
    Book key_book = book_of(a.keys), value_book = book_of(values);
    for (int64_t block = (range.from > a.start ? range.from : a.start) / TILE; block * TILE < range.to; block++) {
      Columns columns = packed_columns(a, block, a.start, a.length);
      load_scales(a.keys, t.b, t.h, block, columns.valid, w.vector);
      packed_scores(t, load_key_words(a.keys, t.b, t.h, block, w.words), key_book, w.vector, a.scale, w);
      if (!weigh(t, columns, w)) continue;
      if (!a.shared) load_scales(values, t.b, t.h, block, columns.valid, w.vector);
      Planes planes = a.shared ? load_shared_words(a.keys, t.b, t.h, block, w.words, w.columns)
                               : load_value_words(values, t.b, t.h, block, w.words);
      packed_sums(t, values, planes, value_book, w.vector, w);
    }
  } else {
    for (int64_t at = range.from; at < range.to; at += TILE) {
      int count = tile_count(at, range.to);
      ExactTile keys = exact_scores(t, at, count, a.scale, w);
      weigh(t, exact_columns(a, at, count), w);
      exact_sums(t, a.shared ? keys : exact_values(t, at, count, w), count, w);
    }
  }
  end(t, w);
}

static void qk(const Attention &a, int64_t index, char *scratch) {
  Task t = task_of(a, index);
  Scratch w = carve(scratch, pad_of(a));
  Range range = tokens_of(t);
  bool packed = t.split < a.packed_splits;
  Book book = book_of(a.keys);
  for (int64_t at = range.from; at < range.to; at += TILE) {
    Columns columns =
        packed ? packed_columns(a, at / TILE, 0, a.length) : exact_columns(a, at, tile_count(at, range.to));
    if (packed) {
      load_scales(a.keys, t.b, t.h, at / TILE, columns.valid, w.vector);
      packed_scores(t, load_key_words(a.keys, t.b, t.h, at / TILE, w.words), book, w.vector, 1, w);
    } else {
      exact_scores(t, at, columns.count, 1, w);
    }
    for (int r = 0; r < t.rows; r++) {
      char *row = row_at(a.out, t.b, query_head(t, r), query_token(t, r));
      for_columns(columns, [&](int from, int count, int64_t column) {
        store_row(w.weights + r * TILE + from, count, row + element_size(a.out.dtype) * column, a.out.dtype);
      });
    }
  }
}

static void pv(const Attention &a, int64_t index, char *scratch) {
  Task t = task_of(a, index);
  Scratch w = carve(scratch, pad_of(a));
  Range range = tokens_of(t);
  bool packed = t.split < a.packed_splits;
  Book book = book_of(a.values);
  begin(t, w, 0);
  for (int64_t at = range.from; at < range.to; at += TILE) {
    Columns columns =
        packed ? packed_columns(a, at / TILE, 0, a.length) : exact_columns(a, at, tile_count(at, range.to));
    for (int r = 0; r < t.rows; r++) {
      float *p = w.weights + r * TILE;
      const char *row = row_at(a.p, t.b, query_head(t, r), query_token(t, r));
      fill(p, TILE, 0);
      for_columns(columns, [&](int from, int count, int64_t column) {
        load_row(row + element_size(a.p.dtype) * column, a.p.dtype, count, p + from);
      });
      for (int i = 0; i < TILE; i += LANES) store(w.sums + r * TILE, load(w.sums + r * TILE) + load(p + i));
    }
    if (packed) {
      load_scales(a.values, t.b, t.h, at / TILE, columns.valid, w.vector);
      packed_sums(t, a.values, load_value_words(a.values, t.b, t.h, at / TILE, w.words), book, w.vector, w);
    } else {
      exact_sums(t, exact_values(t, at, columns.count, w), columns.count, w);
    }
  }
  end(t, w);
}
