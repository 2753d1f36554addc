// One task of attention (a block of rows of one head over one split of its tokens) and its online softmax.
#pragma once

struct Task {
  const Attention &a;
  int64_t b, h, row, flat, split;  // first row within the head, and flat
  int rows;
  float *acc, *state;  // of this task in the call's scratch
};

INLINE Task task_of(const Attention &a, int64_t index) {
  int64_t splits = a.packed_splits + a.exact_splits;
  int64_t split = index % splits, block = index / splits % a.row_blocks, head = index / splits / a.row_blocks;
  int64_t row = block * a.row_block, left = a.rows - row;
  return {a,
          head / a.heads,
          head % a.heads,
          row,
          head * a.rows + row,
          split,
          (int)(left < a.row_block ? left : a.row_block),
          a.partial + index * a.row_block * a.value_pad,
          a.state + index * a.row_block * 2};
}

struct Range {
  int64_t from, to;
};
INLINE Range tokens_of(const Task &t) {
  bool packed = t.split < t.a.packed_splits;
  int64_t from = (packed ? t.split : t.split - t.a.packed_splits) * t.a.split_len,
          end = packed ? t.a.length : t.a.exact_len;
  return {from, from + t.a.split_len < end ? from + t.a.split_len : end};
}

// 32 tokens side by side and where they stand in the order of masks, scores and weights: tokens below `cut` from column
// first, the others from column second. A tile of exact tokens may hold sinks and recent tokens. Selected tokens stand in
// the columns that `picked` names.
struct Columns {
  int64_t first, second;
  int cut, count;
  uint32_t valid;
  const int32_t *picked = nullptr;
};

INLINE Columns packed_columns(const Attention &a, int64_t block, int64_t start, int64_t stop) {
  int64_t left = a.length - block * TILE;
  return {a.num_sinks + block * TILE, 0, TILE, (int)(left < TILE ? left : TILE), valid_tokens(block, start, stop)};
}
INLINE Columns exact_columns(const Attention &a, int64_t at, int count) {
  int64_t cut = a.num_sinks - at;
  cut = cut < 0 ? 0 : cut > count ? count : cut;
  return {at, at + a.length, (int)cut, count, count == TILE ? ~0u : (1u << count) - 1};
}

// Calls run(token of the tile, count, column) for the one or two runs of columns.
template <class Run>
INLINE void for_columns(const Columns &c, Run run) {
  int first = c.cut < c.count ? c.cut : c.count;
  if (first > 0) run(0, first, c.first);
  if (c.count > first) run(first, c.count - first, c.second + first);
}

INLINE int64_t query_head(const Task &t, int r) { return t.h * t.a.group + (t.row + r) / t.a.queries; }
INLINE int64_t query_token(const Task &t, int r) { return (t.row + r) % t.a.queries; }

// Applies the mask from element `at` on to n scores; score i stands in column(i).
template <class Column>
INLINE void mask_row(const Mask &m, int64_t at, int64_t n, float *x, Column column) {
  if (m.boolean) {
    const uint8_t *mask = (const uint8_t *)m.data + at;
    for (int64_t i = 0; i < n; i++) x[i] = mask[column(i) * m.stride[3]] ? x[i] : -__builtin_inff();
  } else {
    const float *mask = (const float *)m.data + at;
    for (int64_t i = 0; i < n; i++) x[i] += mask[column(i) * m.stride[3]];
  }
}

INLINE void apply_mask(const Task &t, int r, const Columns &columns, float *logits) {
  const Mask &m = t.a.mask;
  int64_t at = t.b * m.stride[0] + query_head(t, r) * m.stride[1] + query_token(t, r) * m.stride[2];
  if (columns.picked)
    return mask_row(m, at, columns.count, logits, [&](int64_t i) { return (int64_t)columns.picked[i]; });
  for_columns(columns, [&](int from, int count, int64_t column) {
    mask_row(m, at + column * m.stride[3], count, logits + from, [](int64_t i) { return i; });
  });
}

// Softcap, mask and ragged ends of the logits [32] of row r.
INLINE void adjust_logits(const Task &t, int r, const Columns &columns, float *x) {
  const Attention &a = t.a;
  if (a.softcap != 0)
    for (int i = 0; i < TILE; i += LANES) store(x + i, tanh_of(load(x + i) * splat(1 / a.softcap)) * splat(a.softcap));
  if (a.mask.data) apply_mask(t, r, columns, x);
  if (columns.valid != ~0u)
    for (int i = 0; i < TILE; i++)
      if (!(columns.valid >> i & 1)) x[i] = -__builtin_inff();
}

// A new maximum of row r: rescales what was summed before.
INLINE void raise_maximum(const Task &t, int r, float maximum_now, const Scratch &w) {
  float by = w.maxima[r] == -__builtin_inff() ? 0 : exp_one(w.maxima[r] - maximum_now);
  store(w.sums + r * TILE, load(w.sums + r * TILE) * splat(by));
  scale_row(t.acc + r * t.a.value_pad, t.a.value_pad, by);
  w.maxima[r] = maximum_now;
}

// Logits [rows, 32] to weights exp(logit - maximum), in place; rescales what was summed before where a maximum rose.
// False if no row attends to any of the tokens.
NOINLINE bool weigh(const Task &t, const Columns &columns, const Scratch &w) {
  bool any = false;
  for (int r = 0; r < t.rows; r++) {
    float *x = w.weights + r * TILE, *sums = w.sums + r * TILE;
    adjust_logits(t, r, columns, x);
    F top = load(x);
    for (int i = LANES; i < TILE; i += LANES) top = maximum(top, load(x + i));
    float maximum_now = reduce_max(top);
    any |= maximum_now > -__builtin_inff();
    if (maximum_now > w.maxima[r]) raise_maximum(t, r, maximum_now, w);
    F base = splat(w.maxima[r] == -__builtin_inff() ? 0 : w.maxima[r]), sum = load(sums);
    for (int i = 0; i < TILE; i += LANES) {
      F p = exp_negative(load(x + i) - base);
      store(x + i, p);
      sum = sum + p;
    }
    store(sums, sum);
  }
  return any;
}

INLINE void begin(const Task &t, const Scratch &w, float maximum_before) {
  fill(t.acc, (int64_t)t.rows * t.a.value_pad, 0);
  fill(w.sums, t.rows * TILE, 0);
  fill(w.maxima, t.rows, maximum_before);
}
INLINE void end(const Task &t, const Scratch &w) {
  for (int r = 0; r < t.rows; r++) {
    float sum = reduce_add(load(w.sums + r * TILE));
    t.state[2 * r] = sum == sum ? w.maxima[r] : sum;  // maxima skip NaN: not an empty row
    t.state[2 * r + 1] = sum;
  }
}
