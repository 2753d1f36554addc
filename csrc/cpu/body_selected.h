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

// Asks for what the next tile reads, a few cache lines at a time between the steps of this one: hardware cannot foresee
// which rows those are, and waits for no more than some twenty lines at once.
struct Ahead {
  struct Stream {  // rows of `bytes`, `stride` bytes from one token to the next
    const char *base;
    int64_t stride, bytes;
  };
  Stream streams[2 * MAX_BITS];
  int num_streams = 0, stream = 0, i = 0, share = 0;
  int64_t offset = 0, num_lines = 0;
  Picked next{};

  INLINE_MEMBER void add(const char *base, int64_t stride, int64_t bytes) {
    streams[num_streams++] = {base, stride, bytes};
    num_lines += ceil_div(bytes, 64);
  }
  INLINE_MEMBER void add(bool packed, const Dense &x, const Store &s, int dim, int64_t b, int64_t h) {
    int words = (int)ceil_div(dim, WORD_BITS);
    int size = element_size(x.dtype);
    if (!packed) return add(row_at(x, b, h, 0), size * x.stride[2], (int64_t)size * dim);
    for (int plane = 0; plane < s.bits; plane++)
      add((const char *)plane_at(s, b, h, 0, plane), 4 * plane_stride(s, plane), 4 * words);
  }
  // Starts with the next tile, which is asked for in `steps` steps.
  INLINE_MEMBER void begin(const Picked &tokens, int steps) {
    next = tokens, stream = i = 0, offset = 0;
    share = (int)ceil_div(num_lines * next.count, steps);
  }
  INLINE_MEMBER void operator()() {
    for (int n = 0; n < share && next.count && stream < num_streams; n++) {
      const Stream &s = streams[stream];
      __builtin_prefetch(s.base + next.token[i] * s.stride + offset);
      offset += 64;
      if (offset >= s.bytes) offset = 0, i++;
      if (i == next.count) i = 0, stream++;
    }
  }
};

// The tokens of a tile, with a step before each.
template <class Step>
struct Stepping {
  const Picked &picked;
  Step &step;
  INLINE_MEMBER int64_t operator()(int i) const {
    step();
    return picked(i);
  }
};

INLINE void load_picked_scales(const Store &s, const Task &t, const Picked &picked, float *to) {
  const uint16_t *from = s.scale + t.b * s.scale_stride[0] + t.h * s.scale_stride[1];
  uint16_t scale[TILE] = {};
  for (int i = 0; i < picked.count; i++) scale[i] = from[picked(i)];
  for (int i = 0; i < TILE; i += LANES) store(to + i, load_float16(scale + i));
}

// Words in key order: the rows side by side in `columns`, then as load_key_words.
template <class Token>
INLINE Planes load_picked_words(const Store &s, const Task &t, uint32_t *words, uint32_t *columns, Token token) {
  int num_words = (int)ceil_div(s.dim, WORD_BITS);
  Planes planes;
  for (int p = 0; p < s.bits; p++) {
    const uint32_t *from = plane_at(s, t.b, t.h, 0, p);
    for (int i = 0; i < TILE; i++) {
      const uint32_t *row = from + token(i) * plane_stride(s, p);
      for (int w = 0; w < num_words; w++) columns[i * num_words + w] = row[w];
    }
    planes.at[p] = words + p * num_words * TILE;
    load_plane_words(columns, num_words, num_words, words + p * num_words * TILE);
  }
  return planes;
}

// weights [rows, 32] = scale * q . k.
template <class Between>
INLINE void picked_scores(const Selected &s, const Task &t, const Picked &picked, const Book &book, const Scratch &w,
                          Between &between) {
  const Attention &a = t.a;
  if (s.packed_keys) {
    load_picked_scales(a.keys, t, picked, w.vector);
    Planes planes = load_picked_words(a.keys, t, w.words, w.columns, Stepping<Between>{picked, between});
    packed_scores(t, planes, book, w.vector, a.scale, w);
  } else {
    ExactTile keys = copy_exact(a.exact_keys, t.b, t.h, picked.count, a.dim, a.dim_pad, w.a,
                                Stepping<Between>{picked, between});
    exact_products(t, keys, a.scale, w, between);
  }
}

