// attend for few tokens, the word-parallel strategy: a simdgroup is a split of its own. It scores 32 tokens, one a lane, and
// sums the one word of each coordinate that holds them. Simdgroups never wait for one another, and a short body is spread
// over many of them.
constant constexpr uint kSlots = (kValueDim + kWidth - 1) / kWidth;  // coordinates of a lane

[[max_total_threads_per_threadgroup(128)]]
kernel void attend_words(
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
    uint3 group [[threadgroup_position_in_grid]],  // packed_splits / 4, rows / kRows, B * H
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint index [[thread_index_in_threadgroup]]) {
  threadgroup float query[kRows * kPadded];
  threadgroup float weights[kThreads * kRows];
  const long first = long(group.y) * kRows;
  const long batch = group.z / sizes.heads;
  const long head = group.z % sizes.heads;
  const long flat = long(group.z) * sizes.rows;
  load_rows(query, rotated + (flat + first) * kPadded, sizes.rows - first, index);
  const long split = long(group.x) * kSimds + simd;
  if (split >= sizes.packed_splits) {
    return;
  }
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
  threadgroup float* mine = weights + simd * kRows * kWidth;
  const long last = min(sizes.first_block + (split + 1) * sizes.split_blocks, (sizes.length + kWidth - 1) / kWidth);
  for (long block = sizes.first_block + split * sizes.split_blocks; block < last; ++block) {
    const long token = block * kWidth + lane;
    float x[kRows];
    weigh_token(body, sizes, softcap, token, head, first, query, key_level, x);
    const float scale = value_scale_of(body, sizes, token);
    for (uint r = 0; r < kRows; ++r) {
      const float factor = soften(x[r], top[r], total[r], simd_max(x[r]));
      mine[r * kWidth + lane] = x[r] * scale;
      for (uint k = 0; k < kSlots; ++k) {
        sum[k * kRows + r] *= factor;
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    add_coordinates(words, block, lane, kWidth, mine, kWidth, value_level, sum);
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (uint r = 0; r < kRows; ++r) {
    total[r] = simd_sum(total[r]);
  }
  write_rows(sums, state, (flat + first) * sizes.splits + split, sizes.splits, sizes.rows - first, sum, top, total, lane,
             kWidth);
}
