// Runs CUDA kernels on the CPU, one thread of a block after another, to test them where there is no GPU.
//
// Every CUDA thread is a coroutine that runs until it meets a barrier or an instruction of the whole warp; the last one
// to arrive computes the result for all. Warps and lanes are taken in random order, so that a barrier that is missing
// shows as a wrong result. Dynamic shared memory starts as NaN between two fences. build.py turns the sources into what
// this header understands; mma.cuh next to it is the host twin of csrc/cuda/mma.cuh.
#pragma once

#define __shared__ static

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <functional>
#include <utility>
#include <vector>

namespace emulated {

constexpr int WARP = 32;

struct Thread;
struct Warp {
  Thread *waiting[WARP];  // by lane
  int num_alive, num_waiting;
  const char *instruction;
};
struct Thread {
  dim3 index;
  int lane;
  Warp *warp;
  void *operand;  // of the instruction it waits in
  int64_t cluster_phase = -1;  // in which it arrived at the barrier of its cluster, if it has not waited since
  std::vector<std::function<void()>> copies;  // asynchronous ones that have not landed
  std::vector<size_t> groups;                 // of these, the ends of the closed ones
};

// The operand of a lane that waits with this one.
inline void *operand_of(int lane);
struct Block {
  dim3 index, grid, threads;
  char *shared;
};

extern Thread *thread;  // that runs now
extern Block block;

[[noreturn]] void fail(const char *what);
inline void *operand_of(int lane) {
  Thread *there = thread->warp->waiting[lane];
  if (!there) fail("an instruction of a warp takes from a lane that is not there");
  return there->operand;
}
uint32_t random_bits();
// Waits until every living lane is here; the last one runs `compute` first.
bool arrive(const char *instruction, void *operand);  // true for the last lane
void wait_for_warp();
void release_warp();
template <class Compute>
void meet_warp(const char *instruction, void *operand, const Compute &compute) {
  if (!arrive(instruction, operand)) return wait_for_warp();
  compute();
  release_warp();
}
void meet_block(const char *instruction, void *operand, const std::function<void(const std::vector<Thread *> &)> &compute);
void meet_first(size_t count);  // waits until so many threads of the block are here
int num_multiprocessors();  // 132 if nothing else is asked for
void let_others_run();  // waits for what another block does
// Clusters of blocks live at the same time.
void run_grid(dim3 grid, dim3 threads, int64_t shared_bytes, const std::function<void()> &kernel,
              dim3 cluster = dim3(1, 1, 1));
void arrive_in_cluster();
void wait_for_cluster();
int rank_in_cluster();
// What lies `offset` bytes into the dynamic shared memory of another block of the cluster, which must be alive.
char *in_cluster(int rank, int64_t offset, int64_t bytes);
bool has_clusters();  // the current device: device 0 has them
bool in_shared(const void *address);

struct Launch {
  dim3 grid, threads;
  int64_t shared_bytes;
  Launch(dim3 grid, dim3 threads, int64_t shared_bytes = 0, cudaStream_t = nullptr)
      : grid(grid), threads(threads), shared_bytes(shared_bytes) {}
  template <class... Parameters>
  auto of(void (*kernel)(Parameters...)) const {
    return [kernel, launch = *this](Parameters... arguments) {
      run_grid(launch.grid, launch.threads, launch.shared_bytes, [&] { kernel(arguments...); });
    };
  }
};

template <class T>
T shuffle(T value, int from) {
  struct Operand {
    T value, result;
    int from;
  } operand{value, T{}, from};
  meet_warp("shfl", &operand, [] {
    for (int lane = 0; lane < WARP; lane++) {
      Operand *to = (Operand *)operand_of(lane);
      to->result = ((Operand *)operand_of(to->from))->value;
    }
  });
  return operand.result;
}

inline uint32_t ballot(bool value) {
  struct Operand {
    uint32_t value, result;
  } operand{value, 0};
  meet_warp("vote", &operand, [] {
    uint32_t bits = 0;
    for (int lane = 0; lane < WARP; lane++) bits |= ((Operand *)operand_of(lane))->value << lane;
    for (int lane = 0; lane < WARP; lane++) ((Operand *)operand_of(lane))->result = bits;
  });
  return operand.result;
}

inline void close_copies() { thread->groups.push_back(thread->copies.size()); }
inline void wait_copy_groups(size_t pending) {
  while (thread->groups.size() > pending) {
    size_t end = thread->groups[0];
    for (size_t i = 0; i < end; i++) thread->copies[i]();
    thread->copies.erase(thread->copies.begin(), thread->copies.begin() + end);
    thread->groups.erase(thread->groups.begin());
    for (size_t &other : thread->groups) other -= end;
  }
}

inline int count_block(bool value) {
  std::pair<int, int> operand{value, 0};
  meet_block("syncthreads_count", &operand, [](const std::vector<Thread *> &threads) {
    int count = 0;
    for (Thread *t : threads) count += ((std::pair<int, int> *)t->operand)->first;
    for (Thread *t : threads) ((std::pair<int, int> *)t->operand)->second = count;
  });
  return operand.second;
}

}  // namespace emulated

