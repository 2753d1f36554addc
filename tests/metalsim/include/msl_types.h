// Types, address spaces and traits of the Metal Shading Language.
//
// With MSL_CHECK the address spaces are clang's own (1 device, 2 constant, 3 threadgroup), for type checking alone. Without
// it they are erased and a kernel can run. No standard header is included, so a shader that needs one fails here as it
// would on a Mac.
#pragma once
#pragma clang system_header

#ifdef MSL_CHECK
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2))) const
#define threadgroup __attribute__((address_space(3)))
#else
#define device
#define constant const
#define threadgroup
#endif
#define thread
#define kernel

#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define UINT_MAX 0xffffffffu
#define INT_MAX 0x7fffffff
#define M_PI_F 3.14159265358979323846f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef _Float16 half;
typedef __bf16 bfloat;
constexpr half operator""h(long double x) { return (half)x; }
constexpr half operator""h(unsigned long long x) { return (half)x; }

namespace metal {
template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));
template <typename T>
struct vec_traits {
  typedef T elem;
  static constexpr int n = 1;
};

// `float4(a, b.xy, c)`: any mix of scalars and vectors, or one scalar for all.
template <typename V, typename A>
inline void msl_put(V& r, int& i, A a) {
  typedef typename vec_traits<V>::elem elem;
  if constexpr (vec_traits<A>::n == 1)
    r[i++] = (elem)a;
  else
    for (int k = 0; k < vec_traits<A>::n; ++k) r[i++] = (elem)a[k];
}
template <typename V, typename A>
inline V msl_make(A a) {
  if constexpr (vec_traits<A>::n == 1)
    return (V)(typename vec_traits<V>::elem)a;
  else {
    static_assert(vec_traits<A>::n == vec_traits<V>::n, "vector conversion needs the same width");
    return __builtin_convertvector(a, V);
  }
}
template <typename V, typename A, typename B, typename... R>
inline V msl_make(A a, B b, R... rest) {
  V v;
  int i = 0;
  msl_put(v, i, a), msl_put(v, i, b), (msl_put(v, i, rest), ...);
  return v;
}
}  // namespace metal
using metal::msl_make;

#define MSL_VEC(T, N)                                 \
  typedef T T##N __attribute__((ext_vector_type(N))); \
  namespace metal {                                   \
  using ::T##N;                                       \
  template <>                                         \
  struct vec_traits<T##N> {                           \
    typedef T elem;                                   \
    static constexpr int n = N;                       \
  };                                                  \
  }
#define MSL_VECS(T) MSL_VEC(T, 2) MSL_VEC(T, 3) MSL_VEC(T, 4)
MSL_VECS(char) MSL_VECS(uchar) MSL_VECS(short) MSL_VECS(ushort) MSL_VECS(int) MSL_VECS(uint)
MSL_VECS(long) MSL_VECS(ulong) MSL_VECS(half) MSL_VECS(bfloat) MSL_VECS(float) MSL_VECS(bool)
// A macro with parameters fires only where the name is followed by a bracket: where a vector is constructed.
#define uchar4(...) msl_make<uchar4>(__VA_ARGS__)
#define int2(...) msl_make<int2>(__VA_ARGS__)
#define int3(...) msl_make<int3>(__VA_ARGS__)
#define int4(...) msl_make<int4>(__VA_ARGS__)
#define uint2(...) msl_make<uint2>(__VA_ARGS__)
#define uint3(...) msl_make<uint3>(__VA_ARGS__)
#define uint4(...) msl_make<uint4>(__VA_ARGS__)
#define half2(...) msl_make<half2>(__VA_ARGS__)
#define half3(...) msl_make<half3>(__VA_ARGS__)
#define half4(...) msl_make<half4>(__VA_ARGS__)
#define float2(...) msl_make<float2>(__VA_ARGS__)
#define float3(...) msl_make<float3>(__VA_ARGS__)
#define float4(...) msl_make<float4>(__VA_ARGS__)

template <typename To, typename From>
inline To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  return __builtin_bit_cast(To, x);
}

namespace metal {
template <bool B, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool B, typename T = void>
using enable_if_t = typename enable_if<B, T>::type;
template <typename A, typename B>
struct is_same {
  static constexpr bool value = false;
};
template <typename A>
struct is_same<A, A> {
  static constexpr bool value = true;
};
template <typename A, typename B>
constexpr bool is_same_v = is_same<A, B>::value;
template <typename T>
constexpr bool is_floating_point_v = is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>;
template <typename T>
constexpr bool is_integral_v = vec_traits<T>::n == 1 && !is_floating_point_v<T>;
}  // namespace metal
