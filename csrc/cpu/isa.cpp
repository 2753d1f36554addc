// Choice of the instruction set at run time. torch_kvq::_cpu_isa(name) names the one in use; a non-empty name chooses
// it. torch_kvq::_cpu_isas() lists those of this machine, fastest first.
#include "run.h"

#include <atomic>

namespace kvq {

namespace {

const Kernels *find(const std::string &name) {
#if defined(__x86_64__)
  bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (name == "avx512vnni")  // by name only: its products are integers, exact to about 1e-3 instead of 1e-6
    if (avx512 && __builtin_cpu_supports("avx512vnni")) return &avx512vnni_kernels;
  if (name == "avx512" || name.empty())
    if (avx512) return &avx512_kernels;
  if (name == "avx2" || name.empty())
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
      return &avx2_kernels;
#endif
  return name == "scalar" || name.empty() ? &scalar_kernels : nullptr;
}

std::atomic<const Kernels *> in_use{nullptr};

std::string cpu_isa(std::string name) {
  if (!name.empty()) {
    const Kernels *found = find(name);
    KVQ_CHECK(found, "name", "be an instruction set of this machine among scalar, avx2, avx512, avx512vnni", name);
    in_use = found;
  }
  return kernels().name;
}

std::string cpu_isas() {
  std::string names;
  for (const char *name : {"avx512vnni", "avx512", "avx2", "scalar"})
    if (find(name)) names += (names.empty() ? "" : ",") + std::string(name);
  return names;
}

}  // namespace

const Kernels &kernels() {
  const Kernels *k = in_use.load(std::memory_order_relaxed);
  if (!k) in_use = k = find("");
  return *k;
}

STABLE_TORCH_LIBRARY_FRAGMENT(torch_kvq, m) {
  m.def("_cpu_isa(str name) -> str");
  m.def("_cpu_isas() -> str");
}
STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CompositeExplicitAutograd, m) {
  m.impl("_cpu_isa", TORCH_BOX(&cpu_isa));
  m.impl("_cpu_isas", TORCH_BOX(&cpu_isas));
}

}  // namespace kvq
