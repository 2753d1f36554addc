// attend for many tokens, the dimension-parallel strategy: a threadgroup is a split. Its threads score a tile of 128 tokens,
// one each, agree on the highest logits, and then each sums coordinates of its own over the whole tile, so that nothing has
// to be added up between threads. Heads of up to 64 leave threads over: kParts parts take blocks of their own and are splits
// of their own.
constant constexpr uint kPartThreads = kThreads / kParts;
constant constexpr uint kPartBlocks = kSimds / kParts;                // of a tile
constant constexpr uint kSlots = (kValueDim + kPartThreads - 1) / kPartThreads;  // coordinates of a thread

// The sum or the maximum over a simdgroup of a number each row has.
inline void publish(threadgroup float* target, thread const float* x, bool sum, uint lane) {
  for (uint r = 0; r < kRows; ++r) {
    const float all = sum ? simd_sum(x[r]) : simd_max(x[r]);
    if (lane == 0) {
      target[r] = all;
    }
  }
}

inline float highest_of(threadgroup const float* each, uint r) {
  float highest = each[r];
  for (uint s = 1; s < kSimds; ++s) {
    highest = max(highest, each[s * kRows + r]);
  }
  return highest;
}

[[max_total_threads_per_threadgroup(128)]]
kernel void attend_dims(
    device const float* rotated [[buffer(0)]],  // [B, H, rows, kPadded]
    device const float* bias [[buffer(1)]],     // [B, H, rows]
    device const uint* key_sign [[buffer(2)]],
    device const uint* key_mag [[buffer(3)]],
    device const half* key_scale [[buffer(4)]],
    device const float* key_levels [[buffer(5)]],
    device const uint* value_sign [[buffer(6)]],
    device const uint* value_mag [[buffer(7)]],
    device const half* value_scale [[buffer(8)]],
    device const float* value_levels [[buffer(9)]],
    device const Table* table [[buffer(10)]],
    device float* sums [[buffer(11)]],   // [B, H, rows, splits, kValueDim]
    device float* state [[buffer(12)]],  // [B, H, rows, splits, 2]
    constant float& softcap [[buffer(13)]],
    constant Sizes& sizes [[buffer(14)]],
    uint3 group [[threadgroup_position_in_grid]],  // packed_splits / kParts, rows / kRows, B * H
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint index [[thread_index_in_threadgroup]]) {
  threadgroup float query[kRows * kPadded];
  threadgroup float weights[kThreads * kRows];
  threadgroup float each[kSimds * kRows];  // one number a simdgroup and row
  const long first = long(group.y) * kRows;
  const long batch = group.z / sizes.heads;
  const long head = group.z % sizes.heads;
  const long flat = long(group.z) * sizes.rows;
  load_rows(query, rotated + (flat + first) * kPadded, sizes.rows - first, index);
  const Body body = {bias + flat,
                     key_sign + batch * sizes.key_sign[0] + head * sizes.key_sign[1],
                     key_mag + batch * sizes.key_mag[0] + head * sizes.key_mag[1],
                     key_scale + batch * sizes.key_scale[0] + head * sizes.key_scale[1],
                     value_scale + batch * sizes.value_scale[0] + head * sizes.value_scale[1],
                     table + batch * sizes.table[0]};
  const Words words = {value_sign + batch * sizes.value_sign[0] + head * sizes.value_sign[1],
                       value_mag + batch * sizes.value_mag[0] + head * sizes.value_mag[1],
                       sizes.value_sign[2], sizes.value_mag[2], sizes.value_mag[3]};
  float key_level[kKeyLevels];
  float value_level[kValueLevels];
  load_levels<kKeyLevels>(key_level, key_levels);
  load_levels<kValueLevels>(value_level, value_levels);
  float sum[kSlots * kRows];
  float top[kRows];
  float total[kRows];  // of this lane's tokens
  begin_rows(sum, kSlots * kRows, top, total);
  const uint part = index / kPartThreads;
  const uint coordinate = index % kPartThreads;
  const long last_block = (sizes.length + kWidth - 1) / kWidth;
  const long last = min(sizes.first_block + (group.x + 1) * sizes.split_blocks, last_block);
  for (long tile = sizes.first_block + group.x * sizes.split_blocks; tile < last; tile += kSimds) {
    const long token = (tile + simd) * kWidth + lane;
    float x[kRows];
    weigh_token(body, sizes, softcap, token, head, first, query, key_level, x);
    const float scale = value_scale_of(body, sizes, token);
    publish(each + simd * kRows, x, false, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint r = 0; r < kRows; ++r) {
      const float factor = soften(x[r], top[r], total[r], highest_of(each, r));
      weights[r * kThreads + index] = x[r] * scale;
      for (uint k = 0; k < kSlots; ++k) {
        sum[k * kRows + r] *= factor;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint n = part * kPartBlocks; n < (part + 1) * kPartBlocks && tile + n < last_block; ++n) {
      add_coordinates(words, tile + n, coordinate, kPartThreads, weights + n * kWidth, kThreads, value_level, sum);
    }
  }
  // A part's sum of weights is that of the lanes which scored its blocks.
  publish(each + simd * kRows, total, true, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint r = 0; r < kRows; ++r) {
    total[r] = 0.0f;
    for (uint s = part * kPartBlocks; s < (part + 1) * kPartBlocks; ++s) {
      total[r] += each[s * kRows + r];
    }
  }
  const long split = (flat + first) * sizes.splits + group.x * kParts + part;
  write_rows(sums, state, split, sizes.splits, sizes.rows - first, sum, top, total, coordinate, kPartThreads);
}
