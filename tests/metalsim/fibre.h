// One fibre a GPU thread: a stack of its own, and switches that the sanitizers are told of.
//
// This file is never instrumented; MSL_TSAN and MSL_ASAN say which run-time it is linked with. To ThreadSanitizer every
// fibre is a thread, and a switch is no synchronisation: only barriers are, so a missing one is a data race.
#pragma once
#include <sys/mman.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdint>

#ifdef MSL_TSAN
extern "C" {
void *__tsan_get_current_fiber(void);
void *__tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void *);
void __tsan_switch_to_fiber(void *, unsigned);
void __tsan_acquire(void *);
void __tsan_release(void *);
}
#define TSAN(statement) statement
#else
#define TSAN(statement)
#endif
#ifdef MSL_ASAN
extern "C" {
void __sanitizer_start_switch_fiber(void **, const void *, size_t);
void __sanitizer_finish_switch_fiber(void *, const void **, size_t *);
}
#define ASAN(statement) statement
#else
#define ASAN(statement)
#endif

#if defined(__x86_64__) && !defined(MSL_TSAN) && !defined(MSL_ASAN)
#define MSL_FAST_SWITCH  // swapcontext asks the kernel for the signal mask, which costs more than a fibre does between barriers
extern "C" void msl_switch(void **from, void *to);
asm(R"(
.text
.globl msl_switch
.hidden msl_switch
.type msl_switch,@function
msl_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size msl_switch, .-msl_switch
)");
#endif

namespace msl {

constexpr size_t STACK = 256 * 1024, GUARD = 4096, USED = 64 * 1024;

class Fibre {
 public:
  // Begins `body` anew at the next resume. `place` spreads the stacks over the cache.
  void start(void (*body)(), unsigned place) {
    if (!stack) {
      stack = (char *)mmap(nullptr, GUARD + STACK, PROT_READ | PROT_WRITE, FLAGS, -1, 0);
      mprotect(stack, GUARD, PROT_NONE);
    }
    char *top = stack + GUARD + STACK;
#ifdef MSL_TSAN  // the stack had another owner: a fresh mapping makes the sanitizer forget what that one did
    mmap(top - USED, USED, PROT_READ | PROT_WRITE, FLAGS | MAP_FIXED, -1, 0);
    tsan = __tsan_create_fiber(0);
#endif
#ifdef MSL_FAST_SWITCH
    void **sp = (void **)(top - 320 * (place & 255));
    *--sp = nullptr;
    *--sp = (void *)body;
    for (int i = 0; i < 6; ++i) *--sp = nullptr;
    context = sp;
#else
    (void)place;
    getcontext(&context);
    context.uc_stack.ss_sp = stack + GUARD;
    context.uc_stack.ss_size = STACK;
    context.uc_link = nullptr;
    makecontext(&context, body, 0);
#endif
  }

  void end() { TSAN(__tsan_destroy_fiber(tsan)); }

  // From the scheduler to this fibre, until it yields.
  void resume() {
    TSAN(main_tsan() = __tsan_get_current_fiber());
    TSAN(__tsan_switch_to_fiber(tsan, 1));
#ifdef MSL_FAST_SWITCH
    msl_switch(&main_context(), context);
#else
    ASAN(void *fake; __sanitizer_start_switch_fiber(&fake, stack + GUARD, STACK));
    swapcontext(&main_context(), &context);
    ASAN(__sanitizer_finish_switch_fiber(fake, nullptr, nullptr));
#endif
  }

  // To the scheduler; for good if `done`.
  void yield(bool done = false) {
    (void)done;
    TSAN(__tsan_switch_to_fiber(main_tsan(), 1));
#ifdef MSL_FAST_SWITCH
    msl_switch(&context, main_context());
#else
    ASAN(void *fake; __sanitizer_start_switch_fiber(done ? nullptr : &fake, main_stack(), main_stack_size()));
    swapcontext(&context, &main_context());
    ASAN(__sanitizer_finish_switch_fiber(fake, nullptr, nullptr));
#endif
  }

  // First statement of a body.
  static void begun() { ASAN(__sanitizer_finish_switch_fiber(nullptr, &main_stack(), &main_stack_size())); }

 private:
  static constexpr int FLAGS = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
#ifdef MSL_FAST_SWITCH
  typedef void *Context;
#else
  typedef ucontext_t Context;
#endif
  static Context &main_context() {
    static Context context;
    return context;
  }
#ifdef MSL_TSAN
  void *tsan = nullptr;
  static void *&main_tsan() {
    static void *fibre;
    return fibre;
  }
#endif
#ifdef MSL_ASAN
  static const void *&main_stack() {
    static const void *stack;
    return stack;
  }
  static size_t &main_stack_size() {
    static size_t size;
    return size;
  }
#endif
  char *stack = nullptr;
  Context context;
};

}  // namespace msl
