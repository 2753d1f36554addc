// qk_selected and attend_selected: attend's tasks over the tokens that a selection names, 32 of them gathered at a time.
// Keys and values are dense rows, or both packed along D: values take a bit transpose more than those packed along T.
#pragma once

struct Picked {
  const int32_t *token;
  int count;
  INLINE_MEMBER int64_t operator()(int i) const { return token[i < count ? i : count - 1]; }
};

INLINE int64_t selection_of(const Task &t) { return t.a.by_head ? query_head(t, 0) : t.h; }
INLINE const int32_t *indices_of(const Selection &s, const Task &t) {
  return s.indices + t.b * s.index_stride[0] + selection_of(t) * s.index_stride[1];
}
INLINE int64_t count_of(const Selection &s, const Task &t) {
  return s.count[t.b * s.count_stride + selection_of(t)];
}

// Asks for the rows of tokens that will be read soon: hardware cannot foresee which.
INLINE void prefetch_bytes(const void *from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)from + i);
}
INLINE void prefetch_picked(bool packed, const Dense &dense, const Store &s, int dim, const Task &t,
                            const Picked &picked) {
  int64_t words = ceil_div(dim, WORD_BITS);
  for (int i = 0; i < picked.count; i++) {
    if (!packed) {
      prefetch_bytes(row_at(dense, t.b, t.h, picked(i)), (int64_t)element_size(dense.dtype) * dim);
    } else {
      for (int plane = 0; plane < s.bits; plane++)
        prefetch_bytes(plane_at(s, t.b, t.h, picked(i), plane), 4 * words);
    }
  }
}

INLINE void load_picked_scales(const Store &s, const Task &t, const Picked &picked, float *to) {
  const uint16_t *from = s.scale + t.b * s.scale_stride[0] + t.h * s.scale_stride[1];
  uint16_t scale[TILE] = {};
  for (int i = 0; i < picked.count; i++) scale[i] = from[picked(i)];
  for (int i = 0; i < TILE; i += LANES) store(to + i, load_float16(scale + i));
}

// Words in key order: the rows side by side in `columns`, then as load_key_words.
NOINLINE Planes load_picked_words(const Store &s, const Task &t, const Picked &picked, uint32_t *words,
                                  uint32_t *columns) {
  int num_words = (int)ceil_div(s.dim, WORD_BITS);
  Planes planes;
  for (int p = 0; p < s.bits; p++) {
    const uint32_t *from = plane_at(s, t.b, t.h, 0, p);
    for (int i = 0; i < TILE; i++) {
      const uint32_t *row = from + picked(i) * plane_stride(s, p);
      for (int w = 0; w < num_words; w++) columns[i * num_words + w] = row[w];
    }
    planes.at[p] = words + p * num_words * TILE;
    load_plane_words(columns, num_words, num_words, words + p * num_words * TILE);
  }
  return planes;
}

// weights [rows, 32] = scale * q . k.
INLINE void picked_scores(const Selected &s, const Task &t, const Picked &picked, const Book &book, const Scratch &w) {
  const Attention &a = t.a;
  if (s.packed_keys) {
    load_picked_scales(a.keys, t, picked, w.vector);
    packed_scores(t, load_picked_words(a.keys, t, picked, w.words, w.columns), book, w.vector, a.scale, w);
  } else {
    exact_products(t, copy_exact(a.exact_keys, t.b, t.h, picked.count, a.dim, a.dim_pad, w.a, picked), a.scale, w);
  }
}

// acc [rows, value_pad] += weights [rows, 32] times the values.
INLINE void picked_sums(const Selected &s, const Task &t, const Picked &picked, const Book &book, const Scratch &w) {
  const Attention &a = t.a;
  if (s.packed_values) {
    load_picked_scales(a.values, t, picked, w.vector);
    packed_sums(t, a.values, load_turned_words(a.values, t.b, t.h, w.words, w.columns, picked), book, w.vector, w);
  } else {
    exact_sums(t, copy_exact(a.exact_values, t.b, t.h, picked.count, a.value_dim, a.value_pad, w.c, picked),
               picked.count, w);
  }
}

static void attend_selected(const Selected &s, const Attention &a, int64_t index, char *scratch) {
  Task t = task_of(a, index);
  Scratch w = carve(scratch, pad_of(a));
  const int32_t *indices = indices_of(s.selection, t);
  Range range = tokens_of(t);
  int64_t count = count_of(s.selection, t), stop = range.to < count ? range.to : count;
  Book key_book{}, value_book{};
  if (s.packed_keys) key_book = book_of(a.keys);
  if (s.packed_values) value_book = book_of(a.values);
  auto prefetch = [&](int64_t at) {
    if (at >= stop) return;
    Picked next = {indices + at, tile_count(at, stop)};
    prefetch_picked(s.packed_keys, a.exact_keys, a.keys, a.dim, t, next);
    prefetch_picked(s.packed_values, a.exact_values, a.values, a.value_dim, t, next);
  };
  begin(t, w, -__builtin_inff());
  prefetch(range.from);
  for (int64_t at = range.from; at < stop; at += TILE) {
    Picked picked = {indices + at, tile_count(at, stop)};
    prefetch(at + TILE);
    picked_scores(s, t, picked, key_book, w);
    uint32_t valid = picked.count == TILE ? ~0u : (1u << picked.count) - 1;
    if (weigh(t, {0, 0, TILE, picked.count, valid, picked.token}, w)) picked_sums(s, t, picked, value_book, w);
  }
  end(t, w);
}

static void qk_selected(const Selected &s, const Attention &a, int64_t index, char *scratch) {
  Task t = task_of(a, index);
  Scratch w = carve(scratch, pad_of(a));
  const int32_t *indices = indices_of(s.selection, t);
  Range range = tokens_of(t);
  int64_t count = count_of(s.selection, t);
  Book book{};
  if (s.packed_keys) book = book_of(a.keys);
  for (int64_t at = range.from; at < range.to; at += TILE) {
    int valid = at < count ? tile_count(at, count) : 0, width = tile_count(at, range.to);
    if (valid) picked_scores(s, t, {indices + at, valid}, book, w);
    for (int r = 0; r < t.rows; r++) {
      float *x = w.weights + r * TILE;
      fill(x + valid, TILE - valid, -__builtin_inff());
      store_row(x, width, row_at(a.out, t.b, query_head(t, r), query_token(t, r)) + 4 * at, FLOAT32);
    }
  }
}
