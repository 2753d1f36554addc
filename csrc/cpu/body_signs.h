// The 1-bit index: 4-bit codes of queries, signs of keys, and the scores that both give.
//
// Scores are taken for 32 tokens at a time, a lane a token: the signs are transposed once for all rows of the head, then
// each row takes the words of its four planes from memory, and bits are counted in the lanes.
#pragma once

// Code of one rotated row x [pad]; `base` is q . centre. Planes lie `stride` apart; `code` [pad] is scratch.
NOINLINE void encode_query(const float *x, int dim, int pad, float base, float scale, uint32_t *planes, int64_t stride,
                           float *terms, float *code) {
  float low = x[0], high = x[0], bad = base * 0;
  for (int i = 0; i < dim; i++) {
    low = x[i] < low ? x[i] : low, high = x[i] > high ? x[i] : high;
    bad += x[i] * 0;
  }
  float delta = (high - low) / ((1 << QUERY_BITS) - 1), sum = 0;
  bool coded = delta > 0 && bad == 0;
  fill(code, pad, 0);
  for (int i = 0; coded && i < pad; i += LANES) {
    F u = round_small((load(x + i) - splat(low)) / splat(delta));
    u = maximum(u, zero());
    store(code + i, select(greater(u, splat(15.0f)), splat(15.0f), u));
  }
  fill(code + dim, pad - dim, 0);
  for (int i = 0; i < dim; i++) sum += code[i];
  for (int w = 0; w * WORD_BITS < dim; w++) {
    uint32_t word[QUERY_BITS] = {};
    for (int i = 0; i < TILE; i += LANES) {
      F u = load(code + w * TILE + i);
      UNROLL_FOR (int j = QUERY_BITS - 1; j >= 0; j--) {
        M set = greater(u, splat((1 << j) - 0.5f));
        word[j] |= lane_bits(set) << i;
        u = u - select(set, splat((float)(1 << j)), zero());
      }
    }
    for (int j = 0; j < QUERY_BITS; j++) planes[j * stride + w] = word[j];
  }
  terms[0] = scale * delta, terms[1] = scale * low, terms[2] = sum, terms[3] = scale * base;
  if (bad != 0) terms[0] = terms[1] = terms[2] = terms[3] = __builtin_nanf("");
}

// 32 rows, counted over (batch, query head, token).
static void quantise_query(const QueryCoding &c, int64_t tile, char *scratch) {
  Scratch w = carve(scratch, padded(c.dim));
  int64_t per_sequence = c.heads * c.group * c.queries, end = c.batch * per_sequence;
  int count = tile_count(tile * TILE, end);
  float base[TILE];
  fill(w.a, TILE * w.pad, 0);
  auto each = [&](auto run) {
    for (int r = 0; r < count; r++) {
      int64_t row = tile * TILE + r, b = row / per_sequence, head = row % per_sequence / c.queries;
      run(r, b, head, row % c.queries, head / c.group);
    }
  };
  each([&](int r, int64_t b, int64_t head, int64_t m, int64_t h) {
    float *x = w.a + r * w.pad;
    load_row(row_at(c.q, b, head, m), c.q.dtype, c.dim, x);
    const float *minus = vector_at(c.query_centre.data, c.query_centre.stride, b, h);
    const float *centre = vector_at(c.centre.data, c.centre.stride, b, h);
    const float *by = vector_at(c.balance.data, c.balance.stride, b, h);
    base[r] = centre ? dot_row(x, centre, c.dim) : 0;
    for (int i = 0; minus && i < c.dim; i++) x[i] -= minus[i];
    for (int i = 0; by && i < c.dim; i++) x[i] *= by[i];
  });
  if (!is_identity(c.rotation)) rotate_rows(c.rotation, false, w.a, w.pad, w.b);
  each([&](int r, int64_t b, int64_t head, int64_t m, int64_t) {
    const int64_t *s = c.code.plane_stride, *t = c.code.term_stride;
    encode_query(w.a + r * w.pad, c.dim, w.pad, base[r], c.scale, c.code.planes + b * s[0] + head * s[1] + m * s[2],
                 s[3], c.code.terms + b * t[0] + head * t[1] + m * t[2], w.vector);
  });
}

