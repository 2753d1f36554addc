// The host twin of csrc/cuda/mma.cuh: the same functions, from the definitions of the PTX manual.
#pragma once

#include "emulator.h"

namespace kvq {
namespace cuda {

inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) { return __byte_perm(a, b, selector); }

template <class T>
float float_of_half(const uint32_t &pair, int which);
template <>
inline float float_of_half<__half>(const uint32_t &pair, int which) {
  return __half2float(((const __half *)&pair)[which]);
}
template <>
inline float float_of_half<__nv_bfloat16>(const uint32_t &pair, int which) {
  return __bfloat162float(((const __nv_bfloat16 *)&pair)[which]);
}

// m16n8k16: element (row, k) of A is in lane 4 (row % 8) + k % 8 / 2, register row / 8 + 2 (k / 8), half k % 2; (k, n) of
// B in lane 4 n + k % 8 / 2, register k / 8; (row, n) of C in lane 4 (row % 8) + n / 2, register 2 (row / 8) + n % 2.
template <class Half>
inline void mma_half(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  struct Operand {
    uint32_t a[4], b[2];
    float *c;
  } operand{{a0, a1, a2, a3}, {b0, b1}, c};
  emulated::meet_warp("mma.m16n8k16", &operand, [] {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; lane++) {
      const Operand *x = (const Operand *)emulated::operand_of(lane);
      for (int r = 0; r < 4; r++)
        for (int i = 0; i < 2; i++)
          a[lane / 4 + 8 * (r % 2)][lane % 4 * 2 + i + 8 * (r / 2)] = float_of_half<Half>(x->a[r], i);
      for (int r = 0; r < 2; r++)
        for (int i = 0; i < 2; i++) b[lane % 4 * 2 + i + 8 * r][lane / 4] = float_of_half<Half>(x->b[r], i);
    }
    for (int lane = 0; lane < 32; lane++) {
      const Operand *x = (const Operand *)emulated::operand_of(lane);
      for (int r = 0; r < 4; r++)
        for (int k = 0; k < 16; k++) x->c[r] += a[lane / 4 + 8 * (r / 2)][k] * b[k][lane % 4 * 2 + r % 2];
    }
  });
}
// The same with sums in float16, in pairs of columns.
inline void mma_half_pairs(uint32_t (&c)[2], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                           uint32_t b1) {
  float sum[4];
  for (int e = 0; e < 4; e++) sum[e] = float_of_half<__half>(c[e / 2], e % 2);
  mma_half<__half>(sum, a0, a1, a2, a3, b0, b1);
  for (int r = 0; r < 2; r++) {
    __half2 pair = __floats2half2_rn(sum[2 * r], sum[2 * r + 1]);
    c[r] = *(uint32_t *)&pair;
  }
}
// m16n8k8: the first half of k.
inline void mma_half_k8(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  mma_half<__half>(c, a0, a1, 0, 0, b, 0);
}

// Row `lane % 8` of matrix `lane / 8` starts at `row`; lane 4 r + j gets elements 2 j and 2 j + 1 of row r of each matrix,
// or, transposed, elements r of rows 2 j and 2 j + 1.
inline void load_matrices(uint32_t (&result)[4], const void *row, bool transposed) {
  struct Operand {
    const uint16_t *row;
    uint32_t *result;
  } operand{(const uint16_t *)row, result};
  if ((uintptr_t)row % 16) emulated::fail("ldmatrix of a row that is not aligned to 16 bytes");
  if (!emulated::in_shared(row)) emulated::fail("ldmatrix outside shared memory");
  emulated::meet_warp(transposed ? "ldmatrix.trans" : "ldmatrix", &operand, [transposed] {
    for (int lane = 0; lane < 32; lane++)
      for (int m = 0; m < 4; m++) {
        uint32_t pair = 0;
        for (int i = 0; i < 2; i++) {
          int r = transposed ? lane % 4 * 2 + i : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + i;
          pair |= (uint32_t)((Operand *)emulated::operand_of(8 * m + r))->row[column] << (16 * i);
        }
        ((Operand *)emulated::operand_of(lane))->result[m] = pair;
      }
  });
}
inline void load_transposed(uint32_t (&r)[4], const void *shared) { load_matrices(r, shared, true); }
inline void load_straight(uint32_t (&r)[4], const void *shared) { load_matrices(r, shared, false); }

inline uint32_t and_or(uint32_t x, uint32_t mask, uint32_t bits) { return (x & mask) | bits; }
inline int opaque(int x) { return x; }
template <class X>
void hold(X *&) {}
inline float fast_exp2(float x) { return exp2f(x); }

// A copy that lands at once or when it is waited for.
template <int BYTES>
inline void copy_async(void *shared, const void *global) {
  if ((uintptr_t)shared % BYTES || (uintptr_t)global % BYTES) emulated::fail("cp.async of an address that is not aligned");
  if (!emulated::in_shared(shared)) emulated::fail("cp.async outside shared memory");
  if (emulated::random_bits() % 2)
    memcpy(shared, global, BYTES);
  else
    emulated::thread->copies.push_back([=] { memcpy(shared, global, BYTES); });
}
inline void wait_copies() {
  for (auto &copy : emulated::thread->copies) copy();
  emulated::thread->copies.clear(), emulated::thread->groups.clear();
}

}  // namespace cuda
}  // namespace kvq
