// Words of one block of 32 tokens, from and to a store, in the two orders the products take.
//
//   key order    words [bits, W, 32]   lane = token, bit = dim     scores
//   value order  words [bits, pad]     lane = dim, bit = token     weighted sums
//   columns      [32, bits * W]        row = token or dim % 32     between the two, by a 32 x 32 bit transpose
// The sign is the last plane, so plane b is bit b of the code.
#pragma once

INLINE const uint32_t *plane_at(const Store &s, int64_t b, int64_t h, int64_t at, int plane) {
  if (plane == s.bits - 1) return s.sign + b * s.sign_stride[0] + h * s.sign_stride[1] + at * s.sign_stride[2];
  return s.mag + b * s.mag_stride[0] + h * s.mag_stride[1] + at * s.mag_stride[2] + plane * s.mag_stride[3];
}
INLINE int64_t plane_stride(const Store &s, int plane) {
  return plane == s.bits - 1 ? s.sign_stride[2] : s.mag_stride[2];
}

INLINE int num_columns(const Store &s) { return (int)round_up(s.bits * ceil_div(s.dim, WORD_BITS), 16); }

// Words of one plane, or of all magnitude planes side by side, of the 32 tokens at `from`.
INLINE void load_plane_words(const uint32_t *from, int64_t stride, int num_words, uint32_t *to) {
#if defined(KVQ_UNTANGLE)
  if (untangle(from, stride, num_words, to)) return;
#endif
  for (int w = 0; w < num_words; w += 4)
    for (int t = 0; t < TILE; t += WORD_ROWS) {
      int count = num_words - w < 4 ? num_words - w : 4;
      transpose_words(from + t * stride + w, stride, count, to + w * TILE + t, TILE);
    }
}

// Keys of a block in key order.
NOINLINE Planes load_key_words(const Store &s, int64_t b, int64_t h, int64_t block, uint32_t *words) {
  int num_words = (int)ceil_div(s.dim, WORD_BITS), sign = s.bits - 1;
  Planes planes;
  for (int p = 0; p < s.bits; p++) planes.at[p] = words + p * num_words * TILE;
  load_plane_words(plane_at(s, b, h, block * TILE, sign), plane_stride(s, sign), num_words,
                   words + sign * num_words * TILE);
  bool joined = s.mag_stride[3] == num_words;
  for (int p = 0; p < (joined ? 1 : sign); p++)
    load_plane_words(plane_at(s, b, h, block * TILE, p), plane_stride(s, p), joined ? sign * num_words : num_words,
                     words + p * num_words * TILE);
  return planes;
}

// Asks for the words of a block that will be read soon; `units` is 32 (tokens) for keys, 1 (block) for values. A block
// takes 0.4 us or less, shorter than hardware takes to see that the next one of the several streams is wanted.
INLINE void prefetch_words(const Store &s, int64_t b, int64_t h, int64_t block, int units) {
  for (int plane = 0; plane < s.bits; plane += s.bits - 1) {
    const char *from = (const char *)plane_at(s, b, h, block * units, plane);
    int64_t bytes = 4 * plane_stride(s, plane) * units;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
  }
}

// Values of a block in value order: the store itself where whole tiles of dims can be read from it.
INLINE Planes load_value_words(const Store &s, int64_t b, int64_t h, int64_t block, uint32_t *words) {
  Planes planes;
  int pad = padded(s.dim);
  for (int p = 0; p < s.bits; p++) {
    planes.at[p] = plane_at(s, b, h, block, p);
    if (pad == s.dim) continue;
    __builtin_memcpy(words + p * pad, planes.at[p], 4 * (int64_t)s.dim);
    for (int i = s.dim; i < pad; i++) words[p * pad + i] = 0;
    planes.at[p] = words + p * pad;
  }
  return planes;
}

// Each column of 32 words as a 32 x 32 bit matrix, transposed: bit t of row i becomes bit i of row t.
NOINLINE void transpose_bits(uint32_t *x, int columns) {
  uint32_t mask = 0x0000ffff;
  auto stage = [&](auto by) {
    constexpr int J = decltype(by)::value;
    for (int k = 0; k < 32; k = ((k | J) + 1) & ~J)
      for (int c = 0; c < columns; c += LANES) {
        U high = load_words(x + k * columns + c), low = load_words(x + (k | J) * columns + c);
        store_words(x + k * columns + c, pick(mask, high, shift<-J>(low)));
        store_words(x + (k | J) * columns + c, pick(mask, shift<J>(high), low));
      }
  };
  stage(Constant<16>());
  mask = 0x00ff00ff, stage(Constant<8>());
  mask = 0x0f0f0f0f, stage(Constant<4>());
  mask = 0x33333333, stage(Constant<2>());
  mask = 0x55555555, stage(Constant<1>());
}

