// Vectors of avx512 and counts of bits: AVX-512 VPOPCNTDQ.
#pragma once

#define KVQ_COUNT_WORDS
#include "vec_avx512.h"
