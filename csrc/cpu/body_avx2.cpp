// The bodies for avx2. Only intrinsics and plain C are included: an inline function of a std or torch header compiled
// here could be merged with its twin elsewhere and then run on a machine without the instructions.
#if defined(__x86_64__)
#include <immintrin.h>
#define KVQ_ISA avx2
#define KVQ_VECTORS "vec_avx2.h"
#define KVQ_VECTORS_X86 "vec_x86.h"
#include "body.h"
#endif
