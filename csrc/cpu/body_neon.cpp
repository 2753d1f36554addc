// The bodies for neon. Only intrinsics and plain C are included: see body_avx2.cpp.
#if defined(__aarch64__)
#include <arm_neon.h>
#define KVQ_ISA neon
#define KVQ_VECTORS "vec_neon.h"
#include "body.h"
#endif
