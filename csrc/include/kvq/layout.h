// The packed format in C++: the mirror of torch_kvq/layout.py, which is the source. No includes, so every kernel may
// use it.
//
// A code of `bits` bits is one sign bit and bits - 1 magnitude bits; its value is (-1)^sign * levels[magnitude]. Codes
// lie in bit planes of 32-bit words: plane 0 is the sign (1 = negative), plane p >= 1 is magnitude bit p - 1.
//
//   keys, packed along D      sign [B, H, C, W]      mag [B, H, C, bits-1, W]       W = ceil(D / 32), padding bits zero
//                             bit b of word w of token t is coordinate 32w + b
//   values, packed along T    sign [B, H, C/32, D]   mag [B, H, C/32, bits-1, D]
//                             bit b of word i of block n is coordinate i of token 32n + b
//   both                      scale [B, H, C] float16; C, the capacity in tokens, is a multiple of 32
#pragma once

namespace kvq {

constexpr int LAYOUT_VERSION = 1;
constexpr int WORD_BITS = 32;
constexpr int BLOCK_LEN = 32;  // tokens of one word of values
constexpr int MIN_BITS = 2;
constexpr int MAX_BITS = 4;
constexpr int MAX_LEVELS = 1 << (MAX_BITS - 1);  // positive levels
constexpr int MAX_HEAD_DIM = 512;
constexpr float TOP_LEVEL = 126.5f;  // steps of the largest level; all are (n + 1/2) steps, n an integer

// Order of the tensors of one store in `Tensor[] keys` and `Tensor[] values`.
enum PackedField { SIGN, MAG, SCALE, LEVELS, CENTRE, BALANCE, SIGNS, BLOCKS, MATRIX, NUM_PACKED_FIELDS };

// Scale rules of encode, in the order of SCALE_RULES.
enum ScaleRule { NORM, MATCHED, UNBIASED, MSE, NUM_SCALE_RULES };

static constexpr long long ceil_div(long long n, long long by) { return (n + by - 1) / by; }
static constexpr long long round_up(long long n, long long by) { return ceil_div(n, by) * by; }

}  // namespace kvq