// Signs of a tile [pad, 32] in value order; the squares and the sizes of each token are added to the sums.
INLINE void signs_of(const float *tile, int dim, int pad, uint32_t *words, float *square, float *size) {
  for (int d = 0; d < pad; d++) {
    words[d] = 0;
    for (int i = 0; d < dim && i < TILE; i += LANES) {
      F x = load(tile + d * TILE + i);
      words[d] |= lane_bits(greater(zero(), x)) << i;
      store(square + i, fma(x, x, load(square + i)));
      store(size + i, load(size + i) + absolute(x));
    }
  }
}

INLINE float at_most(float x, float most) { return x > most ? most : x; }  // NaN of NaN

// One block of 32 tokens of the index; `block` counts from the block of `start`.
static void index_keys(const Indexing &n, int64_t b, int64_t h, int64_t block, char *scratch) {
  Scratch w = carve(scratch, padded(n.dim));
  float *tile = w.b, *square = w.weights, *size = square + TILE, *bias = square + 2 * TILE;
  block += n.start / TILE;
  uint32_t valid = valid_tokens(block, n.start, n.start + n.tokens);
  const float *balance = vector_at(n.balance.data, n.balance.stride, b, h);
  load_centred(n.x, n.dim, vector_at(n.centre.data, n.centre.stride, b, h), balance, b, h, block * TILE - n.start,
               valid, w, tile);
  fill(square, 3 * TILE, 0);
  const float *query = vector_at(n.query_centre.data, n.query_centre.stride, b, h);
  for (int d = 0; query && d < n.dim; d++) {
    F by = splat(query[d] * (balance ? balance[d] : 1));
    for (int i = 0; i < TILE; i += LANES) store(bias + i, fma(load(tile + d * TILE + i), by, load(bias + i)));
  }
  rotate_tile(n.rotation, false, tile, w.c);
  signs_of(tile, n.dim, w.pad, w.words, square, size);
  const SignIndex &index = n.index;
  uint16_t *factors = index.factor + b * index.factor_stride[0] + h * index.factor_stride[1] + block * TILE;
  int64_t bias_at = b * index.bias_stride[0] + h * index.bias_stride[1] + block * TILE;
  for (int t = 0; t < TILE; t++) {
    if (!(valid >> t & 1)) continue;
    factors[t] = to_float16(at_most(size[t] > 0 ? square[t] / size[t] : 0, MAX_FLOAT16));
    if (query) index.bias[bias_at + t] = to_float16(-at_most(-at_most(bias[t], MAX_FLOAT16), MAX_FLOAT16));
  }
  if (!index.sign) return;
  Store s{};  // a store of one plane
  s.dim = n.dim, s.bits = 1, s.sign = index.sign;
  for (int i = 0; i < 3; i++) s.sign_stride[i] = index.sign_stride[i];
  store_key_words(s, b, h, block, valid, w.words, w.columns);
}

// The index of 32 tokens, or of the first `count` of them: signs [W, 32], and D - 2 popcount, factor and scale * bias.
struct SignTile {
  const uint32_t *words;
  int num_words;
  float balance[TILE], factor[TILE], bias[TILE];
};

INLINE void load_halves(const uint16_t *from, int count, float *to) {
  load_row((const char *)from, FLOAT16, count, to);
  fill(to + count, TILE - count, 0);
}

