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

std::vector<Coroutine> coroutines;
std::vector<Thread *> at_barrier;
const char *barrier_name;
ucontext_t scheduler;
const std::function<void()> *kernel_now;
int64_t num_alive, shared_size;
uint32_t random_state = 1;

void leave() { swapcontext(&((Coroutine *)thread)->context, &scheduler); }

void finish_copies(Thread *t) {
  for (auto &copy : t->copies) copy();
  t->copies.clear();
}

void body() {
  (*kernel_now)();
  finish_copies(thread);
  Coroutine *self = (Coroutine *)thread;
  self->done = true;
  num_alive--;
  self->warp->num_alive--;
  if (self->warp->num_waiting) fail("a lane returned while others of its warp wait for it");
  if (!at_barrier.empty()) fail("a thread returned while others of its block wait for it");
  leave();
}

void start(Coroutine &c) {
  getcontext(&c.context);
  c.context.uc_stack.ss_sp = c.stack.get();
  c.context.uc_stack.ss_size = STACK_BYTES;
  c.context.uc_link = nullptr;
  makecontext(&c.context, body, 0);
}

void run_block() {
  std::vector<int> order(coroutines.size());
  for (size_t i = 0; i < order.size(); i++) order[i] = (int)i;
  while (num_alive) {
    // Warps in random order, and within a warp lanes in random rotation.
    int warps = (int)(order.size() + WARP - 1) / WARP, first = random_bits() % warps, turn = random_bits() % WARP;
    bool progress = false;
    for (int w = 0; w < warps; w++)
      for (int l = 0; l < WARP; l++) {
        size_t i = (size_t)((w + first) % warps) * WARP + (l + turn) % WARP;
        if (i >= order.size()) continue;
        Coroutine &c = coroutines[i];
        if (c.done || c.blocked) continue;
        progress = true;
        thread = &c;
        swapcontext(&scheduler, &c.context);
      }
    if (!progress) fail("deadlock: threads wait in different places");
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
  if (at_barrier.empty()) barrier_name = instruction;
  if (strcmp(barrier_name, instruction)) fail("threads of a block meet in different barriers");
  thread->operand = operand;
  at_barrier.push_back(thread);
  if ((int64_t)at_barrier.size() == num_alive) {
    compute(at_barrier);
    for (Thread *t : at_barrier) ((Coroutine *)t)->blocked = false;
    at_barrier.clear();
    return;
  }
  ((Coroutine *)thread)->blocked = true;
  leave();
}

bool in_shared(const void *address) {
  return (const char *)address >= block.shared && (const char *)address < block.shared + shared_size;
}

void run_grid(dim3 grid, dim3 threads, int64_t shared_bytes, const std::function<void()> &kernel) {
  size_t count = (size_t)threads.x * threads.y * threads.z;
  std::vector<Warp> warps((count + WARP - 1) / WARP);
  coroutines.resize(count);
  for (Coroutine &c : coroutines)
    if (!c.stack) c.stack.reset(new char[STACK_BYTES]);
  std::unique_ptr<char[]> memory(new char[shared_bytes + 2 * FENCE_BYTES + 1024]);
  char *whole = (char *)(((uintptr_t)memory.get() + 1023) / 1024 * 1024);
  kernel_now = &kernel;
  block.grid = grid, block.threads = threads, block.shared = whole + FENCE_BYTES, shared_size = shared_bytes;
  for (unsigned z = 0; z < grid.z; z++)
    for (unsigned y = 0; y < grid.y; y++)
      for (unsigned x = 0; x < grid.x; x++) {
        block.index = dim3(x, y, z);
        memset(whole, SENTINEL, shared_bytes + 2 * FENCE_BYTES);
        memset(block.shared, POISON, shared_bytes);
        num_alive = (int64_t)count;
        for (Warp &w : warps) w = Warp{};
        for (size_t i = 0; i < count; i++) {
          Coroutine &c = coroutines[i];
          c.index = dim3(i % threads.x, i / threads.x % threads.y, i / threads.x / threads.y);
          c.lane = i % WARP, c.warp = &warps[i / WARP], c.blocked = c.done = false;
          c.warp->num_alive++;
          start(c);
        }
        run_block();
        for (int64_t i = 0; i < FENCE_BYTES; i++)
          if ((unsigned char)whole[i] != SENTINEL || (unsigned char)block.shared[shared_bytes + i] != SENTINEL)
            fail("written outside dynamic shared memory");
      }
}

}  // namespace emulated

// What the host code of the library asks the CUDA runtime, answered as an H200 would.
extern "C" {
cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int value) {
  return value <= 227 * 1024 ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount               ? 132
           : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? 227 * 1024
                                                                     : 0;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char *cudaGetErrorString(cudaError_t) { return "emulated"; }
}
