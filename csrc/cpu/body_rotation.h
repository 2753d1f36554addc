// R and R^T on a tile [D, 32]: lanes are vectors, so every step is whole vectors with a scalar from the rotation.
#pragma once

INLINE bool is_identity(const Rotation &r) { return r.rounds == 0 && !r.blocks && !r.matrix; }

template <int RADIX>
INLINE void hadamard_pass(float *x, int size, int half) {
  for (int base = 0; base < size; base += RADIX * half)
    for (int i = base; i < base + half; i++)
      for (int c = 0; c < TILE; c += LANES) {
        F v[RADIX];
        UNROLL_FOR (int j = 0; j < RADIX; j++) v[j] = load(x + (i + j * half) * TILE + c);
        UNROLL_FOR (int step = 1; step < RADIX; step *= 2)
          UNROLL_FOR (int j = 0; j < RADIX; j++)
            if (!(j & step)) {
              F low = v[j], high = v[j + step];
              v[j] = low + high;
              v[j + step] = low - high;
            }
        UNROLL_FOR (int j = 0; j < RADIX; j++) store(x + (i + j * half) * TILE + c, v[j]);
      }
}

// Not normalised; three stages a pass, as memory traffic decides.
NOINLINE void hadamard(float *x, int size) {
  int half = 1;
  for (; size / half >= 8; half *= 8) hadamard_pass<8>(x, size, half);
  if (size / half == 4) hadamard_pass<4>(x, size, half);
  if (size / half == 2) hadamard_pass<2>(x, size, half);
}

INLINE int largest_power_of_two(int n) {
  int power = 1;
  while (2 * power <= n) power *= 2;
  return power;
}

// One round: each window in turn (the first P coordinates, then the last P) times its part of the signs, transformed.
NOINLINE void mix(float *x, int dim, const float *sign, bool inverse) {
  int power = largest_power_of_two(dim), windows = power == dim ? 1 : 2;
  float norm = 1.0f / __builtin_sqrtf((float)power);
  for (int i = 0; i < windows; i++) {
    int first = (inverse ? windows - 1 - i : i) * (dim - power);
    if (inverse) hadamard(x + first * TILE, power);
    for (int d = first; d < first + power; d++) scale_row(x + d * TILE, TILE, sign[d] * norm);
    if (!inverse) hadamard(x + first * TILE, power);
  }
}

NOINLINE void apply_blocks(float *x, int dim, const float *blocks, bool inverse) {
  for (int n = 0; n < dim; n += 4, blocks += 16)
    for (int c = 0; c < TILE; c += LANES) {
      F v[4], y[4];
      UNROLL_FOR (int i = 0; i < 4; i++) v[i] = load(x + (n + i) * TILE + c);
      UNROLL_FOR (int i = 0; i < 4; i++) {
        y[i] = zero();
        UNROLL_FOR (int j = 0; j < 4; j++)
          y[i] = fma(splat(inverse ? blocks[4 * j + i] : blocks[4 * i + j]), v[j], y[i]);
      }
      UNROLL_FOR (int i = 0; i < 4; i++) store(x + (n + i) * TILE + c, y[i]);
    }
}

NOINLINE void apply_matrix(float *x, int dim, const float *matrix, bool inverse, float *other) {
  __builtin_memcpy(other, x, sizeof(float) * TILE * dim);
  fill(x, TILE * dim, 0);
  dense_product(dim, other, TILE, dim, TILE, matrix, inverse ? 1 : dim, inverse ? dim : 1, x, TILE);
}

// In place; `other` is a tile of scratch.
NOINLINE void rotate_tile(const Rotation &r, bool inverse, float *x, float *other) {
  if (!inverse) {
    for (int i = 0; i < r.rounds; i++) mix(x, r.dim, r.signs + i * r.dim, false);
    if (r.blocks) apply_blocks(x, r.dim, r.blocks, false);
    if (r.matrix) apply_matrix(x, r.dim, r.matrix, false, other);
  } else {
    if (r.matrix) apply_matrix(x, r.dim, r.matrix, true, other);
    if (r.blocks) apply_blocks(x, r.dim, r.blocks, true);
    for (int i = r.rounds - 1; i >= 0; i--) mix(x, r.dim, r.signs + i * r.dim, true);
  }
}

// Rows [32, pad] rotated in place, through the scratch `tile`.
INLINE void rotate_rows(const Rotation &r, bool inverse, float *rows, int pad, float *tile) {
  transpose(rows, pad, TILE, pad, tile, TILE);
  rotate_tile(r, inverse, tile, rows);
  transpose(tile, TILE, pad, TILE, rows, pad);
}

static void rotate(const Rotation &r, bool inverse, const char *const *x, Dtype x_dtype, char *const *out,
                   Dtype out_dtype, int count, char *scratch) {
  int pad = padded(r.dim);
  Scratch s = carve(scratch, pad);
  fill(s.a, TILE * pad, 0);
  for (int i = 0; i < count; i++) load_row(x[i], x_dtype, r.dim, s.a + i * pad);
  rotate_rows(r, inverse, s.a, pad, s.b);
  for (int i = 0; i < count; i++) store_row(s.a + i * pad, r.dim, out[i], out_dtype);
}