// acc [rows, value_pad] += weights [rows, 32] times the values.
template <class Between>
INLINE void picked_sums(const Selected &s, const Task &t, const Picked &picked, const Book &book, const Scratch &w,
                        Between &between) {
  const Attention &a = t.a;
  if (s.packed_values) {
    load_picked_scales(a.values, t, picked, w.vector);
    Planes planes =
        load_turned_words(a.values, t.b, t.h, w.words, w.columns, Stepping<Between>{picked, between});
    packed_sums(t, a.values, planes, book, w.vector, w);
  } else {
    ExactTile values = copy_exact(a.exact_values, t.b, t.h, picked.count, a.value_dim, a.value_pad, w.c,
                                  Stepping<Between>{picked, between});
    exact_sums(t, values, picked.count, w);
  }
}

// Weights of the logits of the tokens, as weigh().
INLINE bool weigh_picked(const Task &t, const Picked &picked, const Scratch &w) {
  uint32_t valid = picked.count == TILE ? ~0u : (1u << picked.count) - 1;
  return weigh(t, {0, 0, TILE, picked.count, valid, picked.token}, w);
}

// The sums of a task over tokens range.from .. range.to of `indices`, from copies of their keys and values.
INLINE void attend_copies(const Selected &s, const Task &t, const int32_t *indices, const Range &range,
                          const Scratch &w) {
  const Attention &a = t.a;
  Book key_book{}, value_book{};
  if (s.packed_keys) key_book = book_of(a.keys);
  if (s.packed_values) value_book = book_of(a.values);
  Ahead ahead;
  int steps = (s.packed_keys ? a.keys.bits * TILE : TILE + a.dim / TILE) + (s.packed_values ? a.values.bits : 1) * TILE;
  ahead.add(s.packed_keys, a.exact_keys, a.keys, a.dim, t.b, t.h);
  ahead.add(s.packed_values, a.exact_values, a.values, a.value_dim, t.b, t.h);
  for (int64_t at = range.from; at < range.to; at += TILE) {
    Picked picked = {indices + at, tile_count(at, range.to)};
    ahead.begin({indices + at + TILE, at + TILE < range.to ? tile_count(at + TILE, range.to) : 0}, steps);
    picked_scores(s, t, picked, key_book, w, ahead);
    if (weigh_picked(t, picked, w)) picked_sums(s, t, picked, value_book, w, ahead);
  }
}

INLINE void find_rows(const Dense &x, const Task &t, const Picked &picked, const char **rows) {
  const char *base = row_at(x, t.b, t.h, 0);
  int64_t stride = element_size(x.dtype) * x.stride[2];
  for (int i = 0; i < TILE; i++) rows[i] = base + picked(i) * stride;
}

// As attend_copies, of dense keys and values where they lie.
INLINE void attend_in_place(const Task &t, const int32_t *indices, const Range &range, const Scratch &w) {
  const char *keys[2][TILE], *values[2][TILE];
  Picked picked = {indices + range.from, tile_count(range.from, range.to)};
  find_rows(t.a.exact_keys, t, picked, keys[0]);
  find_rows(t.a.exact_values, t, picked, values[0]);
  int now = 0;
  for (int64_t at = range.from; at < range.to; at += TILE, now = 1 - now) {
    int64_t after = at + TILE < range.to ? at + TILE : at;
    Picked next = {indices + after, tile_count(after, range.to)};
    find_rows(t.a.exact_keys, t, next, keys[1 - now]);
    find_rows(t.a.exact_values, t, next, values[1 - now]);
    scores_in_place(t, {keys[now], keys[1 - now]}, w);
    if (weigh_picked(t, picked, w)) sums_in_place(t, {values[now], values[1 - now]}, picked.count, w);
    picked = next;
  }
}

static void attend_selected(const Selected &s, const Attention &a, int64_t index, char *scratch) {
  Task t = task_of(a, index);
  Scratch w = carve(scratch, pad_of(a));
  const int32_t *indices = indices_of(s.selection, t);
  Range range = tokens_of(t);
  int64_t count = count_of(s.selection, t);
  if (count < range.to) range.to = count;
  begin(t, w, -__builtin_inff());
  if (range.from < range.to) {
    if (!s.packed_keys && !s.packed_values && fits_in_place(t))
      attend_in_place(t, indices, range, w);
    else
      attend_copies(s, t, indices, range, w);
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
  auto none = [] {};
  for (int64_t at = range.from; at < range.to; at += TILE) {
    int valid = at < count ? tile_count(at, count) : 0, width = tile_count(at, range.to);
    if (valid) picked_scores(s, t, {indices + at, valid}, book, w, none);
    for (int r = 0; r < t.rows; r++) {
      float *x = w.weights + r * TILE;
      fill(x + valid, TILE - valid, -__builtin_inff());
      store_row(x, width, row_at(a.out, t.b, query_head(t, r), query_token(t, r)) + 4 * at, FLOAT32);
    }
  }
}
