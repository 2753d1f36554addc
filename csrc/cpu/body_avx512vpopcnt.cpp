// The bodies for avx512vpopcnt: those of avx512, but the signs of keys are counted a word at a time (body_signs.h).
#if defined(__x86_64__)
#include <immintrin.h>
#define KVQ_ISA avx512vpopcnt
#define KVQ_VECTORS "vec_avx512vpopcnt.h"
#define KVQ_VECTORS_X86 "vec_x86.h"
#include "body.h"
#endif
