// top_p_select. The least score that a row keeps is found by parting: the scores between the bounds that are known are
// parted at a pivot, with the mass of both parts; one part stays, its scores side by side, with bounds of its own. The
// pivot halves the interval of the bounds, by value and by bits in turn, so parts get shorter and 64 rounds are enough.
#pragma once

constexpr float INF = __builtin_inff(), MAX_FLOAT = 3.40282347e38f;
constexpr int64_t MASS_LEN = 4096;  // scores whose mass is summed in float32
constexpr int64_t SAMPLE_LEN = 1024;
constexpr float SAMPLE_MARGIN = 1.25f;  // a sample's mass is rarely further off

INLINE F load_some(const float *x, int64_t left) {  // -inf behind the end
  if (left >= LANES) return load(x);
  float some[LANES];
  fill(some, LANES, -INF);
  for (int64_t i = 0; i < left; i++) some[i] = x[i];
  return load(some);
}
// NaN and +inf are kept whatever the others are, and have no share.
INLINE F known_of(F x) { return select(greater(splat(INF), x), x, splat(-INF)); }

// Scores of a row, masked, as float32: where they are, or in `memory`.
NOINLINE const float *scores_of(const TopP &p, int64_t b, int64_t h, int64_t m, float *memory) {
  const char *row = row_at(p.scores, b, h, m);
  const Mask &mask = p.mask;
  if (p.scores.dtype == FLOAT32 && !mask.data) return (const float *)row;
  load_row(row, p.scores.dtype, (int)p.columns, memory);
  if (!mask.data) return memory;
  int64_t at = b * mask.stride[0] + h * mask.stride[1] + m * mask.stride[2], last = p.mask_columns - 1;
  if (p.candidates) {  // junk behind the last candidate must not be looked up
    const int32_t *name = p.candidates + b * p.candidate_stride[0] +
                          h * p.selection.selections / p.query_heads * p.candidate_stride[1];
    mask_row(mask, at, p.columns, memory,
             [&](int64_t i) { return name[i] < 0 ? 0 : name[i] > last ? last : (int64_t)name[i]; });
  } else {
    mask_row(mask, at, p.columns, memory, [](int64_t i) { return i; });
  }
  return memory;
}

struct Bounds {
  float low, high;  // least and largest known score; low is inf if there is none
};
INLINE Bounds bounds_of(const float *x, int64_t n) {
  F high = splat(-INF), low = splat(-INF);  // low is negated
  for (int64_t i = 0; i < n; i += LANES) {
    F v = known_of(load_some(x + i, n - i));
    high = maximum(high, v);
    low = maximum(low, select(greater(v, splat(-INF)), zero() - v, splat(-INF)));
  }
  return {-reduce_max(low), reduce_max(high)};
}

// Scores from a pivot on and below it: how many, their mass relative to e^base, and the bounds that the pivot gives them.
struct Parts {
  int64_t above, below;
  double mass_above, mass_below;
  float least_above, most_below;
};
// `above` may be x itself.
NOINLINE Parts part(const float *x, int64_t n, float pivot, float base, float *above, float *below) {
  Parts p = {};
  F least = splat(-INF), most = splat(-INF);  // the least is negated
  for (int64_t from = 0; from < n; from += MASS_LEN) {
    F high = zero(), low = zero();
    int64_t end = from + MASS_LEN < n ? from + MASS_LEN : n;
    for (int64_t i = from; i < end; i += LANES) {
      F v = known_of(load_some(x + i, end - i)), weight = exp_negative(v - splat(base));
      M under = greater(splat(pivot), v);
      high = high + select(under, zero(), weight), low = low + select(under, weight, zero());
      least = maximum(least, select(under, splat(-INF), zero() - v));
      most = maximum(most, select(under, v, splat(-INF)));
      uint32_t seen = lane_bits(greater(v, splat(-INF))), under_bits = lane_bits(under);
      store_lanes(above + p.above, v, seen & ~under_bits), p.above += __builtin_popcount(seen & ~under_bits);
      store_lanes(below + p.below, v, seen & under_bits), p.below += __builtin_popcount(seen & under_bits);
    }
    p.mass_above += reduce_add(high), p.mass_below += reduce_add(low);
  }
  p.least_above = -reduce_max(least), p.most_below = reduce_max(most);
  return p;
}

// Floats in order as integers, and back.
INLINE int64_t order_of(float x) {
  uint32_t w = word_of(x);
  return w >> 31 ? -(int64_t)(w & 0x7fffffffu) : (int64_t)w;
}
INLINE float float_at(int64_t order) {
  return float_of(order < 0 ? 0x80000000u | (uint32_t)-order : (uint32_t)order);
}

// Above low, at most high.
INLINE float pivot_of(const Bounds &x, int round) {
  float pivot = round % 2 ? float_at((order_of(x.low) + order_of(x.high) + 1) >> 1) : 0.5f * x.low + 0.5f * x.high;
  return pivot > x.low && pivot <= x.high ? pivot : x.high;
}

