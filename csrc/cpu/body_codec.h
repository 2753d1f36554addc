// encode and decode of one block of 32 tokens of one head, on tiles [D, 32] whose lanes are tokens.
#pragma once

constexpr float EPS = 1e-30f;
constexpr float MAX_FLOAT16 = 65504;

// Magnitude of |u|: bit p of the count of edges below it. The comparison with edge k gives one word for 32 tokens.
template <int BITS>
struct Quantiser {
  F level[MAX_LEVELS], edge[MAX_LEVELS];
  explicit Quantiser(const float *levels) {
    for (int k = 0; k < 1 << (BITS - 1); k++) level[k] = splat(levels[k]);
    for (int k = 0; k + 1 < 1 << (BITS - 1); k++) edge[k] = splat((levels[k + 1] + levels[k]) / 2);
  }
  // Words of value order for one dim in word[plane]; adds u * value and value^2 to the sums.
  INLINE_MEMBER void code(const float *row, const float *inverse_rms, uint32_t *word, float *dot, float *square) const {
    constexpr int edges = (1 << (BITS - 1)) - 1;
    uint32_t above[edges + 1] = {}, sign = 0;
    for (int c = 0; c < TILE; c += LANES) {
      F u = load(row + c) * load(inverse_rms + c), a = absolute(u), value = level[0];
      sign |= lane_bits(greater(zero(), u)) << c;
      UNROLL_FOR (int k = 0; k < edges; k++) {
        M m = greater(a, edge[k]);
        value = select(m, level[k + 1], value);
        above[k] |= lane_bits(m) << c;
      }
      store(dot + c, fma(a, value, load(dot + c)));
      store(square + c, fma(value, value, load(square + c)));
    }
    // A count in unary to binary: bit p is the parity of every 2^p-th comparison.
    UNROLL_FOR (int p = 0; p + 1 < BITS; p++) {
      word[p] = 0;
      UNROLL_FOR (int k = (1 << p) - 1; k < edges; k += 1 << p) word[p] ^= above[k];
    }
    word[BITS - 1] = sign;
  }
};

// Codes of a rotated tile in value order, and `dot` = <|u|, value>, `square` = |value|^2 of every token.
template <int BITS>
NOINLINE void quantise(const Store &s, const float *tile, const float *inverse_rms, uint32_t *words, float *dot,
                       float *square) {
  Quantiser<BITS> quantiser(s.levels);
  int pad = padded(s.dim);
  for (int d = 0; d < pad; d++) {
    uint32_t word[BITS] = {};
    if (d < s.dim) quantiser.code(tile + d * TILE, inverse_rms, word, dot, square);
    for (int p = 0; p < BITS; p++) words[p * pad + d] = word[p];
  }
}

INLINE float scale_of(int rule, float norm, float rms, float dot, float square) {  // dot = <|u|, value>
  if (!(norm > 0)) return 0;
  float scale = rms;
  dot *= rms;
  if (rule == MATCHED) scale = norm / __builtin_sqrtf(square);
  if (rule == UNBIASED) scale = norm * norm / (dot > EPS ? dot : EPS);
  if (rule == MSE) scale = dot / square;
  return scale < MAX_FLOAT16 ? scale : MAX_FLOAT16;
}

INLINE const float *vector_at(const float *x, const int64_t *stride, int64_t b, int64_t h) {
  return x ? x + b * stride[0] + h * stride[1] : nullptr;
}

// (x - centre) / balance of the valid tokens as a tile.
NOINLINE void load_centred(const Dense &x, int dim, const float *centre, const float *balance, int64_t b, int64_t h,
                           int64_t first, uint32_t valid, const Scratch &w, float *tile) {
  fill(w.a, TILE * w.pad, 0);
  for (int t = 0; t < TILE; t++)
    if (valid >> t & 1) load_row(row_at(x, b, h, first + t), x.dtype, dim, w.a + t * w.pad);
  transpose(w.a, w.pad, TILE, w.pad, tile, TILE);
  if (!centre && !balance) return;
  for (int d = 0; d < dim; d++) {
    F minus = splat(centre ? centre[d] : 0), by = splat(balance ? 1 / balance[d] : 1);
    for (int i = 0; i < TILE; i += LANES) store(tile + d * TILE + i, (load(tile + d * TILE + i) - minus) * by);
  }
}

