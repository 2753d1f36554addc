// attend on packed tokens for few rows, with 16-bit integers: the products of body_products.h at a quarter of the
// instructions a code.
//
// A lane of 32 bits holds two codes of one lane of the planes, positions i and i + 16, because the nibble of position
// 4k + J is half a byte k of n: shifts by 0, 4, 8 and 12 bring nibbles 0 .. 3 and 4 .. 7 to the bottom of the two
// halves, where one shuffle of 16-bit lanes looks both up. Coefficients lie in the same pairs, [rows, 16] words for 32
// positions.
//
// Levels are rounded to integers up to LEVEL_RANGE; the query of a row and the weights (times the scales of the values)
// of a row and tile to ranges in which sums over SUM_WORDS words of keys and one of values cannot overflow: for the
// query by the sum of its coordinates, as not all of them are as large as the largest. 8 bits would halve the products,
// but rounding the query to 8 bits costs 6e-3 of a score's spread at dim 128, this 6e-5. With four rows the products are
// two thirds of the time and run at one a cycle.
#pragma once

constexpr int LEVEL_RANGE = 4095, SUM_WORDS = 4, FEW_WORD_ROWS = 16;
constexpr float WORD_RANGE = 32766;  // of one coordinate
constexpr float QUERY_RANGE = 0x7fffffff / LEVEL_RANGE - SUM_WORDS * WORD_BITS;  // of the sum, with room for rounding
constexpr float WEIGHT_RANGE = 0x7fffffff / LEVEL_RANGE / TILE;
constexpr float TINY = 1e-30f;  // a row of weights or a query below counts as zero, so that 1 / x stays finite

// Factor from levels to integers: the one of 128 below LEVEL_RANGE / largest level with the smallest error. Rounding
// errors of levels do not average out over tokens, and three or seven other levels often fit one of the factors well.
INLINE float level_factor(const Store &s) {
  int half = 1 << (s.bits - 1);
  if (!(s.levels[half - 1] > TINY)) return 0;
  float unit = 1 / s.levels[half - 1], step[LANES], errors[LANES], factors[LANES], least = __builtin_inff(), best = 0;
  for (int i = 0; i < LANES; i++) step[i] = i * unit;
  F error = splat(least), factor = zero();
  for (int i = 0; i < 128; i += LANES) {
    F by = splat((LEVEL_RANGE - i) * unit) - load(step), most = zero();
    for (int k = 0; k < half; k++) {
      F x = splat(s.levels[k]) * by;
      most = maximum(most, absolute(x - round_small(x)));
    }
    M better = greater(error, most);
    error = select(better, most, error), factor = select(better, by, factor);
  }
  store(errors, error), store(factors, factor);
  for (int i = 0; i < LANES; i++)
    if (errors[i] < least) least = errors[i], best = factors[i];
  return best;
}

struct WordBook {
  U table;
  float unit;  // value of one step of the table
};
INLINE WordBook word_book_of(const Store &s) {
  int16_t table[2 * LANES];
  int half = 1 << (s.bits - 1);
  float by = level_factor(s);
  for (int i = 0; i < 2 * LANES; i++) {  // repeated, so that bits above the code do not matter
    int level = (int)(s.levels[i & (half - 1)] * by + 0.5f);
    table[i] = (int16_t)(i & half ? -level : level);
  }
  U words;
  __builtin_memcpy(&words, table, sizeof words);
  return {words, by > 0 ? 1 / by : 0};
}

// Positions 0 .. 15 and 16 .. 31 of a row, below 2^15, as 16 pairs.
static_assert(TILE == 2 * LANES, "half a tile is a vector");
INLINE U pairs_of(F low, F high) { return pick(0xffffu, rounded(low), shift<-16>(rounded(high))); }

// Queries [words, rows, 32] to pairs [words, rows, 16], and the unit of each row: NaN where the row is not finite.
NOINLINE void quantise_queries(const float *query, int words, int rows, uint32_t *pairs, float *unit) {
  for (int r = 0; r < rows; r++) {
    float step = 0;
    F bad = zero();
    for (int first = 0; first < words; first += SUM_WORDS) {
      F top = zero(), sum = zero();
      for (int w = first; w < words && w < first + SUM_WORDS; w++)
        for (int i = 0; i < TILE; i += LANES) {
          F x = load(query + (w * rows + r) * TILE + i);
          top = maximum(absolute(x), top);
          sum = sum + absolute(x);
          bad = fma(x, zero(), bad);
        }
      float by_size = reduce_max(top) / WORD_RANGE, by_sum = reduce_add(sum) / QUERY_RANGE;
      step = by_size > step ? by_size : step;
      step = by_sum > step ? by_sum : step;
    }
    unit[r] = (step > TINY ? step : 0) + reduce_add(bad);
    float by = step > TINY ? 1 / step : 0;
    for (int w = 0; w < words; w++) {
      const float *x = query + (w * rows + r) * TILE;
      store_words(pairs + (w * rows + r) * (TILE / 2), pairs_of(load(x) * splat(by), load(x + LANES) * splat(by)));
    }
  }
}

