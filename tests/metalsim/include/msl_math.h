// Arithmetic functions. half is computed in float and rounded once; vectors element by element. min, max and clamp take
// arguments of one type, as in Metal, so a mix is ambiguous here as well.
#pragma once
#pragma clang system_header

namespace metal {
#define MSL_1(name, expr)                          \
  inline float name(float x) { return expr; }      \
  inline half name(half h) {                       \
    float x = h;                                   \
    return (half)(expr);                           \
  }                                                \
  template <typename T, int N>                     \
  inline vec<T, N> name(vec<T, N> a) {             \
    vec<T, N> r;                                   \
    for (int i = 0; i < N; ++i) r[i] = name(a[i]); \
    return r;                                      \
  }
#define MSL_2(name, expr)                                \
  inline float name(float x, float y) { return expr; }   \
  inline half name(half a, half b) {                     \
    float x = a, y = b;                                  \
    return (half)(expr);                                 \
  }                                                      \
  template <typename T, int N>                           \
  inline vec<T, N> name(vec<T, N> a, vec<T, N> b) {      \
    vec<T, N> r;                                         \
    for (int i = 0; i < N; ++i) r[i] = name(a[i], b[i]); \
    return r;                                            \
  }
#define MSL_TRANSCENDENTAL                                                   \
  MSL_1(sqrt, __builtin_sqrtf(x)) MSL_1(rsqrt, 1.0f / __builtin_sqrtf(x))    \
  MSL_1(exp, __builtin_expf(x)) MSL_1(exp2, __builtin_exp2f(x))              \
  MSL_1(log, __builtin_logf(x)) MSL_1(log2, __builtin_log2f(x))              \
  MSL_1(sin, __builtin_sinf(x)) MSL_1(cos, __builtin_cosf(x))                \
  MSL_1(tanh, __builtin_tanhf(x)) MSL_2(pow, __builtin_powf(x, y))
namespace precise { MSL_TRANSCENDENTAL }
namespace fast { MSL_TRANSCENDENTAL }
MSL_TRANSCENDENTAL
MSL_1(fabs, __builtin_fabsf(x)) MSL_1(floor, __builtin_floorf(x)) MSL_1(ceil, __builtin_ceilf(x))
MSL_1(rint, __builtin_rintf(x)) MSL_1(round, __builtin_roundf(x))
MSL_1(sign, (float)((x > 0.0f) - (x < 0.0f)))
MSL_2(fmin, __builtin_fminf(x, y)) MSL_2(fmax, __builtin_fmaxf(x, y)) MSL_2(copysign, __builtin_copysignf(x, y))
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
template <typename T, int N>
inline vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
  for (int i = 0; i < N; ++i) a[i] = fma(a[i], b[i], c[i]);
  return a;
}
inline bool isnan(float x) { return x != x; }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
template <typename T>
inline enable_if_t<is_integral_v<T>, T> abs(T x) {
  return x < 0 ? T(-x) : x;
}
inline float abs(float x) { return __builtin_fabsf(x); }

#define MSL_ORDER(T)                               \
  inline T min(T a, T b) { return b < a ? b : a; } \
  inline T max(T a, T b) { return a < b ? b : a; } \
  inline T clamp(T x, T lo, T hi) { return min(max(x, lo), hi); }
MSL_ORDER(char) MSL_ORDER(uchar) MSL_ORDER(short) MSL_ORDER(ushort)
MSL_ORDER(int) MSL_ORDER(uint) MSL_ORDER(long) MSL_ORDER(ulong)
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline float clamp(float x, float lo, float hi) { return min(max(x, lo), hi); }
inline half min(half a, half b) { return (half)__builtin_fminf(a, b); }
inline half max(half a, half b) { return (half)__builtin_fmaxf(a, b); }
template <typename T>
inline T select(T a, T b, bool c) {
  return c ? b : a;
}
template <typename T, int N>
inline T dot(vec<T, N> a, vec<T, N> b) {
  T s = 0;
  for (int i = 0; i < N; ++i) s += a[i] * b[i];
  return s;
}
template <typename V>
inline bool any(V v) {
  for (int i = 0; i < vec_traits<V>::n; ++i)
    if (v[i]) return true;
  return false;
}
template <typename V>
inline bool all(V v) {
  for (int i = 0; i < vec_traits<V>::n; ++i)
    if (!v[i]) return false;
  return true;
}

template <typename T>
inline ulong msl_bits(T x) {
  return (ulong)x & (~0ul >> (64 - 8 * sizeof(T)));
}
template <typename T>
inline T popcount(T x) {
  return (T)__builtin_popcountl(msl_bits(x));
}
template <typename T>
inline T clz(T x) {
  return x ? (T)(__builtin_clzl(msl_bits(x)) - (64 - 8 * (int)sizeof(T))) : (T)(8 * sizeof(T));
}
template <typename T>
inline T ctz(T x) {
  return x ? (T)__builtin_ctzl(msl_bits(x)) : (T)(8 * sizeof(T));
}
template <typename T>
inline T extract_bits(T x, uint offset, uint bits) {
  static_assert(T(-1) > T(0), "of unsigned integers only");
  return bits ? (T)((msl_bits(x) >> offset) & (~0ul >> (64 - bits))) : T(0);
}
}  // namespace metal