static void encode(const Coding &c, int64_t b, int64_t h, int64_t block, char *scratch) {
  const Store &s = c.store;
  Scratch w = carve(scratch, padded(s.dim));
  float *tile = w.b, *norm = w.weights, *inverse_rms = norm + TILE, *dot = norm + 2 * TILE, *square = norm + 3 * TILE;
  block += c.start / TILE;
  uint32_t valid = valid_tokens(block, c.start, c.start + c.tokens);
  load_centred(c.x, s.dim, vector_at(s.centre, s.centre_stride, b, h), vector_at(s.balance, s.balance_stride, b, h), b,
               h, block * TILE - c.start, valid, w, tile);
  rotate_tile(s.rotation, false, tile, w.c);
  fill(norm, 4 * TILE, 0);
  for (int d = 0; d < s.dim; d++)
    for (int i = 0; i < TILE; i += LANES) {
      F x = load(tile + d * TILE + i);
      store(norm + i, fma(x, x, load(norm + i)));
    }
  float root = 1.0f / __builtin_sqrtf((float)s.dim);
  for (int i = 0; i < TILE; i += LANES) {
    F n = square_root(load(norm + i));
    store(norm + i, n);
    store(inverse_rms + i, splat(1.0f) / maximum(n * splat(root), splat(EPS)));
  }
  if (s.bits == 2) quantise<2>(s, tile, inverse_rms, w.words, dot, square);
  if (s.bits == 3) quantise<3>(s, tile, inverse_rms, w.words, dot, square);
  if (s.bits == 4) quantise<4>(s, tile, inverse_rms, w.words, dot, square);
  uint16_t *scale = s.scale + b * s.scale_stride[0] + h * s.scale_stride[1] + block * TILE;
  for (int t = 0; t < TILE; t++)
    if (valid >> t & 1) scale[t] = to_float16(scale_of(c.rule, norm[t], norm[t] * root, dot[t], square[t]));
  if (c.along_tokens) {
    store_value_words(s, b, h, block, valid_tokens(block, 0, c.start), valid, w.words);
  } else {
    store_key_words(s, b, h, block, valid, w.words, w.columns);
  }
}

static void decode(const Coding &c, int64_t b, int64_t h, int64_t block, char *scratch) {
  const Store &s = c.store;
  Scratch w = carve(scratch, padded(s.dim));
  float *tile = w.b, *scale = w.weights;
  block += c.start / TILE;
  uint32_t valid = valid_tokens(block, c.start, c.start + c.tokens);
  if (c.along_tokens) {
    expand(s.bits, load_value_words(s, b, h, block, w.words), w.pad, book_of(s), w.a, w.pad);
    transpose(w.a, w.pad, TILE, w.pad, tile, TILE);
  } else {
    Planes planes = load_key_words(s, b, h, block, w.words);
    for (int d = 0; d < w.pad; d += TILE) {
      expand(s.bits, planes, TILE, book_of(s), tile + d * TILE, TILE);
      for (int p = 0; p < s.bits; p++) planes.at[p] += TILE;
    }
  }
  load_scales(s, b, h, block, valid, scale);
  for (int d = 0; d < s.dim; d++)
    for (int i = 0; i < TILE; i += LANES) store(tile + d * TILE + i, load(tile + d * TILE + i) * load(scale + i));
  rotate_tile(s.rotation, true, tile, w.c);
  const float *centre = vector_at(s.centre, s.centre_stride, b, h);
  const float *balance = vector_at(s.balance, s.balance_stride, b, h);
  if (centre || balance)
    for (int d = 0; d < s.dim; d++) {
      F plus = splat(centre ? centre[d] : 0), by = splat(balance ? balance[d] : 1);
      for (int i = 0; i < TILE; i += LANES) store(tile + d * TILE + i, fma(load(tile + d * TILE + i), by, plus));
    }
  transpose(tile, TILE, w.pad, TILE, w.a, w.pad);
  int64_t first = block * TILE - c.start;
  for (int t = 0; t < TILE; t++)
    if (valid >> t & 1) store_row(w.a + t * w.pad, s.dim, row_at(c.x, b, h, first + t), c.x.dtype);
}
