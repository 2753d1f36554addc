// What every shader shares; it comes first. A prelude follows (torch_kvq/backends/metal/library.py), which defines the types
// and constants of one configuration, so that loops have fixed lengths, then the files of one kernel.
//
// A threadgroup is 128 threads, four simdgroups of 32. Rows: the G query heads of one key/value head and their M query
// tokens are R = G * M rows; a threadgroup answers up to kRows of them, which share every code that it unpacks. Strides and
// sizes come as int64 in a struct `Sizes`, whose fields the host fills in by name.
#include <metal_stdlib>
using namespace metal;

constant constexpr uint kWidth = 32;   // lanes of a simdgroup, tokens of a block, bits of a word
constant constexpr uint kSimds = 4;    // simdgroups of a threadgroup
constant constexpr uint kThreads = kWidth * kSimds;

// Element offset of row n of a tensor [size0, size1, size2, ...] with these strides.
inline long row_offset(long n, constant long* size, constant long* stride) {
  return n / (size[1] * size[2]) * stride[0] + n / size[2] % size[1] * stride[1] + n % size[2] * stride[2];
}

// The same of row `row` of head `head` of sequence `batch` in a tensor [B, Hq, M, ...]. There are fewer than 2^32 rows.
inline long query_offset(long batch, long head, long row, long group, long queries, constant long* stride) {
  const uint member = uint(row) / uint(queries);
  return batch * stride[0] + (head * group + member) * stride[1] + (row - member * queries) * stride[2];
}

// Value of the code at `bit` of a sign word and kPlanes magnitude words (torch_kvq/layout.py): the level of its magnitude,
// chosen pair by pair, least significant bit first, so that levels stay in registers.
template <uint kPlanes>
inline float code_value(thread const float* level, uint sign, thread const uint* mag, uint bit) {
  float left[1 << kPlanes];
  for (uint k = 0; k < (1u << kPlanes); ++k) {
    left[k] = level[k];
  }
  for (uint p = 0; p < kPlanes; ++p) {
    const bool odd = (mag[p] >> bit) & 1u;
    for (uint k = 0; k < (1u << kPlanes) >> (p + 1); ++k) {
      left[k] = odd ? left[2 * k + 1] : left[2 * k];
    }
  }
  return (sign >> bit) & 1u ? -left[0] : left[0];
}

template <uint kCount>
inline void load_levels(thread float* level, device const float* levels) {
  for (uint k = 0; k < kCount; ++k) {
    level[k] = levels[k];
  }
}
