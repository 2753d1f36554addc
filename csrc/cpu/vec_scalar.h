// Vectors of four floats in the compilers' own vector type: SSE2, NEON or plain scalars, whatever the target has.
#pragma once

typedef float F __attribute__((vector_size(16)));
typedef uint32_t U __attribute__((vector_size(16)));
typedef int32_t M __attribute__((vector_size(16)));  // lane mask, 0 or -1

constexpr int LANES = 4, VECS = 2, MAX_ROWS = 4;

INLINE F splat(float x) { return F{x, x, x, x}; }
INLINE U splat_word(uint32_t x) { return U{x, x, x, x}; }
INLINE F zero() { return splat(0); }
INLINE F load(const float *p) {
  F x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
INLINE void store(float *p, F x) { __builtin_memcpy(p, &x, sizeof x); }
INLINE U load_words(const uint32_t *p) {
  U x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
INLINE void store_words(uint32_t *p, U x) { __builtin_memcpy(p, &x, sizeof x); }
INLINE U as_words(F x) { return (U)x; }
INLINE F as_floats(U x) { return (F)x; }

INLINE U add_words(U a, U b) { return a + b; }
INLINE F fma(F a, F b, F c) { return a * b + c; }
INLINE M greater(F a, F b) { return a > b; }
INLINE F select(M m, F a, F b) { return (F)(((U)a & (U)m) | ((U)b & ~(U)m)); }
INLINE F maximum(F a, F b) { return select(greater(a, b), a, b); }
INLINE F absolute(F x) { return (F)((U)x & 0x7fffffffu); }
INLINE F square_root(F x) {
  for (int i = 0; i < LANES; i++) x[i] = __builtin_sqrtf(x[i]);
  return x;
}
INLINE uint32_t lane_bits(M m) { return (m[0] & 1) | (m[1] & 2) | (m[2] & 4) | (m[3] & 8); }
INLINE F floats_of_words(U x) { return F{(float)x[0], (float)x[1], (float)x[2], (float)x[3]}; }
INLINE U and_words(U a, U b) { return a & b; }
INLINE F settled(F x) {  // rounded now: no product of this and no sum of that become one operation
#if defined(__x86_64__)
  __asm__("" : "+x"(x));
#elif defined(__aarch64__)
  __asm__("" : "+w"(x));
#else
  __asm__("" : "+m"(x));
#endif
  return x;
}
INLINE void store_lanes(float *p, F x, uint32_t lanes) {  // these lanes side by side
  for (; lanes; lanes &= lanes - 1) *p++ = x[__builtin_ctz(lanes)];
}
// Set bits of a lane: counted() in its four bytes, of which sums below 256 may be taken, and their total.
INLINE U counted(U x) {
  x = x - (x >> 1 & 0x55555555u);
  x = (x & 0x33333333u) + (x >> 2 & 0x33333333u);
  return (x + (x >> 4)) & 0x0f0f0f0fu;
}
INLINE U total_count(U x) {
  x = (x & 0x00ff00ffu) + (x >> 8 & 0x00ff00ffu);
  return (x & 0xffffu) + (x >> 16);
}
INLINE float reduce_add(F x) { return (x[0] + x[1]) + (x[2] + x[3]); }
INLINE float reduce_max(F x) {
  float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
  return a > b ? a : b;
}

template <int N>
INLINE U shift(U x) {  // to the right, or to the left if N is negative
  if constexpr (N > 0) return x >> N;
  if constexpr (N < 0) return x << -N;
  return x;
}
INLINE U pick(uint32_t mask, U a, U b) { return (a & mask) | (b & ~mask); }

struct Book {
  float table[16];
};
INLINE Book make_book(const float *table) {
  Book book;
  __builtin_memcpy(book.table, table, sizeof book.table);
  return book;
}
template <int BITS>
INLINE F lookup(const Book &book, U codes) {  // of the low 4 bits of each lane
  codes &= 15u;
  return F{book.table[codes[0]], book.table[codes[1]], book.table[codes[2]], book.table[codes[3]]};
}

INLINE F load_bfloat16(const uint16_t *p) {
  U x = {p[0], p[1], p[2], p[3]};
  return (F)(x << 16);
}
INLINE void store_bfloat16(uint16_t *p, F x) {
  for (int i = 0; i < LANES; i++) p[i] = to_bfloat16(x[i]);
}
INLINE F load_float16(const uint16_t *p) {
  return F{from_float16(p[0]), from_float16(p[1]), from_float16(p[2]), from_float16(p[3])};
}
INLINE void store_float16(uint16_t *p, F x) {
  for (int i = 0; i < LANES; i++) p[i] = to_float16(x[i]);
}
INLINE void transpose_square(const float *x, int64_t ldx, float *y, int64_t ldy) {  // 8 x 8
  for (int i = 0; i < 8; i++)
    for (int j = 0; j < 8; j++) y[j * ldy + i] = x[i * ldx + j];
}

// Up to 4 words of WORD_ROWS rows: y[w][row] = x[row][w].
constexpr int WORD_ROWS = 4;
INLINE void transpose_words(const uint32_t *x, int64_t ldx, int words, uint32_t *y, int64_t ldy) {
  for (int w = 0; w < words; w++)
    for (int i = 0; i < WORD_ROWS; i++) y[w * ldy + i] = x[i * ldx + w];
}
