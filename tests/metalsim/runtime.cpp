// Runs a compute grid: the threads of a threadgroup as fibres, barriers and simdgroup functions as places where they meet,
// threadgroups one after another. Which thread goes on first is up to the order that is asked for.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "fibre.h"

struct msl_ctx {
  uint32_t grid[3], tg[3], in_grid[3], in_tg[3], size_tg[3], full_tg[3], n_tg[3];
  uint32_t index_tg, lane, simd, n_simd;
};

namespace msl {

constexpr size_t TG_LIMIT = 32768;  // bytes of threadgroup memory
constexpr uint32_t WIDTH = 32, SLOT = 64;
constexpr unsigned char POISON = 0xfb;

enum State : uint8_t { READY, IN_SIMD, AT_SIMD_BARRIER, AT_BARRIER, DONE, STATES };

struct Thread {
  msl_ctx place;
  Fibre fibre;
  State state;
  uint32_t op, line;  // of the function it waits in
};
struct Simd {
  uint32_t alive, arrived, parity, barriers, mask[2];
  unsigned char slots[2][WIDTH * SLOT];  // two halves: a lane may be in the next exchange before others have read this one
};
struct TgVar {
  const void *key;
  void *memory;
  uint32_t group;
};

static std::vector<Thread> threads;
static std::vector<Simd> simds;
static std::vector<TgVar> tg_vars;
static uint32_t num_threads, alive, arrived, barriers, group_count;
static size_t tg_bytes;
static Thread *now;
static std::string error;
static void (*kernel)(void *const *);
static void *const *buffers;
struct Watched {
  const char *begin, *end;
  size_t loaded;
};
static std::vector<Watched> watched;  // buffers whose loads are counted
#ifdef MSL_TSAN
// Barriers take turns between two objects: a thread may reach the next one before others have left this one.
static char sync_tg[2], sync_simd[WIDTH][2], sync_done;
#endif
static char *tg_arena;  // threadgroup memory

static void fail(const char *format, ...) {
  if (!error.empty()) return;
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  error = text;
}

template <class F>
static void each_lane(uint32_t simd, F f) {
  for (uint32_t i = WIDTH * simd; i < num_threads && i < WIDTH * (simd + 1); ++i) f(threads[i]);
}

// Lets a simdgroup go on once all its live lanes have arrived, if they are in one place.
static void check_simd(uint32_t index) {
  Simd &simd = simds[index];
  if (!simd.alive || simd.arrived != simd.alive) return;
  Thread *first = nullptr;
  each_lane(index, [&](Thread &t) {
    if (t.state != IN_SIMD && t.state != AT_SIMD_BARRIER) return;
    if (!first) first = &t;
    if (t.op != first->op || t.line != first->line)
      fail("lanes of simdgroup %u meet at different simdgroup operations (line %u and line %u): divergent control flow",
           index, first->line, t.line);
  });
  if (!error.empty()) return;
  (first->state == IN_SIMD ? simd.parity : simd.barriers) ^= 1;
  simd.arrived = 0;
  each_lane(index, [](Thread &t) {
    if (t.state == IN_SIMD || t.state == AT_SIMD_BARRIER) t.state = READY;
  });
}

// The same for the threadgroup, of which no thread may have returned.
static void check_group() {
  if (!alive || arrived != alive) return;
  const Thread *first = nullptr;
  for (uint32_t i = 0; i < num_threads; ++i) {
    const Thread &t = threads[i];
    if (t.state != AT_BARRIER) continue;
    if (!first) first = &t;
    if (t.line != first->line)
      return fail("threads wait at different threadgroup_barriers (line %u and line %u)", first->line, t.line);
  }
  if (alive != num_threads)
    return fail("threadgroup_barrier at line %u is not reached by all threads: %u of %u had returned", first->line,
                num_threads - alive, num_threads);
  arrived = 0, barriers ^= 1;
  for (uint32_t i = 0; i < num_threads; ++i) threads[i].state = READY;
}

static void body() {
  Fibre::begun();
  kernel(buffers);
  TSAN(__tsan_release(&sync_done));
  now->state = DONE;
  --alive, --simds[now->place.simd].alive;
  check_simd(now->place.simd), check_group();
  now->fibre.yield(true);
  abort();
}

static void fail_deadlock() {
  uint32_t count[STATES] = {}, line[STATES] = {};
  for (uint32_t i = 0; i < num_threads; ++i) ++count[threads[i].state], line[threads[i].state] = threads[i].line;
  fail("deadlock: %u threads wait in a simdgroup operation (line %u), %u at a simdgroup_barrier (line %u), %u at a "
       "threadgroup_barrier (line %u), %u have returned",
       count[IN_SIMD], line[IN_SIMD], count[AT_SIMD_BARRIER], line[AT_SIMD_BARRIER], count[AT_BARRIER], line[AT_BARRIER],
       count[DONE]);
}

static void run_threads(const std::vector<uint32_t> &order) {
  for (uint32_t left = num_threads; left;) {
    bool moved = false;
    for (uint32_t i : order) {
      Thread &t = threads[i];
      if (t.state != READY) continue;
      moved = true, now = &t;
      t.fibre.resume();
      if (!error.empty()) return;
      left -= t.state == DONE;
    }
    if (!moved) return fail_deadlock();
  }
}

// 0 ascending, 1 descending, others shuffled.
static std::vector<uint32_t> ordered(uint32_t count, uint32_t order, std::mt19937 &random) {
  std::vector<uint32_t> indices(count);
  for (uint32_t i = 0; i < count; ++i) indices[i] = order == 1 ? count - 1 - i : i;
  if (order >= 2)
    for (uint32_t i = count; i > 1; --i) std::swap(indices[i - 1], indices[random() % i]);
  return indices;
}

// Memory of the next threadgroup. ThreadSanitizer gets a fresh mapping, which has no past; and it is made before the fibres
// are, for which what was done until then is past.
static void new_arena() {
#ifdef MSL_TSAN
  if (tg_arena) munmap(tg_arena, 2 * TG_LIMIT);
  tg_arena = nullptr;
#endif
  if (!tg_arena)
    tg_arena = (char *)mmap(nullptr, 2 * TG_LIMIT, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

// Threads are dispatched as a grid, so that threadgroups at its edge are smaller.
static void place_threads(const uint32_t *grid, const uint32_t *group, const uint32_t *index, const uint32_t *count) {
  new_arena();
  uint32_t size[3];
  for (int k = 0; k < 3; ++k) size[k] = std::min(group[k], grid[k] - index[k] * group[k]);
  num_threads = alive = size[0] * size[1] * size[2];
  uint32_t num_simds = (num_threads + WIDTH - 1) / WIDTH;
  for (uint32_t i = 0; i < num_threads; ++i) {
    msl_ctx &c = threads[i].place;
    const uint32_t at[3] = {i % size[0], i / size[0] % size[1], i / size[0] / size[1]};
    for (int k = 0; k < 3; ++k) {
      c.grid[k] = grid[k], c.tg[k] = index[k], c.in_tg[k] = at[k], c.in_grid[k] = index[k] * group[k] + at[k];
      c.size_tg[k] = size[k], c.full_tg[k] = group[k], c.n_tg[k] = count[k];
    }
    c.index_tg = i, c.lane = i % WIDTH, c.simd = i / WIDTH, c.n_simd = num_simds;
    threads[i].state = READY;
    threads[i].fibre.start(body, i);
  }
  for (uint32_t s = 0; s < num_simds; ++s) {
    simds[s].alive = std::min(WIDTH, num_threads - WIDTH * s);
    simds[s].arrived = simds[s].parity = simds[s].barriers = 0;
  }
  arrived = 0, tg_bytes = 0, ++group_count;
}

static size_t padded(size_t size) { return (size + 15) & ~(size_t)15; }

static void *tg_memory(TgVar &var, size_t size) {
#ifdef MSL_ASAN  // an allocation of its own, so that an overrun is seen
  free(var.memory);
  return malloc(size);
#else
  (void)var;
  return tg_arena + tg_bytes - padded(size);
#endif
}

}  // namespace msl

using namespace msl;

extern "C" {

// float to bfloat, nearest even, which libgcc has from version 13 on.
__attribute__((weak)) __bf16 __truncsfbf2(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint16_t high = x != x ? (uint16_t)(bits >> 16 | 0x40) : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  return __builtin_bit_cast(__bf16, high);
}

const msl_ctx *msl_rt_ctx() { return &now->place; }

void msl_rt_tg_barrier(uint32_t flags, uint32_t line) {
  now->state = AT_BARRIER, now->line = line, ++arrived;
  (void)flags;
  TSAN(void *sync = &sync_tg[barriers]; if (flags) __tsan_release(sync));
  check_group();
  now->fibre.yield();
  TSAN(if (flags) __tsan_acquire(sync));
}

void msl_rt_sg_barrier(uint32_t flags, uint32_t line) {
  const uint32_t index = now->place.simd;
  now->state = AT_SIMD_BARRIER, now->line = line, now->op = 0, ++simds[index].arrived;
  (void)flags;
  TSAN(void *sync = &sync_simd[index][simds[index].barriers]; if (flags) __tsan_release(sync));
  check_simd(index);
  now->fibre.yield();
  TSAN(if (flags) __tsan_acquire(sync));
}

const unsigned char *msl_rt_exchange(const void *in, uint32_t size, uint32_t op, uint32_t line, uint32_t *mask) {
  Simd &simd = simds[now->place.simd];
  const uint32_t half = simd.parity, lane = now->place.lane;
  if (simd.arrived == 0) simd.mask[half] = 0;
  for (uint32_t i = 0; i < size; ++i) simd.slots[half][SLOT * lane + i] = ((const unsigned char *)in)[i];
  simd.mask[half] |= 1u << lane;
  now->state = IN_SIMD, now->line = line, now->op = op, ++simd.arrived;
  check_simd(now->place.simd);
  now->fibre.yield();
  *mask = simd.mask[half];
  return simd.slots[half];
}

void *msl_rt_tg_var(const void *key, size_t size, uint32_t line) {
  TgVar *var = nullptr;
  for (TgVar &each : tg_vars)
    if (each.key == key) var = &each;
  if (!var) tg_vars.push_back({key, nullptr, 0}), var = &tg_vars.back();
  if (var->group == group_count) return var->memory;
  var->group = group_count, tg_bytes += padded(size);
  if (tg_bytes > TG_LIMIT) {
    fail("threadgroup memory: %zu bytes, the limit is %zu (line %u)", tg_bytes, TG_LIMIT, line);
    now->fibre.yield(true);
  }
  var->memory = tg_memory(*var, size);
  for (size_t i = 0; i < size; ++i) ((unsigned char *)var->memory)[i] = POISON;  // it starts undefined
  return var->memory;
}

const char *msl_rt_error() { return error.c_str(); }

// Threadgroup memory of the last threadgroup, in bytes.
size_t msl_rt_tg_bytes() { return tg_bytes; }

// Counts bytes that kernels built for it load from these buffers, from now on; then those of buffer i.
void msl_rt_watch(int count, const char *const *begin, const size_t *sizes) {
  watched.clear();
  for (int i = 0; i < count; ++i) watched.push_back({begin[i], begin[i] + sizes[i], 0});
}
size_t msl_rt_loaded(int i) { return watched[i].loaded; }

static void count_load(const void *address, size_t bytes) {
  for (Watched &each : watched)
    if (address >= each.begin && address < each.end) each.loaded += bytes;
}
void __sanitizer_cov_load1(const uint8_t *p) { count_load(p, 1); }
void __sanitizer_cov_load2(const uint16_t *p) { count_load(p, 2); }
void __sanitizer_cov_load4(const uint32_t *p) { count_load(p, 4); }
void __sanitizer_cov_load8(const uint64_t *p) { count_load(p, 8); }
void __sanitizer_cov_load16(const void *p) { count_load(p, 16); }
void __sanitizer_cov_trace_pc() {}

// Returns 0, or 1 with msl_rt_error().
int msl_rt_run(void (*function)(void *const *), void *const *args, const uint32_t *grid, const uint32_t *group, uint32_t order) {
  error.clear(), tg_vars.clear(), kernel = function, buffers = args;
  const uint32_t capacity = group[0] * group[1] * group[2];
  uint32_t count[3];
  for (int k = 0; k < 3; ++k) count[k] = (grid[k] + group[k] - 1) / group[k];
  if (threads.size() < capacity) threads.resize(capacity);
  simds.resize((capacity + WIDTH - 1) / WIDTH);
  std::mt19937 random(order);
  for (uint32_t i : ordered(count[0] * count[1] * count[2], order, random)) {
    const uint32_t index[3] = {i % count[0], i / count[0] % count[1], i / count[0] / count[1]};
    place_threads(grid, group, index, count);
    run_threads(ordered(num_threads, order, random));
    for (uint32_t t = 0; t < num_threads; ++t) threads[t].fibre.end();
    if (error.empty()) continue;
    error += " [threadgroup " + std::to_string(index[0]) + "," + std::to_string(index[1]) + "," + std::to_string(index[2]) + "]";
    return 1;
  }
  TSAN(__tsan_acquire(&sync_done));
  return 0;
}
}