#undef __launch_bounds__
#define __launch_bounds__(...)
#define threadIdx (emulated::thread->index)
#define blockIdx (emulated::block.index)
#define blockDim (emulated::block.threads)
#define gridDim (emulated::block.grid)

inline void __syncthreads() { emulated::meet_block("syncthreads", nullptr, [](const auto &) {}); }
inline int __syncthreads_or(int value) { return emulated::count_block(value) > 0; }
inline int __syncthreads_and(int value) { return emulated::count_block(!value) == 0; }
inline void __syncwarp(unsigned = ~0u) { emulated::meet_warp("syncwarp", nullptr, [] {}); }
inline void __threadfence() {}

template <class T>
T __shfl_sync(unsigned, T value, int from, int width = emulated::WARP) {
  return emulated::shuffle(value, emulated::thread->lane / width * width + from % width);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int by) {
  return emulated::shuffle(value, emulated::thread->lane ^ by);
}
template <class T>
T __shfl_down_sync(unsigned, T value, int by) {
  int from = emulated::thread->lane + by;
  return emulated::shuffle(value, from < emulated::WARP ? from : emulated::thread->lane);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int by) {
  int from = emulated::thread->lane - by;
  return emulated::shuffle(value, from >= 0 ? from : emulated::thread->lane);
}
inline uint32_t __ballot_sync(unsigned, int value) { return emulated::ballot(value != 0); }
inline int __any_sync(unsigned, int value) { return emulated::ballot(value != 0) != 0; }
inline int __all_sync(unsigned, int value) { return emulated::ballot(value != 0) == ~0u; }

inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  for (int step = 1; step < emulated::WARP; step *= 2) {
    unsigned other = emulated::shuffle(value, emulated::thread->lane ^ step);
    value = other > value ? other : value;
  }
  return value;
}

inline int __reduce_max_sync(unsigned mask, int value) {
  return (int)(__reduce_max_sync(mask, (unsigned)value ^ 0x80000000u) ^ 0x80000000u);
}
template <class T>
T __reduce_add_sync(unsigned, T value) {
  for (int step = 1; step < emulated::WARP; step *= 2) value += emulated::shuffle(value, emulated::thread->lane ^ step);
  return value;
}

template <class T>
T atomicAdd(T *to, T value) {
  T before = *to;
  *to = before + value;
  return before;
}
template <class T>
T atomicMin(T *to, T value) {
  T before = *to;
  *to = value < before ? value : before;
  return before;
}
template <class T>
T atomicOr(T *to, T value) {
  T before = *to;
  *to = before | value;
  return before;
}

template <class T>
T atomicMax(T *to, T value) {
  T before = *to;
  *to = value > before ? value : before;
  return before;
}

template <class T>
T __ldg(const T *from) {
  return *from;
}
template <class T>
T __ldcs(const T *from) {
  return *from;
}
template <class T>
void __stcs(T *to, T value) {
  *to = value;
}
inline float __uint_as_float(uint32_t x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t y;
  memcpy(&y, &x, 4);
  return y;
}
inline float __int_as_float(int x) { return __uint_as_float((uint32_t)x); }
inline int __float_as_int(float x) { return (int)__float_as_uint(x); }
inline int __float2int_rn(float x) { return (int)nearbyintf(x); }
inline unsigned __float2uint_rn(float x) { return (unsigned)nearbyintf(x); }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, int by) { return (uint32_t)(((uint64_t)high << 32 | low) >> by); }
inline uint32_t __dp4a(uint32_t x, uint32_t y, uint32_t sum) {
  for (int i = 0; i < 32; i += 8) sum += (x >> i & 255) * (y >> i & 255);
  return sum;
}
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline unsigned __umulhi(unsigned x, unsigned y) { return (uint64_t)x * y >> 32; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1 / sqrtf(x); }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __saturatef(float x) { return x > 1 ? 1.0f : x > 0 ? x : 0.0f; }
inline unsigned __funnelshift_l(unsigned low, unsigned high, int by) {
  return ((uint64_t)high << 32 | low) << (by & 31) >> 32;
}
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned by) {
  return by < 32 ? __funnelshift_l(low, high, (int)by) : low;
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  float2 x = __half22float2(a), y = __half22float2(b), z = __half22float2(c);
  return __floats2half2_rn(fmaf(x.x, y.x, z.x), fmaf(x.y, y.y, z.y));
}
template <class T>
T min(T x, T y) {
  return y < x ? y : x;
}
template <class T>
T max(T x, T y) {
  return x < y ? y : x;
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  uint64_t both = (uint64_t)b << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; i++) {
    uint32_t nibble = selector >> (4 * i) & 15, byte = both >> (8 * (nibble & 7)) & 255;
    if (nibble & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << (8 * i);
  }
  return result;
}