// The largest score from which on the mass is `needed`, or the least score if none is.
INLINE float crossing(Parts p, Bounds bounds, double needed, float base, float *above, float *below) {
  double mass = 0;  // from bounds.high on, without it
  for (int round = 1;; round++) {
    int64_t n;
    if (mass + p.mass_above >= needed || p.below == 0) {
      bounds.low = p.least_above, n = p.above;
    } else {
      mass += p.mass_above, bounds.high = p.most_below, n = p.below;
      float *other = above;
      above = below, below = other;
    }
    if (!(bounds.low < bounds.high)) return bounds.low;
    p = part(above, n, pivot_of(bounds, round), base, above, below);
  }
}

// A pivot to part a long row at first: the mass from it on is somewhat above the needed one, going by a sample. So one
// pass over the whole row is enough, and a short part stays.
NOINLINE float first_pivot(const TopP &p, const float *x, const Bounds &bounds, double exact, float base,
                           float *above, float *below) {
  int64_t step = p.columns / SAMPLE_LEN;
  if (step < 8) return pivot_of(bounds, 0);
  float sample[SAMPLE_LEN];
  for (int64_t i = 0; i < SAMPLE_LEN; i++) sample[i] = x[i * step];
  Bounds within = bounds_of(sample, SAMPLE_LEN);
  Parts first = part(sample, SAMPLE_LEN, pivot_of(within, 0), base, above, below);
  double others = exact / step, needed = p.top_p * (first.mass_above + first.mass_below + others) - others;
  float pivot = crossing(first, within, SAMPLE_MARGIN * needed, base, above, below);
  return pivot > bounds.low && pivot <= bounds.high ? pivot : pivot_of(bounds, 0);
}

static RowCut select_row(const TopP &p, int64_t row, char *scratch) {
  int64_t m = row % p.queries, h = row / p.queries % p.query_heads, b = row / p.queries / p.query_heads;
  float *memory = (float *)scratch, *above = memory + select_row_len(p.columns),
        *below = above + select_row_len(p.columns);
  const float *x = scores_of(p, b, h, m, memory);
  float lse = p.exact_lse[b * p.lse_stride[0] + h * p.lse_stride[1] + m * p.lse_stride[2]];
  Bounds bounds = bounds_of(x, p.columns);
  float base = lse > bounds.high ? lse : bounds.high, all = p.top_p >= 1 ? -MAX_FLOAT : INF;
  if (!(base > -INF && base < INF)) return {all, base == INF ? INF : 0};  // only the threshold of none or all is right
  double exact = lse == -INF ? 0 : exp_one(lse - base);
  Parts first = part(x, p.columns, first_pivot(p, x, bounds, exact, base, above, below), base, above, below);
  double total = first.mass_above + first.mass_below + exact;
  RowCut cut = {all, base + __builtin_logf((float)total)};
  if (p.top_p < 1 && bounds.high > -INF && exact < p.top_p * total)
    cut.threshold = crossing(first, bounds, p.top_p * total - exact, base, above, below);
  return cut;
}

// Calls run(scores, row) for the rows of a selection.
template <class Run>
INLINE void for_rows(const TopP &p, int64_t selection, float *memory, Run run) {
  int64_t b = selection / p.selection.selections, k = selection % p.selection.selections;
  int64_t heads = p.query_heads / p.selection.selections;
  for (int64_t h = k * heads; h < (k + 1) * heads; h++)
    for (int64_t m = 0; m < p.queries; m++)
      run(scores_of(p, b, h, m, memory), (b * p.query_heads + h) * p.queries + m);
}

// Bit of every column that a row of the selection keeps.
static void select_union(const TopP &p, const RowCut *rows, int64_t selection, uint32_t *kept, char *scratch) {
  for (int64_t i = 0; i < p.columns; i += TILE) kept[i / TILE] = 0;
  for_rows(p, selection, (float *)scratch, [&](const float *x, int64_t row) {
    F threshold = splat(rows[row].threshold);
    for (int64_t i = 0; i < p.columns; i += TILE) {
      uint32_t dropped = 0;
      for (int c = 0; c < TILE; c += LANES) {
        int64_t left = p.columns - i - c;
        dropped |= (left > 0 ? lane_bits(greater(threshold, load_some(x + i + c, left))) : ~0u >> (32 - LANES)) << c;
      }
      kept[i / TILE] |= ~dropped;
    }
  });
}

// shares [columns, and up to a vector behind]: the largest logarithm of a share; inf where a score is no number.
static void select_shares(const TopP &p, const RowCut *rows, int64_t selection, float *shares, char *scratch) {
  for (int64_t i = 0; i < p.columns; i += LANES) store(shares + i, splat(-INF));
  for_rows(p, selection, (float *)scratch, [&](const float *x, int64_t row) {
    F total = splat(rows[row].total);
    for (int64_t i = 0; i < p.columns; i += LANES) {
      F v = load_some(x + i, p.columns - i);
      F share = select(greater(splat(INF), v), v - total, splat(INF));
      store(shares + i, maximum(share, load(shares + i)));
    }
  });
}