NOINLINE void load_signs(const SignScan &s, int64_t b, int64_t h, int64_t token, int count, uint32_t *words,
                         SignTile &tile) {
  const SignIndex &index = s.index;
  const uint32_t *from =
      index.sign + b * index.sign_stride[0] + h * index.sign_stride[1] + token * index.sign_stride[2];
  int num_words = (int)ceil_div(s.dim, WORD_BITS);
  if (count == TILE) {
    load_plane_words(from, index.sign_stride[2], num_words, words);
  } else {
    for (int w = 0; w < num_words; w++)
      for (int t = 0; t < TILE; t++) words[w * TILE + t] = t < count ? from[t * index.sign_stride[2] + w] : 0;
  }
  tile.words = words, tile.num_words = num_words;
  load_halves(index.factor + b * index.factor_stride[0] + h * index.factor_stride[1] + token, count, tile.factor);
  if (index.bias)
    load_halves(index.bias + b * index.bias_stride[0] + h * index.bias_stride[1] + token, count, tile.bias);
  for (int i = 0; i < TILE; i += LANES) {
    U bits = splat_word(0);
    for (int w = 0; w < num_words; w++) bits = add_words(bits, counted(load_words(words + w * TILE + i)));
    store(tile.balance + i, splat((float)s.dim) - splat(2.0f) * floats_of_words(total_count(bits)));
    if (index.bias) store(tile.bias + i, settled(splat(s.scale) * load(tile.bias + i)));
  }
}

// Scores of one row for a tile of signs. The order of operations is that of the schema, each of them rounded.
template <bool BIASED>
NOINLINE void score_tile(const SignTile &tile, const uint32_t *planes, int64_t stride, const float *terms, float *out) {
  for (int c = 0; c < TILE; c += PANEL) {
    U count[QUERY_BITS][VECS];
    UNROLL_FOR (int j = 0; j < QUERY_BITS; j++)
      UNROLL_FOR (int v = 0; v < VECS; v++) count[j][v] = splat_word(0);
    for (int w = 0; w < tile.num_words; w++)
      UNROLL_FOR (int v = 0; v < VECS; v++) {
        U sign = load_words(tile.words + w * TILE + c + v * LANES);
        UNROLL_FOR (int j = 0; j < QUERY_BITS; j++)
          count[j][v] = add_words(count[j][v], counted(and_words(splat_word(planes[j * stride + w]), sign)));
      }
    UNROLL_FOR (int v = 0; v < VECS; v++) {
      U inner = total_count(count[QUERY_BITS - 1][v]);
      UNROLL_FOR (int j = QUERY_BITS - 2; j >= 0; j--) inner = add_words(shift<-1>(inner), total_count(count[j][v]));
      int i = c + v * LANES;
      F first = settled(splat(terms[1]) * load(tile.balance + i));
      F rest = settled(splat(terms[2]) - splat(2.0f) * floats_of_words(inner));
      F score = settled((first + settled(splat(terms[0]) * rest)) * load(tile.factor + i));
      if (BIASED) score = score + load(tile.bias + i);
      store(out + i, score + splat(terms[3]));
    }
  }
}

// SCAN_LEN tokens of one head for all its rows.
static void sign_scores(const SignScan &s, int64_t task, char *scratch) {
  Scratch w = carve(scratch, padded(s.dim));
  int64_t chunks = ceil_div(s.tokens, SCAN_LEN), from = task % chunks * SCAN_LEN, head = task / chunks;
  int64_t b = head / s.heads, h = head % s.heads, end = from + SCAN_LEN < s.tokens ? from + SCAN_LEN : s.tokens;
  const int64_t *plane = s.code.plane_stride, *term = s.code.term_stride;
  SignTile tile;
  for (int64_t at = from; at < end; at += TILE) {
    int count = tile_count(at, end);
    load_signs(s, b, h, s.start + at, count, w.words, tile);
    for (int64_t r = 0; r < s.group * s.queries; r++) {
      int64_t q = h * s.group + r / s.queries, m = r % s.queries;
      const uint32_t *planes = s.code.planes + b * plane[0] + q * plane[1] + m * plane[2];
      const float *terms = s.code.terms + b * term[0] + q * term[1] + m * term[2];
      char *out = row_at(s.out, b, q, m) + element_size(s.out.dtype) * at;
      bool whole = s.out.dtype == FLOAT32 && count == TILE;
      float *to = whole ? (float *)out : w.vector;
      s.index.bias ? score_tile<true>(tile, planes, plane[3], terms, to)
                   : score_tile<false>(tile, planes, plane[3], terms, to);
      if (!whole) store_row(to, count, out, s.out.dtype);
    }
  }
}
