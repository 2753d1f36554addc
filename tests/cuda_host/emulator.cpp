#include "emulator.h"

#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#include <memory>

namespace emulated {

Thread *thread;
Block block;

namespace {

constexpr int64_t STACK_BYTES = 128 * 1024, FENCE_BYTES = 1024;
constexpr unsigned char POISON = 0xff, SENTINEL = 0xa5;

struct Coroutine : Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool blocked = false, done = false;
};

struct Cluster {
  std::vector<char *> memory;  // of blocks that live, by rank
  int64_t num_threads, num_arrived = 0, phase = 0;
};

// A block that has begun and not ended.
struct Live {
  Block block;
  std::shared_ptr<Cluster> cluster;
  int rank;
  std::vector<Coroutine> coroutines;
  std::vector<Warp> warps;
  std::vector<Thread *> at_barrier, at_first;
  const char *barrier_name;
  int64_t num_alive;
  std::unique_ptr<char[]> memory;
};

Live *live;  // that runs now
std::vector<std::unique_ptr<char[]>> free_stacks;
ucontext_t scheduler;
const std::function<void()> *kernel_now;
int64_t shared_size;
bool waits_for_others;  // the thread that ran last
uint32_t random_state = 1;

void leave() { swapcontext(&((Coroutine *)thread)->context, &scheduler); }

void finish_copies(Thread *t) {
  for (auto &copy : t->copies) copy();
  t->copies.clear(), t->groups.clear();
}

void body() {
  (*kernel_now)();
  finish_copies(thread);
  if (thread->cluster_phase >= 0) fail("a thread returned that had not waited for its cluster");
  Coroutine *self = (Coroutine *)thread;
  self->done = true;
  live->num_alive--;
  self->warp->num_alive--;
  if (self->warp->num_waiting) fail("a lane returned while others of its warp wait for it");
  if (!live->at_barrier.empty() || !live->at_first.empty()) fail("a thread returned while others of its block wait for it");
  leave();
}

void start(Coroutine &c) {
  if (free_stacks.empty()) free_stacks.emplace_back(new char[STACK_BYTES]);
  c.stack = std::move(free_stacks.back());
  free_stacks.pop_back();
  getcontext(&c.context);
  c.context.uc_stack.ss_sp = c.stack.get();
  c.context.uc_stack.ss_size = STACK_BYTES;
  c.context.uc_link = nullptr;
  makecontext(&c.context, body, 0);
}

std::unique_ptr<Live> begin_block(dim3 index, dim3 grid, dim3 threads) {
  std::unique_ptr<Live> begun(new Live{});
  begun->memory.reset(new char[shared_size + 2 * FENCE_BYTES + 1024]);
  char *whole = (char *)(((uintptr_t)begun->memory.get() + 1023) / 1024 * 1024);
  memset(whole, SENTINEL, shared_size + 2 * FENCE_BYTES);
  memset(whole + FENCE_BYTES, POISON, shared_size);
  begun->block = {index, grid, threads, whole + FENCE_BYTES};
  size_t count = (size_t)threads.x * threads.y * threads.z;
  begun->num_alive = (int64_t)count;
  begun->coroutines.resize(count), begun->warps.resize((count + WARP - 1) / WARP);
  for (size_t i = 0; i < count; i++) {
    Coroutine &c = begun->coroutines[i];
    c.index = dim3(i % threads.x, i / threads.x % threads.y, i / threads.x / threads.y);
    c.lane = i % WARP, c.warp = &begun->warps[i / WARP];
    c.warp->num_alive++;
    start(c);
  }
  return begun;
}

void end_block(Live &ended) {
  const char *fence = ended.block.shared - FENCE_BYTES;
  for (int64_t i = 0; i < FENCE_BYTES; i++)
    if ((unsigned char)fence[i] != SENTINEL || (unsigned char)ended.block.shared[shared_size + i] != SENTINEL)
      fail("written outside dynamic shared memory");
  for (Coroutine &c : ended.coroutines) free_stacks.push_back(std::move(c.stack));
}

// Runs the threads of a block until they end or all that are not blocked wait for other blocks. Returns whether any of
// them has gone on.
bool run_block(Live &of) {
  live = &of, block = of.block;
  std::vector<Coroutine> &coroutines = of.coroutines;
  size_t count = coroutines.size();
  for (bool gone_on = false;; gone_on = true) {
    // Warps in random order, and within a warp lanes in random rotation.
    int warps = (int)(count + WARP - 1) / WARP, first = random_bits() % warps, turn = random_bits() % WARP;
    bool some = false, progress = false;
    for (int w = 0; w < warps; w++)
      for (int l = 0; l < WARP; l++) {
        size_t i = (size_t)((w + first) % warps) * WARP + (l + turn) % WARP;
        if (i >= count) continue;
        Coroutine &c = coroutines[i];
        if (c.done || c.blocked) continue;
        some = true, waits_for_others = false;
        thread = &c;
        swapcontext(&scheduler, &c.context);
        progress = progress || !waits_for_others;
      }
    if (!of.num_alive) return true;
    if (!some) fail("deadlock: threads wait in different places");
    if (!progress) return gone_on;
  }
}

}  // namespace

void fail(const char *what) {
  fprintf(stderr, "emulator: %s (block %u %u %u)\n", what, block.index.x, block.index.y, block.index.z);
  abort();
}

uint32_t random_bits() {
  random_state ^= random_state << 13, random_state ^= random_state >> 17, random_state ^= random_state << 5;
  return random_state >> 3;
}

bool arrive(const char *instruction, void *operand) {
  Warp *warp = thread->warp;
  if (!warp->num_waiting) warp->instruction = instruction;
  if (strcmp(warp->instruction, instruction)) fail("lanes of a warp meet in different instructions");
  thread->operand = operand;
  warp->waiting[thread->lane] = thread;
  return ++warp->num_waiting == warp->num_alive;
}

