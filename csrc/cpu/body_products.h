// The one inner loop of the library: out[r][lane] += sum over positions of coef[r][position] * x[position][lane].
//
// x is a float tile or 32 positions of packed codes. For scores the lanes are tokens, the positions are dims and coef
// is the rotated query; for values the lanes are dims, the positions are tokens and coef is the weights: keys packed
// along D and values along T have the same shape here, one word of each plane a lane. Codes become floats in registers:
// four words of nibbles (a few shifts and selects), then one shift and one shuffle a vector, shared by all rows of the
// group.
#pragma once

constexpr int PANEL = LANES * VECS;  // lanes that one pass holds in registers; divides 32

constexpr int FEW_ROWS = 8;  // up to here it is faster to unpack for each group than once into a float tile

// Bit planes of one panel, the plane of code bit b at planes[b] (the sign is the highest bit).
struct Planes {
  const uint32_t *at[MAX_BITS];
};

// Nibble k is the code of position 4k + J; bits of a nibble at and above BITS are arbitrary.
template <int BITS, int J>
INLINE U nibbles(const U *plane) {
  U n = shift<J>(plane[0]);
  n = pick(0x22222222u, shift<J - 1>(plane[1]), n);
  if constexpr (BITS > 2) n = pick(0x44444444u, shift<J - 2>(plane[2]), n);
  if constexpr (BITS > 3) n = pick(0x88888888u, shift<J - 3>(plane[3]), n);
  return n;
}

// Values of the 2^bits codes, repeated to 16 so that the bits of a nibble above the code do not matter.
INLINE Book book_of(const Store &s) {
  float table[16];
  int half = 1 << (s.bits - 1);
  for (int i = 0; i < 16; i++) table[i] = (i & half ? -1.0f : 1.0f) * s.levels[i & (half - 1)];
  return make_book(table);
}

// Positions J, J + 4, ... of one panel. The words are read anew for each J: kept in registers they would push the sums
// of AVX2 out of them, and the empty asm keeps the compiler from keeping them.
template <int BITS, int ROWS, int J>
INLINE void packed_quarter(const Planes &planes, int64_t at, const float *coef, const Book &book,
                           F (&acc)[ROWS][VECS]) {
  U n[VECS];
  __asm__("" : "+r"(at));
  UNROLL_FOR (int v = 0; v < VECS; v++) {
    U plane[BITS];
    UNROLL_FOR (int b = 0; b < BITS; b++) plane[b] = load_words(planes.at[b] + at + v * LANES);
    n[v] = nibbles<BITS, J>(plane);
  }
  UNROLL_FOR (int k = 0; k < 8; k++) {
    F x[VECS];
    UNROLL_FOR (int v = 0; v < VECS; v++) {
      x[v] = lookup<BITS>(book, n[v]);
      n[v] = shift<4>(n[v]);
    }
    UNROLL_FOR (int r = 0; r < ROWS; r++) {
      F c = splat(coef[r * TILE + 4 * k + J]);
      UNROLL_FOR (int v = 0; v < VECS; v++) acc[r][v] = fma(c, x[v], acc[r][v]);
    }
  }
}

template <int ROWS, int NUM>
INLINE void load_panel(const float *x, int64_t ldx, F (&acc)[ROWS][NUM]) {
  UNROLL_FOR (int r = 0; r < ROWS; r++)
    UNROLL_FOR (int v = 0; v < NUM; v++) acc[r][v] = load(x + r * ldx + v * LANES);
}
template <int ROWS, int NUM>
INLINE void store_panel(float *x, int64_t ldx, const F (&acc)[ROWS][NUM]) {
  UNROLL_FOR (int r = 0; r < ROWS; r++)
    UNROLL_FOR (int v = 0; v < NUM; v++) store(x + r * ldx + v * LANES, acc[r][v]);
}

// out[r][0 .. width) += over `words` words of each lane. Word w lies 32 lanes after word w - 1, the coefficients
// [rows of the group, 32] of word w lie `step` after those of word w - 1.
template <int BITS, int ROWS>
NOINLINE void packed_rows(const Planes &planes, int words, int width, const float *coef, int64_t step, const Book &book,
                          float *out, int64_t ldo) {
  for (int lane = 0; lane < width; lane += PANEL) {
    F acc[ROWS][VECS];
    load_panel(out + lane, ldo, acc);
    const float *c = coef;
    for (int64_t at = lane, end = lane + words * TILE; at < end; at += TILE, c += step) {
      packed_quarter<BITS, ROWS, 0>(planes, at, c, book, acc);
      packed_quarter<BITS, ROWS, 1>(planes, at, c, book, acc);
      packed_quarter<BITS, ROWS, 2>(planes, at, c, book, acc);
      packed_quarter<BITS, ROWS, 3>(planes, at, c, book, acc);
    }
    store_panel(out + lane, ldo, acc);
  }
}