// As packed_quarter. The asm also keeps the compiler from loading the coefficients before the loop over the panels, for
// which there are no registers.
template <int BITS, int ROWS, int J>
INLINE void word_quarter(const Planes &planes, int64_t at, const uint32_t *coef, U table, U (&acc)[ROWS][VECS]) {
  U n[VECS];
  __asm__("" : "+r"(at), "+r"(coef));
  UNROLL_FOR (int v = 0; v < VECS; v++) {
    U plane[BITS];
    UNROLL_FOR (int b = 0; b < BITS; b++) plane[b] = load_words(planes.at[b] + at + v * LANES);
    n[v] = nibbles<BITS, J>(plane);
  }
  UNROLL_FOR (int k = 0; k < 4; k++) {
    U x[VECS];
    UNROLL_FOR (int v = 0; v < VECS; v++) {
      x[v] = lookup_words(table, n[v]);
      n[v] = shift<4>(n[v]);
    }
    UNROLL_FOR (int r = 0; r < ROWS; r++) {
      U c = splat_word(coef[r * (TILE / 2) + 4 * k + J]);
      UNROLL_FOR (int v = 0; v < VECS; v++) acc[r][v] = dot_words(acc[r][v], x[v], c);
    }
  }
}

// Sums over `words` words of one panel; coefficients of word w lie `step` after those of word w - 1.
template <int BITS, int ROWS>
INLINE void word_panel(const Planes &planes, int64_t at, int words, const uint32_t *coef, int64_t step, U table,
                       U (&acc)[ROWS][VECS]) {
  UNROLL_FOR (int r = 0; r < ROWS; r++)
    UNROLL_FOR (int v = 0; v < VECS; v++) acc[r][v] = splat_word(0);
  for (int64_t end = at + (int64_t)words * TILE; at < end; at += TILE, coef += step) {
    word_quarter<BITS, ROWS, 0>(planes, at, coef, table, acc);
    word_quarter<BITS, ROWS, 1>(planes, at, coef, table, acc);
    word_quarter<BITS, ROWS, 2>(planes, at, coef, table, acc);
    word_quarter<BITS, ROWS, 3>(planes, at, coef, table, acc);
  }
}

// logits [rows, 32] = by * (scale[token] * unit[row] * sum + bias[row]).
struct KeyWords {
  const Planes &planes;
  int words, rows;
  const uint32_t *coef;
  U table;
  const float *scale, *unit, *bias;
  float level_unit, by, *out;
  template <int BITS, int ROWS>
  INLINE_MEMBER void run(int first) const {
    static_assert(TILE == PANEL, "one panel holds the tokens of a tile");
    const int64_t step = rows * (TILE / 2);
    for (int w = 0; w < words; w += SUM_WORDS) {
      U acc[ROWS][VECS];
      word_panel<BITS, ROWS>(planes, w * TILE, words - w < SUM_WORDS ? words - w : SUM_WORDS,
                             coef + w * step + first * (TILE / 2), step, table, acc);
      UNROLL_FOR (int r = 0; r < ROWS; r++) {
        F multiply = splat(unit[first + r] * level_unit * by), add = splat(bias[first + r] * by);
        UNROLL_FOR (int v = 0; v < VECS; v++) {
          float *x = out + (first + r) * TILE + v * LANES;
          store(x, fma(floats_of_words(acc[r][v]) * load(scale + v * LANES), multiply, w == 0 ? add : load(x)));
        }
      }
    }
  }
};