void wait_for_warp() {
  ((Coroutine *)thread)->blocked = true;
  leave();
}

void release_warp() {
  Warp *warp = thread->warp;
  for (Thread *&t : warp->waiting) {
    if (t) ((Coroutine *)t)->blocked = false;
    t = nullptr;
  }
  warp->num_waiting = 0;
}

void meet_block(const char *instruction, void *operand,
                const std::function<void(const std::vector<Thread *> &)> &compute) {
  if (live->at_barrier.empty()) live->barrier_name = instruction;
  if (strcmp(live->barrier_name, instruction)) fail("threads of a block meet in different barriers");
  thread->operand = operand;
  live->at_barrier.push_back(thread);
  if ((int64_t)live->at_barrier.size() == live->num_alive) {
    compute(live->at_barrier);
    for (Thread *t : live->at_barrier) ((Coroutine *)t)->blocked = false;
    live->at_barrier.clear();
    return;
  }
  ((Coroutine *)thread)->blocked = true;
  leave();
}

void meet_first(size_t count) {
  live->at_first.push_back(thread);
  if (live->at_first.size() == count) {
    for (Thread *t : live->at_first) ((Coroutine *)t)->blocked = false;
    live->at_first.clear();
    return;
  }
  ((Coroutine *)thread)->blocked = true;
  leave();
}

int num_multiprocessors() {
  const char *number = getenv("KVQ_EMULATE_MULTIPROCESSORS");
  return number ? atoi(number) : 132;
}

void let_others_run() {
  waits_for_others = true;
  leave();
}

void arrive_in_cluster() {
  Cluster &cluster = *live->cluster;
  if (thread->cluster_phase >= 0) fail("a thread arrives twice without waiting for its cluster");
  thread->cluster_phase = cluster.phase;
  if (++cluster.num_arrived == cluster.num_threads) cluster.num_arrived = 0, cluster.phase++;
}

void wait_for_cluster() {
  if (thread->cluster_phase < 0) fail("a thread waits for its cluster and has not arrived");
  while (live->cluster->phase == thread->cluster_phase) let_others_run();
  thread->cluster_phase = -1;
}

int rank_in_cluster() { return live->rank; }

char *in_cluster(int rank, int64_t offset, int64_t bytes) {
  const std::vector<char *> &memory = live->cluster->memory;
  if (rank < 0 || rank >= (int)memory.size()) fail("there is no such block in the cluster");
  if (!memory[rank]) fail("read from a block of the cluster that has not begun or has ended");
  if (offset < 0 || offset + bytes > shared_size) fail("read outside the memory of a block of the cluster");
  return memory[rank] + offset;
}

bool has_clusters() {
  int device;
  cudaGetDevice(&device);
  return device == 0;
}

bool in_shared(const void *address) {
  return (const char *)address >= block.shared && (const char *)address < block.shared + shared_size;
}

// One cluster, of one block or more, after another; those that wait for others go on when these have begun. In a cluster
// the blocks take their turns from a random one on.
void run_grid(dim3 grid, dim3 threads, int64_t shared_bytes, const std::function<void()> &kernel, dim3 cluster) {
  kernel_now = &kernel, shared_size = shared_bytes;
  if (grid.x % cluster.x || grid.y % cluster.y || grid.z % cluster.z) fail("the grid is not one of whole clusters");
  int size = (int)(cluster.x * cluster.y * cluster.z);
  std::vector<std::unique_ptr<Live>> begun;
  for (unsigned z = 0; z < grid.z; z += cluster.z)
    for (unsigned y = 0; y < grid.y; y += cluster.y)
      for (unsigned x = 0; x < grid.x; x += cluster.x) {
        auto together = std::make_shared<Cluster>();
        together->memory.resize(size), together->num_threads = (int64_t)size * threads.x * threads.y * threads.z;
        for (int rank = 0; rank < size; rank++) {
          unsigned in_x = rank % cluster.x, in_y = rank / cluster.x % cluster.y, in_z = rank / cluster.x / cluster.y;
          begun.push_back(begin_block(dim3(x + in_x, y + in_y, z + in_z), grid, threads));
          begun.back()->cluster = together, begun.back()->rank = rank;
          together->memory[rank] = begun.back()->block.shared;
        }
        for (bool progress = true; progress && !begun.empty();) {
          progress = false;
          size_t count = begun.size(), first = random_bits() % count;
          for (size_t i = 0; i < count; i++) {
            Live &each = *begun[(i + first) % count];
            progress = run_block(each) || progress;
            if (!each.num_alive) each.cluster->memory[each.rank] = nullptr;
          }
          for (size_t i = begun.size(); i--;)
            if (!begun[i]->num_alive) end_block(*begun[i]), begun.erase(begun.begin() + (int64_t)i);
        }
      }
  if (!begun.empty()) fail("deadlock: blocks wait for others that do not come");
}

}  // namespace emulated

// What the host code of the library asks the CUDA runtime, answered as an H200 would, or a smaller GPU.
extern "C" {
cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int value) {
  return value <= 227 * 1024 ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaGetDevice(int *device) {
  const char *number = getenv("KVQ_EMULATE_DEVICE");
  return *device = number ? atoi(number) : 0, cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount               ? emulated::num_multiprocessors()
           : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin    ? 227 * 1024
           : attribute == cudaDevAttrMaxSharedMemoryPerMultiprocessor ? 228 * 1024
                                                                     : 0;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *) {
  attributes->type = cudaMemoryTypeHost;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char *cudaGetErrorString(cudaError_t) { return "emulated"; }
}