// Words packed along D of 32 tokens, token(0) .. token(31), in value order.
template <class Token>
INLINE Planes load_turned_words(const Store &s, int64_t b, int64_t h, uint32_t *words, uint32_t *columns,
                                Token token) {
  int num_words = (int)ceil_div(s.dim, WORD_BITS), width = num_columns(s), pad = padded(s.dim);
  Planes planes;
  for (int p = 0; p < s.bits; p++) {
    const uint32_t *from = plane_at(s, b, h, 0, p);
    int64_t stride = plane_stride(s, p);
    for (int t = 0; t < TILE; t++) {
      const uint32_t *row = from + token(t) * stride;
      for (int w = 0; w < num_words; w++) columns[t * width + p * num_words + w] = row[w];
    }
  }
  transpose_bits(columns, width);
  for (int p = 0; p < s.bits; p++) {
    planes.at[p] = words + p * pad;
    for (int w = 0; w < num_words; w++)
      for (int i = 0; i < TILE; i++) words[p * pad + w * TILE + i] = columns[i * width + p * num_words + w];
  }
  return planes;
}

// Keys of a block in value order (MLA: the keys are the values).
NOINLINE Planes load_shared_words(const Store &s, int64_t b, int64_t h, int64_t block, uint32_t *words,
                                  uint32_t *columns) {
  return load_turned_words(s, b, h, words, columns, [&](int t) { return block * TILE + t; });
}

// Value order to the tokens in `valid` of a block of keys; `columns` is scratch.
NOINLINE void store_key_words(const Store &s, int64_t b, int64_t h, int64_t block, uint32_t valid,
                              const uint32_t *words, uint32_t *columns) {
  int num_words = (int)ceil_div(s.dim, WORD_BITS), width = num_columns(s), pad = padded(s.dim);
  for (int p = 0; p < s.bits; p++)
    for (int w = 0; w < num_words; w++)
      for (int i = 0; i < TILE; i++) columns[i * width + p * num_words + w] = words[p * pad + w * TILE + i];
  transpose_bits(columns, width);
  for (int p = 0; p < s.bits; p++) {
    uint32_t *to = (uint32_t *)plane_at(s, b, h, block * TILE, p);
    for (int t = 0; t < TILE; t++)
      if (valid >> t & 1)
        for (int w = 0; w < num_words; w++) to[t * plane_stride(s, p) + w] = columns[t * width + p * num_words + w];
  }
}

// Value order to a block of values: bits of tokens in `kept` stay, those in `valid` are new, the rest become zero.
INLINE void store_value_words(const Store &s, int64_t b, int64_t h, int64_t block, uint32_t kept, uint32_t valid,
                              const uint32_t *words) {
  int pad = padded(s.dim);
  for (int p = 0; p < s.bits; p++) {
    uint32_t *to = (uint32_t *)plane_at(s, b, h, block, p);
    for (int i = 0; i < s.dim; i++) to[i] = (kept ? to[i] & kept : 0) | (words[p * pad + i] & valid);
  }
}

// Scales of a block as float32, zero outside `valid`.
INLINE void load_scales(const Store &s, int64_t b, int64_t h, int64_t block, uint32_t valid, float *to) {
  const uint16_t *from = s.scale + b * s.scale_stride[0] + h * s.scale_stride[1] + block * TILE;
  for (int t = 0; t < TILE; t += LANES) store(to + t, load_float16(from + t));
  if (valid != ~0u)
    for (int t = 0; t < TILE; t++)
      if (!(valid >> t & 1)) to[t] = 0;
}

// Tokens of the block that lie in [start, stop).
INLINE uint32_t valid_tokens(int64_t block, int64_t start, int64_t stop) {
  int64_t low = start - block * TILE, high = stop - block * TILE;
  uint32_t from = low <= 0 ? ~0u : low >= TILE ? 0u : ~0u << low;
  uint32_t to = high >= TILE ? ~0u : high <= 0 ? 0u : ~(~0u << high);
  return from & to;
}
