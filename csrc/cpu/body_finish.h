// The sum of all splits, R^T, balance and centre once for each output row; and merge.
#pragma once

struct Total {
  float packed, exact, maximum;  // sums of weights relative to the maximum
};

// Sums of all splits of one flat row into packed [value_pad], before R^T, and exact [value_pad].
INLINE Total gather(const Attention &a, int64_t flat, float *packed, float *exact) {
  int64_t head = flat / a.rows, row = flat % a.rows, splits = a.packed_splits + a.exact_splits;
  int64_t task = (head * a.row_blocks + row / a.row_block) * splits, r = row % a.row_block;
  Total total = {0, 0, a.normalise ? -__builtin_inff() : 0};
  if (a.sink_logits) total.maximum = a.sink_logits[head % a.heads * a.group + row / a.queries];
  fill(packed, a.value_pad, 0);
  fill(exact, a.value_pad, 0);
  for (int64_t s = 0; s < splits; s++) {
    float top = a.state[((task + s) * a.row_block + r) * 2];
    total.maximum = top > total.maximum ? top : total.maximum;
  }
  for (int64_t s = 0; s < splits; s++) {
    const float *state = a.state + ((task + s) * a.row_block + r) * 2;
    if (state[0] == -__builtin_inff()) continue;
    float by = exp_one(state[0] - total.maximum);
    bool is_packed = s < a.packed_splits;
    add_scaled(is_packed ? packed : exact, a.partial + ((task + s) * a.row_block + r) * a.value_pad, a.value_pad, by);
    (is_packed ? total.packed : total.exact) += by * state[1];
  }
  return total;
}

static void finish(const Attention &a, int64_t tile, char *scratch) {
  Scratch w = carve(scratch, pad_of(a));
  const Store &s = a.shared ? a.keys : a.values;
  int64_t flat = tile * TILE, all = a.batch * a.heads * a.rows;
  int pad = a.value_pad, count = tile_count(flat, all);
  Total totals[TILE];
  for (int r = 0; r < count; r++) totals[r] = gather(a, flat + r, w.a + r * pad, w.c + r * pad);
  if (a.packed_splits && !is_identity(s.rotation)) {
    fill(w.a + count * pad, (int64_t)(TILE - count) * pad, 0);
    rotate_rows(s.rotation, true, w.a, pad, w.b);
  }
  for (int r = 0; r < count; r++) {
    int64_t head = (flat + r) / a.rows, row = (flat + r) % a.rows, b = head / a.heads, h = head % a.heads;
    int64_t query_head = h * a.group + row / a.queries, query = row % a.queries;
    const float *centre = s.centre ? s.centre + b * s.centre_stride[0] + h * s.centre_stride[1] : nullptr;
    const float *balance = s.balance ? s.balance + b * s.balance_stride[0] + h * s.balance_stride[1] : nullptr;
    float *packed = w.a + r * pad, *exact = w.c + r * pad, mass = totals[r].packed + totals[r].exact, by = 1;
    if (a.normalise) {
      bool empty = totals[r].maximum == -__builtin_inff() && mass == 0;
      if (a.sink_logits && !empty) mass += exp_one(a.sink_logits[query_head] - totals[r].maximum);
      by = empty ? 0 : 1 / mass;
      a.lse[b * a.lse_stride[0] + query_head * a.lse_stride[1] + query * a.lse_stride[2]] =
          empty ? -__builtin_inff() : totals[r].maximum + __builtin_logf(mass);
    }
    for (int i = 0; i < a.value_dim; i++) {
      float x = packed[i] * (balance ? balance[i] : 1) + (centre ? centre[i] * totals[r].packed : 0);
      packed[i] = (x + exact[i]) * by;
    }
    store_row(packed, a.value_dim, row_at(a.out, b, query_head, query), a.out.dtype);
  }
}

static void merge(const Pieces &p, int64_t row, char *scratch) {
  int pad = padded(p.dim);
  Scratch w = carve(scratch, pad);
  int64_t b = row / p.queries / p.heads, h = row / p.queries % p.heads, m = row % p.queries;
  const float *lses = p.lses + b * p.lses_stride[1] + h * p.lses_stride[2] + m * p.lses_stride[3];
  const char *outs =
      p.outs + element_size(p.outs_dtype) * (b * p.outs_stride[1] + h * p.outs_stride[2] + m * p.outs_stride[3]);
  float top = -__builtin_inff(), mass = 0;
  for (int64_t i = 0; i < p.pieces; i++) top = lses[i * p.lses_stride[0]] > top ? lses[i * p.lses_stride[0]] : top;
  fill(w.vector, pad, 0);
  for (int64_t i = 0; i < p.pieces; i++) {
    float lse = lses[i * p.lses_stride[0]];
    if (lse == -__builtin_inff()) continue;
    float by = exp_one(lse - top);
    load_padded(outs + element_size(p.outs_dtype) * i * p.outs_stride[0], p.outs_dtype, p.dim, w.vector2);
    add_scaled(w.vector, w.vector2, pad, by);
    mass += by;
  }
  if (mass > 0) scale_row(w.vector, pad, 1 / mass);
  store_row(w.vector, p.dim, row_at(p.out, b, h, m), p.out.dtype);
  p.lse[b * p.lse_stride[0] + h * p.lse_stride[1] + m * p.lse_stride[2]] = mass > 0 ? top + __builtin_logf(mass) : top;
}
