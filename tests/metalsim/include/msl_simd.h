// Barriers and functions of a simdgroup. Each is a rendezvous in runtime.cpp that knows its source line. A lane that does
// not exist, has returned or is out of range reads poison.
#pragma once
#pragma clang system_header

struct msl_ctx {  // the place of the running GPU thread
  uint grid[3], tg[3], in_grid[3], in_tg[3], size_tg[3], full_tg[3], n_tg[3];
  uint index_tg, lane, simd, n_simd;
};
extern "C" {
const msl_ctx* msl_rt_ctx();
void msl_rt_tg_barrier(uint flags, uint line);
void msl_rt_sg_barrier(uint flags, uint line);
// The live lanes of one simdgroup meet: each puts `size` bytes into its slot of 64; returns the 32 slots.
const uchar* msl_rt_exchange(const void* in, uint size, uint op, uint line, uint* mask);
// Memory of one `threadgroup` declaration, which `key` names, for the running threadgroup.
void* msl_rt_tg_var(const void* key, size_t size, uint line);
}

namespace metal {
enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_device_and_threadgroup = 3 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((uint)a | (uint)b); }
inline void threadgroup_barrier(mem_flags f, uint line = __builtin_LINE()) { msl_rt_tg_barrier((uint)f, line); }
inline void simdgroup_barrier(mem_flags f, uint line = __builtin_LINE()) { msl_rt_sg_barrier((uint)f, line); }

template <typename T>
__attribute__((no_sanitize("thread", "address", "undefined"))) inline T msl_lane(const uchar* slots, uint mask, uint lane) {
  T r;
  if (lane < 32 && (mask >> lane & 1))
    __builtin_memcpy(&r, slots + 64 * lane, sizeof(T));
  else
    __builtin_memset(&r, 0xfb, sizeof(T));
  return r;
}
template <typename T>
constexpr bool msl_simd_ok = vec_traits<T>::n > 1 || (!is_same_v<T, bfloat> && sizeof(T) <= 4 && !is_same_v<T, bool>);
#define MSL_LINE uint line = __builtin_LINE()
#define MSL_EXCHANGE(T, op)                                                                                   \
  static_assert(msl_simd_ok<T>, "Metal has no simd functions on bfloat, bool or 64-bit scalars: cast first"); \
  uint mask;                                                                                                  \
  const uchar* s = msl_rt_exchange(&x, sizeof(T), op, line, &mask);                                           \
  const uint me = msl_rt_ctx()->lane;                                                                         \
  (void)me;

#define MSL_REDUCE(name, op, expr)             \
  template <typename T>                        \
  inline T name(T x, MSL_LINE) {               \
    MSL_EXCHANGE(T, op)                        \
    bool first = true;                         \
    T a = x;                                   \
    for (uint i = 0; i < 32; ++i) {            \
      if (!(mask >> i & 1)) continue;          \
      const T b = msl_lane<T>(s, mask, i);     \
      a = first ? b : (T)(expr), first = false; \
    }                                          \
    return a;                                  \
  }
MSL_REDUCE(simd_sum, 1, a + b)
MSL_REDUCE(simd_min, 2, metal::min(a, b))
MSL_REDUCE(simd_max, 3, metal::max(a, b))
MSL_REDUCE(simd_and, 4, a& b)
MSL_REDUCE(simd_or, 5, a | b)

#define MSL_SHUFFLE(name, op, from)              \
  template <typename T>                          \
  inline T name(T x, ushort other, MSL_LINE) {   \
    MSL_EXCHANGE(T, op)                          \
    return msl_lane<T>(s, mask, from);           \
  }
MSL_SHUFFLE(simd_shuffle, 8, other)
MSL_SHUFFLE(simd_broadcast, 9, other)
MSL_SHUFFLE(simd_shuffle_xor, 10, me ^ other)
MSL_SHUFFLE(simd_shuffle_down, 11, me + other)
MSL_SHUFFLE(simd_shuffle_up, 12, me - other)

#define MSL_PREFIX(name, op, end)                                                                \
  template <typename T>                                                                          \
  inline T name(T x, MSL_LINE) {                                                                 \
    MSL_EXCHANGE(T, op)                                                                          \
    T a = 0;                                                                                     \
    for (uint i = 0; i < end; ++i)                                                               \
      if (mask >> i & 1) a += msl_lane<T>(s, mask, i);                                           \
    return a;                                                                                    \
  }
MSL_PREFIX(simd_prefix_inclusive_sum, 13, me + 1)
MSL_PREFIX(simd_prefix_exclusive_sum, 14, me)

class simd_vote {
 public:
  typedef ulong vote_t;
  explicit simd_vote(vote_t v) : bits(v) {}
  explicit operator vote_t() const { return bits; }

 private:
  vote_t bits;
};
inline uint msl_ballot(bool c, uint op, uint line) {
  const uint x = c;
  uint mask, r = 0;
  const uchar* s = msl_rt_exchange(&x, 4, op, line, &mask);
  for (uint i = 0; i < 32; ++i)
    if (mask >> i & 1) r |= msl_lane<uint>(s, mask, i) << i;
  return r;
}
inline simd_vote simd_ballot(bool c, MSL_LINE) { return simd_vote(msl_ballot(c, 15, line)); }
inline bool simd_any(bool c, MSL_LINE) { return msl_ballot(c, 16, line) != 0; }
inline bool simd_all(bool c, MSL_LINE) { return msl_ballot(!c, 17, line) == 0; }
}  // namespace metal