// out[r][0 .. width) += over `count` positions of a float tile.
template <int ROWS>
NOINLINE void dense_rows(const float *x, int64_t ldx, int count, int width, const float *coef, int64_t ldc,
                         int64_t step, float *out, int64_t ldo) {
  for (int lane = 0; lane < width; lane += PANEL) {
    F acc[ROWS][VECS];
    load_panel(out + lane, ldo, acc);
    const float *at = x + lane, *c = coef;
    for (int k = 0; k < count; k++, at += ldx, c += step) {
      F value[VECS];
      UNROLL_FOR (int v = 0; v < VECS; v++) value[v] = load(at + v * LANES);
      UNROLL_FOR (int r = 0; r < ROWS; r++) {
        F by = splat(c[r * ldc]);
        UNROLL_FOR (int v = 0; v < VECS; v++) acc[r][v] = fma(by, value[v], acc[r][v]);
      }
    }
    store_panel(out + lane, ldo, acc);
  }
}

// Calls with<ROWS>(first row) for groups of 8 (where the registers allow), 4, 3, 2 and 1 rows.
template <class Call>
INLINE void in_groups(int rows, Call call) {
  for (int r = 0; r < rows;) {
    int left = rows - r;
    if (MAX_ROWS == 8 && left >= 8)
      call.template with<MAX_ROWS>(r), r += 8;
    else if (left >= 4)
      call.template with<4>(r), r += 4;
    else if (left == 3)
      call.template with<3>(r), r += 3;
    else if (left == 2)
      call.template with<2>(r), r += 2;
    else
      call.template with<1>(r), r += 1;
  }
}

struct DenseCall {
  const float *x;
  int64_t ldx;
  int count, width;
  const float *coef;
  int64_t ldc, step;
  float *out;
  int64_t ldo;
  template <int ROWS>
  INLINE_MEMBER void with(int r) const {
    dense_rows<ROWS>(x, ldx, count, width, coef + r * ldc, ldc, step, out + r * ldo, ldo);
  }
};

template <int BITS>
struct PackedCall {
  const Planes &planes;
  int words, width;
  const float *coef;
  int64_t step;
  const Book &book;
  float *out;
  int64_t ldo;
  template <int ROWS>
  INLINE_MEMBER void with(int r) const {
    packed_rows<BITS, ROWS>(planes, words, width, coef + r * TILE, step, book, out + r * ldo, ldo);
  }
};

INLINE void dense_product(int rows, const float *x, int64_t ldx, int count, int width, const float *coef, int64_t ldc,
                          int64_t step, float *out, int64_t ldo) {
  in_groups(rows, DenseCall{x, ldx, count, width, coef, ldc, step, out, ldo});
}

// coef [words, rows, 32].
INLINE void packed_product(int bits, int rows, const Planes &planes, int words, int width, const float *coef,
                           const Book &book, float *out, int64_t ldo) {
  int64_t step = rows * TILE;
  if (bits == 2) in_groups(rows, PackedCall<2>{planes, words, width, coef, step, book, out, ldo});
  if (bits == 3) in_groups(rows, PackedCall<3>{planes, words, width, coef, step, book, out, ldo});
  if (bits == 4) in_groups(rows, PackedCall<4>{planes, words, width, coef, step, book, out, ldo});
}

template <int BITS, int J>
INLINE void expand_quarter(const U *plane, const Book &book, float *out, int64_t ldo) {
  U n = nibbles<BITS, J>(plane);
  UNROLL_FOR (int k = 0; k < 8; k++) {
    store(out + (4 * k + J) * ldo, lookup<BITS>(book, n));
    n = shift<4>(n);
  }
}

// out[position][lane] = value(code) for 32 positions of `width` lanes.
template <int BITS>
NOINLINE void expand_rows(const Planes &planes, int width, const Book &book, float *out, int64_t ldo) {
  for (int lane = 0; lane < width; lane += LANES) {
    U plane[BITS];
    for (int b = 0; b < BITS; b++) plane[b] = load_words(planes.at[b] + lane);
    expand_quarter<BITS, 0>(plane, book, out + lane, ldo);
    expand_quarter<BITS, 1>(plane, book, out + lane, ldo);
    expand_quarter<BITS, 2>(plane, book, out + lane, ldo);
    expand_quarter<BITS, 3>(plane, book, out + lane, ldo);
  }
}
INLINE void expand(int bits, const Planes &planes, int width, const Book &book, float *out, int64_t ldo) {
  if (bits == 2) expand_rows<2>(planes, width, book, out, ldo);
  if (bits == 3) expand_rows<3>(planes, width, book, out, ldo);
  if (bits == 4) expand_rows<4>(planes, width, book, out, ldo);
}
