// The bodies for avx512vnni: those of avx512, but few rows of attend take their products in integers (body_words.h).
#if defined(__x86_64__)
#include <immintrin.h>
#define KVQ_ISA avx512vnni
#define KVQ_VECTORS "vec_avx512vnni.h"
#define KVQ_VECTORS_X86 "vec_x86.h"
#include "body.h"
#endif