// out [rows, width] += unit[row] * sum.
struct ValueWords {
  const Planes &planes;
  int width;
  const uint32_t *coef;
  U table;
  const float *unit;
  float *out;
  template <int BITS, int ROWS>
  INLINE_MEMBER void run(int first) const {
    const int64_t end = width;
    const U book = table;
    float *to = out + first * end;
    for (int64_t lane = 0; lane < end; lane += PANEL) {
      U acc[ROWS][VECS];
      word_panel<BITS, ROWS>(planes, lane, 1, coef + first * (TILE / 2), 0, book, acc);
      UNROLL_FOR (int r = 0; r < ROWS; r++) {
        F multiply = splat(unit[first + r]);
        UNROLL_FOR (int v = 0; v < VECS; v++) {
          float *x = to + r * end + lane + v * LANES;
          store(x, fma(floats_of_words(acc[r][v]), multiply, load(x)));
        }
      }
    }
  }
};

template <int BITS, int ROWS, class Call>
NOINLINE void word_rows(const Call &call, int first) {
  call.template run<BITS, ROWS>(first);
}
template <int BITS, class Call>
struct WordGroup {
  const Call &call;
  template <int ROWS>
  INLINE_MEMBER void with(int first) const {
    word_rows<BITS, ROWS>(call, first);
  }
};
template <class Call>
INLINE void word_product(int bits, int rows, const Call &call) {
  if (bits == 2) in_groups(rows, WordGroup<2, Call>{call});
  if (bits == 3) in_groups(rows, WordGroup<3, Call>{call});
  if (bits == 4) in_groups(rows, WordGroup<4, Call>{call});
}

// As weigh, but the weights, times the scales of the values, become pairs [rows, 16] and the unit of each row.
NOINLINE bool weigh_words(const Task &t, const Columns &columns, const float *scale, float level_unit, const Scratch &w,
                          uint32_t *pairs, float *unit) {
  bool any = false;
  for (int r = 0; r < t.rows; r++) {
    float *x = w.weights + r * TILE, *sums = w.sums + r * TILE;
    adjust_logits(t, r, columns, x);
    F top = maximum(load(x), load(x + LANES));
    if (lane_bits(greater(top, splat(w.maxima[r])))) raise_maximum(t, r, reduce_max(top), w);
    F base = splat(w.maxima[r] == -__builtin_inff() ? 0 : w.maxima[r]);
    F p = exp_weights(load(x) - base), p2 = exp_weights(load(x + LANES) - base);
    store(sums, load(sums) + (p + p2));
    p = p * load(scale), p2 = p2 * load(scale + LANES);
    float most = reduce_max(maximum(p, p2)), by = most > TINY ? WEIGHT_RANGE / most : 0;
    any |= by > 0;
    unit[r] = most * (level_unit / WEIGHT_RANGE);
    store_words(pairs + r * (TILE / 2), pairs_of(p * splat(by), p2 * splat(by)));
  }
  return any;
}

// The packed part of attend for at most FEW_WORD_ROWS rows.
NOINLINE void attend_words(const Task &t, const Range &range, const Scratch &w) {
  const Attention &a = t.a;
  const Store &values = a.shared ? a.keys : a.values;
  WordBook key_book = word_book_of(a.keys), value_book = word_book_of(values);
  int words = (int)ceil_div(a.dim, WORD_BITS);
  uint32_t *queries = (uint32_t *)w.a, *weights = (uint32_t *)w.b;
  float *query_unit = w.c, *weight_unit = w.c + TILE;
  quantise_queries(a.rotated + t.flat * a.dim_pad, words, t.rows, queries, query_unit);
  for (int64_t block = (range.from > a.start ? range.from : a.start) / TILE; block * TILE < range.to; block++) {
    Columns columns = packed_columns(a, block, a.start, a.length);
    load_scales(a.keys, t.b, t.h, block, columns.valid, w.vector);
    Planes planes = load_key_words(a.keys, t.b, t.h, block, w.words);
    word_product(a.keys.bits, t.rows,
                 KeyWords{planes, words, t.rows, queries, key_book.table, w.vector, query_unit, a.bias + t.flat,
                          key_book.unit, a.scale, w.weights});
    prefetch_words(a.keys, t.b, t.h, block + 1, TILE);
    if (!a.shared) load_scales(values, t.b, t.h, block, columns.valid, w.vector);
    if (!weigh_words(t, columns, w.vector, value_book.unit, w, weights, weight_unit)) continue;
    planes = a.shared ? load_shared_words(a.keys, t.b, t.h, block, w.words, w.columns)
                      : load_value_words(values, t.b, t.h, block, w.words);
    word_product(values.bits, t.rows,
                 ValueWords{planes, a.value_pad, weights, value_book.table, weight_unit, t.acc});
    if (!a.shared) prefetch_words(values, t.b, t.h, block + 1, 1);
  }
}
