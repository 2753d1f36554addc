// Scratch, rows of any dtype to and from float32, transposes, exp and tanh.
#pragma once

struct Scratch {
  int pad;
  float *a, *b, *c;           // tiles [32, pad] or [pad, 32]
  float *weights;             // [rows <= 32, 32]
  float *sums;                // [rows <= 32, 32], LANES used
  float *maxima;              // [32]
  float *vector, *vector2;    // [pad]
  uint32_t *words, *columns;  // [MAX_BITS, pad], [32, MAX_BITS * 16]
};

INLINE Scratch carve(char *memory, int pad) {
  Scratch s;
  float *p = (float *)memory;
  s.pad = pad;
  s.a = p, p += TILE * pad;
  s.b = p, p += TILE * pad;
  s.c = p, p += TILE * pad;
  s.words = (uint32_t *)p, p += MAX_BITS * pad;
  s.columns = (uint32_t *)p, p += TILE * MAX_BITS * (MAX_HEAD_DIM / WORD_BITS);
  s.weights = p, p += TILE * TILE;
  s.sums = p, p += TILE * TILE;
  s.maxima = p, p += TILE;
  s.vector = p, p += pad;
  s.vector2 = p;
  return s;
}

INLINE int padded(int dim) { return (int)round_up(dim, TILE); }
INLINE void fill(float *x, int64_t n, float value) {
  for (int64_t i = 0; i < n; i++) x[i] = value;
}
INLINE int element_size(Dtype dtype) { return dtype == FLOAT32 ? 4 : 2; }

template <class Scalar, class Vector, class From>
INLINE void convert_in(const char *from, int n, float *to, Vector vector, From scalar) {
  const Scalar *x = (const Scalar *)from;
  int i = 0;
  for (; i + LANES <= n; i += LANES) store(to + i, vector(x + i));
  for (; i < n; i++) to[i] = scalar(x[i]);
}

// n elements to float32.
NOINLINE void load_row(const char *x, Dtype dtype, int n, float *to) {
  if (dtype == FLOAT32) {
    __builtin_memcpy(to, x, 4 * (int64_t)n);
  } else if (dtype == BFLOAT16) {
    convert_in<uint16_t>(
        x, n, to, [](const uint16_t *p) { return load_bfloat16(p); }, [](uint16_t h) { return from_bfloat16(h); });
  } else {
    convert_in<uint16_t>(
        x, n, to, [](const uint16_t *p) { return load_float16(p); }, [](uint16_t h) { return from_float16(h); });
  }
}

NOINLINE void store_row(const float *x, int n, char *to, Dtype dtype) {
  uint16_t *half = (uint16_t *)to;
  int i = 0;
  if (dtype == FLOAT32) {
    __builtin_memcpy(to, x, 4 * (int64_t)n);
  } else if (dtype == BFLOAT16) {
    for (; i + LANES <= n; i += LANES) store_bfloat16(half + i, load(x + i));
    for (; i < n; i++) half[i] = to_bfloat16(x[i]);
  } else {
    for (; i + LANES <= n; i += LANES) store_float16(half + i, load(x + i));
    for (; i < n; i++) half[i] = to_float16(x[i]);
  }
}

INLINE char *row_at(const Dense &x, int64_t batch, int64_t head, int64_t token) {
  return x.data + element_size(x.dtype) * (batch * x.stride[0] + head * x.stride[1] + token * x.stride[2]);
}

// As load_row, with zeros up to the padded length.
INLINE void load_padded(const char *x, Dtype dtype, int n, float *to) {
  load_row(x, dtype, n, to);
  for (int i = n; i < padded(n); i++) to[i] = 0;
}

// x [rows, columns] to y [columns, rows]; both multiples of 8.
NOINLINE void transpose(const float *x, int64_t ldx, int rows, int columns, float *y, int64_t ldy) {
  for (int i = 0; i < rows; i += 8)
    for (int j = 0; j < columns; j += 8) transpose_square(x + i * ldx + j, ldx, y + j * ldy + i, ldy);
}

INLINE void scale_row(float *x, int n, float by) {  // n a multiple of 32
  for (int i = 0; i < n; i += LANES) store(x + i, load(x + i) * splat(by));
}
INLINE void add_scaled(float *x, const float *y, int n, float by) {
  for (int i = 0; i < n; i += LANES) store(x + i, fma(load(y + i), splat(by), load(x + i)));
}

INLINE F round_small(F x) { return (x + splat(12582912.0f)) - splat(12582912.0f); }  // |x| < 2^22

INLINE float dot_row(const float *x, const float *y, int n) {
  F sum = zero();
  int i = 0;
  for (; i + LANES <= n; i += LANES) sum = fma(load(x + i), load(y + i), sum);
  float total = reduce_add(sum);
  for (; i < n; i++) total += x[i] * y[i];
  return total;
}

// e^x for x <= 0, 0 below -87, NaN of NaN. With n = round(x / ln 2) and |r| <= 0.35: e^x = 2^n e^r, e^r by its
// series to r^6.
INLINE F exp_negative(F x) {
  const F magic = splat(12582912.0f);  // 1.5 * 2^23: the sum's low mantissa bits are the rounded integer
  F y = maximum(splat(-87.0f), x);  // the second operand where one is NaN
  F t = fma(y, splat(1.44269504f), magic);
  F n = t - magic;
  F r = fma(n, splat(-0.693145752f), y);
  r = fma(n, splat(-1.42860677e-6f), r);
  F p = fma(r, splat(1.0f / 720), splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  return select(greater(splat(-87.0f), x), zero(),
                p * as_floats(add_words(shift<-23>(as_words(t)), splat_word(127u << 23))));
}

// Below 0.6 a convergent of x / (1 + x^2 / (3 + x^2 / (5 + ...))), above it from exp.
INLINE F tanh_of(F x) {
  F a = absolute(x), z = a * a;
  F top = fma(fma(z, splat(21.0f), splat(1260.0f)), z, splat(10395.0f));
  F bottom = fma(fma(z + splat(210.0f), z, splat(4725.0f)), z, splat(10395.0f));
  F e = exp_negative(a * splat(-2.0f));
  F large = (splat(1.0f) - e) / (splat(1.0f) + e);
  F y = select(greater(a, splat(0.6f)), large, a * top / bottom);
  return select(greater(zero(), x), zero() - y, y);
}

INLINE float exp_one(float x) { return __builtin_expf(x); }
