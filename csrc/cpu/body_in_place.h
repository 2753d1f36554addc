// Attention of few query rows to tiles of dense rows where they lie: no copy and no transpose. Lanes are dims, of keys
// and of values. A row is asked for a tile ahead: hardware cannot foresee which rows a selection names.
#pragma once

constexpr int at_once(int rows) { return 4 * rows <= 2 * MAX_ROWS ? 4 : 2; }  // vectors a row of queries, in registers

// Rows of a tile and of the tile after it.
struct Tile {
  const char *const *rows, *const *next;
};

template <int DTYPE>
INLINE F load_lanes(const char *row, int lane) {
  if constexpr (DTYPE == FLOAT32) return load((const float *)row + lane);
  if constexpr (DTYPE == BFLOAT16) return load_bfloat16((const uint16_t *)row + lane);
  return load_float16((const uint16_t *)row + lane);
}

// Asks for each cache line of a row once in a walk along its lanes. The second level: this tile fills the first.
template <int DTYPE>
INLINE void ask_for(const char *row, int first, int lane) {
  constexpr int SIZE = DTYPE == FLOAT32 ? 4 : 2;
  if (SIZE * lane % 64 == 0) __builtin_prefetch(row + SIZE * (first + lane), 0, 2);
}

// scores[r][token] = by * query[r] . key.
template <int DTYPE, int ROWS>
NOINLINE void score_rows(const Tile &keys, int dim, const float *query, int64_t ldq, float by, float *scores) {
  constexpr int TOKENS = at_once(ROWS);
  for (int i = 0; i < TILE; i += TOKENS) {
    F acc[TOKENS][ROWS];
    UNROLL_FOR (int t = 0; t < TOKENS; t++)
      UNROLL_FOR (int r = 0; r < ROWS; r++) acc[t][r] = zero();
    for (int d = 0; d < dim; d += LANES) {
      F key[TOKENS];
      UNROLL_FOR (int t = 0; t < TOKENS; t++) {
        key[t] = load_lanes<DTYPE>(keys.rows[i + t], d);
        ask_for<DTYPE>(keys.next[i + t], 0, d);
      }
      UNROLL_FOR (int r = 0; r < ROWS; r++) {
        F x = load(query + r * ldq + d);
        UNROLL_FOR (int t = 0; t < TOKENS; t++) acc[t][r] = fma(x, key[t], acc[t][r]);
      }
    }
    UNROLL_FOR (int r = 0; r < ROWS; r++)
      UNROLL_FOR (int t = 0; t < TOKENS; t++) scores[r * TILE + i + t] = by * reduce_add(acc[t][r]);
  }
}

// sums[r][lane .. lane + NUM vectors) += weights[r][token] * value over `count` tokens.
template <int DTYPE, int ROWS, int NUM>
INLINE void sum_lanes(const Tile &values, int count, int lane, const float *weights, float *sums, int64_t lds) {
  F acc[ROWS][NUM];
  load_panel(sums + lane, lds, acc);
  for (int i = 0; i < count; i++) {
    F value[NUM];
    UNROLL_FOR (int v = 0; v < NUM; v++) {
      value[v] = load_lanes<DTYPE>(values.rows[i], lane + v * LANES);
      ask_for<DTYPE>(values.next[i], lane, v * LANES);
    }
    UNROLL_FOR (int r = 0; r < ROWS; r++) {
      F by = splat(weights[r * TILE + i]);
      UNROLL_FOR (int v = 0; v < NUM; v++) acc[r][v] = fma(by, value[v], acc[r][v]);
    }
  }
  store_panel(sums + lane, lds, acc);
}
template <int DTYPE, int ROWS>
NOINLINE void sum_rows(const Tile &values, int count, int dim, const float *weights, float *sums, int64_t lds) {
  constexpr int NUM = at_once(ROWS);
  int lane = 0;
  for (; lane + NUM * LANES <= dim; lane += NUM * LANES)
    sum_lanes<DTYPE, ROWS, NUM>(values, count, lane, weights, sums, lds);
  for (; lane < dim; lane += LANES) sum_lanes<DTYPE, ROWS, 1>(values, count, lane, weights, sums, lds);
}

template <int DTYPE>
struct ScoreCall {
  const Task &t;
  const Tile &keys;
  const Scratch &w;
  template <int ROWS>
  INLINE_MEMBER void with(int r) const {
    int64_t pad = t.a.dim_pad;
    score_rows<DTYPE, ROWS>(keys, t.a.dim, t.a.query + (t.flat + r) * pad, pad, t.a.scale, w.weights + r * TILE);
  }
};
template <int DTYPE>
struct SumCall {
  const Task &t;
  const Tile &values;
  int count;
  const Scratch &w;
  template <int ROWS>
  INLINE_MEMBER void with(int r) const {
    int64_t pad = t.a.value_pad;
    sum_rows<DTYPE, ROWS>(values, count, t.a.value_dim, w.weights + r * TILE, t.acc + r * pad, pad);
  }
};

INLINE void scores_in_place(const Task &t, const Tile &keys, const Scratch &w) {
  Dtype dtype = t.a.exact_keys.dtype;
  if (dtype == FLOAT32) in_groups(t.rows, ScoreCall<FLOAT32>{t, keys, w});
  if (dtype == BFLOAT16) in_groups(t.rows, ScoreCall<BFLOAT16>{t, keys, w});
  if (dtype == FLOAT16) in_groups(t.rows, ScoreCall<FLOAT16>{t, keys, w});
}
INLINE void sums_in_place(const Task &t, const Tile &values, int count, const Scratch &w) {
  Dtype dtype = t.a.exact_values.dtype;
  if (dtype == FLOAT32) in_groups(t.rows, SumCall<FLOAT32>{t, values, count, w});
  if (dtype == BFLOAT16) in_groups(t.rows, SumCall<BFLOAT16>{t, values, count, w});
  if (dtype == FLOAT16) in_groups(t.rows, SumCall<FLOAT16>{t, values, count, w});
}

// Rows of many queries are worth a copy.
INLINE bool fits_in_place(const Task &t) {
  return t.rows <= FEW_ROWS && t.a.dim % LANES == 0 && t.a.value_dim % LANES == 0;
}
