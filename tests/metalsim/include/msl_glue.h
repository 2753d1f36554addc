// Binds the parameters of a kernel: buffers by index, thread positions by attribute. What a kernel takes is described as
// text, one line a kernel and one a parameter, which library.py reads.
#pragma once
#pragma clang system_header

namespace msl {
template <typename T>
struct name {
  static constexpr const char* v = "struct";
};
#define MSL_NAME(T)                           \
  template <>                                 \
  struct name<T> {                            \
    static constexpr const char* v = #T;      \
  };
#define MSL_NAMES(T) MSL_NAME(T) MSL_NAME(T##2) MSL_NAME(T##3) MSL_NAME(T##4)
MSL_NAMES(char) MSL_NAMES(uchar) MSL_NAMES(short) MSL_NAMES(ushort) MSL_NAMES(int) MSL_NAMES(uint)
MSL_NAMES(long) MSL_NAMES(ulong) MSL_NAMES(half) MSL_NAMES(bfloat) MSL_NAMES(float) MSL_NAME(bool)

template <typename T>
struct strip {
  typedef T type;
};
template <typename T>
struct strip<const T> {
  typedef T type;
};

struct param {
  const char* attribute;
  int index;
  char kind;  // p pointer, r reference, v value
  int is_const;
  const char* type;
  int size, align;
};

template <typename T>
struct bind {  // a thread position
  typedef T elem;
  static constexpr char kind = 'v';
  static constexpr int is_const = 1;
  static T get(void* const*, int, const uint* v) {
    if constexpr (metal::vec_traits<T>::n == 1) {
      return (T)v[0];
    } else {
      T r;
      for (int i = 0; i < metal::vec_traits<T>::n; ++i) r[i] = (typename metal::vec_traits<T>::elem)v[i];
      return r;
    }
  }
};
template <typename T>
struct bind<T*> {
  typedef typename strip<T>::type elem;
  static constexpr char kind = 'p';
  static constexpr int is_const = !metal::is_same_v<T, elem>;
  static T* get(void* const* buffers, int i, const uint*) { return (T*)buffers[i]; }
};
template <typename T>
struct bind<T&> {
  typedef typename strip<T>::type elem;
  static constexpr char kind = 'r';
  static constexpr int is_const = !metal::is_same_v<T, elem>;
  static T& get(void* const* buffers, int i, const uint*) { return *(T*)buffers[i]; }
};

template <int... I>
struct seq {};
template <int N, int... I>
struct counted : counted<N - 1, N - 1, I...> {};
template <int... I>
struct counted<0, I...> {
  typedef seq<I...> type;
};

inline const uint* position(const char* attribute) {
  static const uint width = 32;
  const msl_ctx* c = msl_rt_ctx();
  const struct {
    const char* name;
    const uint* value;
  } known[] = {{"thread_position_in_grid", c->in_grid},         {"thread_position_in_threadgroup", c->in_tg},
               {"threadgroup_position_in_grid", c->tg},         {"threads_per_grid", c->grid},
               {"threads_per_threadgroup", c->size_tg},         {"dispatch_threads_per_threadgroup", c->full_tg},
               {"threadgroups_per_grid", c->n_tg},              {"thread_index_in_threadgroup", &c->index_tg},
               {"thread_index_in_simdgroup", &c->lane},         {"simdgroup_index_in_threadgroup", &c->simd},
               {"simdgroups_per_threadgroup", &c->n_simd},      {"threads_per_simdgroup", &width}};
  for (auto& each : known)
    if (!__builtin_strcmp(each.name, attribute)) return each.value;
  return nullptr;
}

template <typename F>
struct signature;
template <typename F>
struct signature<F&> : signature<F> {};  // decltype((function)) is a reference
template <typename... P>
struct signature<void(P...)> {
  static constexpr int n = sizeof...(P);
  template <int... I>
  static void call(void (*f)(P...), void* const* buffers, const param* p, seq<I...>) {
    f(bind<P>::get(buffers, p[I].index, p[I].index < 0 ? position(p[I].attribute) : nullptr)...);
  }
  static void describe(param* p) {
    ((p->kind = bind<P>::kind, p->is_const = bind<P>::is_const, p->type = name<typename bind<P>::elem>::v,
      p->size = sizeof(typename bind<P>::elem), p->align = alignof(typename bind<P>::elem), ++p),
     ...);
  }
};

struct entry {
  const char* name;
  int max_threads, n;
  const param* params;
  void (*run)(void* const*);
};
}  // namespace msl

// One kernel: the function, then {"attribute", buffer index} of each parameter.
#define MSL_KERNEL(ID, FUNCTION, ...)                                                                             \
  typedef msl::signature<decltype(FUNCTION)> msl_signature_##ID;                                                  \
  static const msl::param* msl_params_##ID() {                                                                    \
    static msl::param p[msl_signature_##ID::n + 1] = {__VA_ARGS__};                                               \
    if (!p[0].type) msl_signature_##ID::describe(p);                                                              \
    return p;                                                                                                     \
  }                                                                                                               \
  static void msl_run_##ID(void* const* buffers) {                                                                \
    msl_signature_##ID::call(&FUNCTION, buffers, msl_params_##ID(), msl::counted<msl_signature_##ID::n>::type()); \
  }
#define MSL_ENTRY(ID, NAME, MAX_THREADS) \
  { NAME, MAX_THREADS, msl_signature_##ID::n, msl_params_##ID(), msl_run_##ID }
