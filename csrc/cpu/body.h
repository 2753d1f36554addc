// All bodies of one instruction set, in its own namespace. KVQ_ISA names it, KVQ_VECTORS is its vector header and
// KVQ_VECTORS_X86, if there is one, what it shares with others. The headers below are parts of this one.
#pragma once

#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))
#define INLINE_MEMBER inline __attribute__((always_inline))
#define UNROLL_FOR(...) _Pragma("GCC unroll 32") for (__VA_ARGS__)
#define KVQ_JOIN_(a, b) a##b
#define KVQ_JOIN(a, b) KVQ_JOIN_(a, b)

namespace kvq {
namespace KVQ_ISA {
namespace {

template <int N>
struct Constant {
  static constexpr int value = N;
};
#include "body_float16.h"
#include KVQ_VECTORS
#if defined(KVQ_VECTORS_X86)
#include KVQ_VECTORS_X86
#endif
#include "body_rows.h"
#include "body_products.h"
#include "body_planes.h"
#include "body_rotation.h"
#include "body_codec.h"
#include "body_softmax.h"
#if defined(KVQ_WORD_DOTS)
#include "body_words.h"
#endif
#include "body_attention.h"
#include "body_in_place.h"
#include "body_finish.h"
#include "body_signs.h"
#include "body_top_p.h"
#include "body_selected.h"

}  // namespace
}  // namespace KVQ_ISA

#define KVQ_TEXT_(x) #x
#define KVQ_TEXT(x) KVQ_TEXT_(x)
const Kernels KVQ_JOIN(KVQ_ISA, _kernels) = {
    KVQ_TEXT(KVQ_ISA),     KVQ_ISA::rotate,       KVQ_ISA::encode,        KVQ_ISA::decode,
    KVQ_ISA::prepare,      KVQ_ISA::attend,       KVQ_ISA::qk,            KVQ_ISA::pv,
    KVQ_ISA::finish,       KVQ_ISA::merge,        KVQ_ISA::quantise_query, KVQ_ISA::index_keys,
    KVQ_ISA::sign_scores,  KVQ_ISA::select_row,   KVQ_ISA::select_union,  KVQ_ISA::select_shares,
    KVQ_ISA::qk_selected,  KVQ_ISA::attend_selected,
};

}  // namespace kvq
