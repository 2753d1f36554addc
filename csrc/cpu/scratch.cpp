#include "run.h"

#include <cstdlib>

namespace kvq {

namespace {

struct Arena {
  char *memory = nullptr;
  int64_t size = 0;
  ~Arena() { std::free(memory); }
  char *take(int64_t bytes) {
    if (bytes > size) {
      std::free(memory);
      size = round_up(bytes, 4096);
      memory = (char *)std::aligned_alloc(64, size);
      if (!memory) size = 0;
      STD_TORCH_CHECK(memory, "torch_kvq: out of memory for ", bytes, " bytes of scratch");
    }
    return memory;
  }
};

}  // namespace

char *call_scratch(int64_t bytes) {
  static thread_local Arena arena;
  return arena.take(bytes);
}
char *worker_scratch(int64_t bytes) {
  static thread_local Arena arena;
  return arena.take(bytes);
}

}  // namespace kvq
