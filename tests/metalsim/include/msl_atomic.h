// Atomic functions of relaxed order, the only one Metal has.
#pragma once
#pragma clang system_header

namespace metal {
enum memory_order { memory_order_relaxed };
template <typename T>
struct atomic {
  T v;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;

#define MSL_RMW(AS, name, expr)                                                     \
  template <typename T>                                                             \
  inline T name(AS atomic<T>* p, decltype(T()) x, memory_order) {                   \
    T a, b;                                                                         \
    __atomic_load((T*)&p->v, &a, 0);                                                \
    do b = expr;                                                                    \
    while (!__atomic_compare_exchange((T*)&p->v, &a, &b, false, 0, 0));             \
    return a;                                                                       \
  }
#define MSL_ATOMIC(AS)                                                              \
  template <typename T>                                                             \
  inline T atomic_load_explicit(AS const atomic<T>* p, memory_order) {              \
    T r;                                                                            \
    __atomic_load((T*)&p->v, &r, 0);                                                \
    return r;                                                                       \
  }                                                                                 \
  template <typename T>                                                             \
  inline void atomic_store_explicit(AS atomic<T>* p, T x, memory_order) {           \
    __atomic_store((T*)&p->v, &x, 0);                                               \
  }                                                                                 \
  MSL_RMW(AS, atomic_fetch_add_explicit, a + x)                                     \
  MSL_RMW(AS, atomic_fetch_or_explicit, a | x)                                      \
  MSL_RMW(AS, atomic_fetch_min_explicit, a < x ? a : x)                             \
  MSL_RMW(AS, atomic_fetch_max_explicit, a < x ? x : a)
#ifdef MSL_CHECK
MSL_ATOMIC(device) MSL_ATOMIC(threadgroup)
#else
MSL_ATOMIC()
#endif
}  // namespace metal
