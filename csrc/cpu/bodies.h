// The bodies that the running machine can execute. No torch.
#pragma once

#include <vector>

#include "kernels.h"

namespace kvq {

struct Body {
  const Kernels *kernels;
  bool integer;  // attends with few rows in 16-bit integers
};

// Fastest first; the last is the scalar one.
static inline std::vector<Body> bodies_here() {
  std::vector<Body> bodies;
#if defined(__x86_64__)
  bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && __builtin_cpu_supports("avx512vnni")) bodies.push_back({&avx512vnni_kernels, true});
  if (avx512 && __builtin_cpu_supports("avx512vpopcntdq")) bodies.push_back({&avx512vpopcnt_kernels, false});
  if (avx512) bodies.push_back({&avx512_kernels, false});
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    bodies.push_back({&avx2_kernels, false});
#elif defined(__aarch64__)
  bodies.push_back({&neon_kernels, false});
#endif
  bodies.push_back({&scalar_kernels, false});
  return bodies;
}

}  // namespace kvq
