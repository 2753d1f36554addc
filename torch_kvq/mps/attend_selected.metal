// Attention of up to kRows rows over the tokens of a selection. A simdgroup is a split, as in attend_words.metal, and
// finish.metal puts the splits together. What a split has beyond the count of the selection is not read.
constant constexpr uint kSlots = (kValueDim + kWidth - 1) / kWidth;  // coordinates of a lane

struct Sizes {
  long heads, group, queries, rows;  // heads: selections; rows: group * queries
  long key_heads, mask_columns, split_blocks, splits;
  long keys[3], key_sign[3], key_mag[4], key_scale[2], values[3], value_sign[3], value_mag[4], value_scale[2];  // strides
  long indices[2], count[2], table[4];
};

// sum[k * kRows + r] += weights[r * kWidth + t] * value of the k-th coordinate of a lane, over the tokens t of `indices`.
inline void add_selected(
    device const Value* values, long unit, thread const Words& words, device const uint* indices, uint count,
    threadgroup const float* weights, thread const float* level, uint lane, thread float* sum) {
  for (uint t = 0; t < count; ++t) {
    const long token = long(indices[t]);
    for (uint k = 0; k < kSlots; ++k) {
      const uint i = lane + k * kWidth;
      float value = 0.0f;
      if (i < kValueDim) {
        value = kPackedValues ? shared_value(words, token, i, level) : float(values[token * unit + i]);
      }
      for (uint r = 0; r < kRows; ++r) {
        sum[k * kRows + r] += weights[r * kWidth + t] * value;
      }
    }
  }
}

[[max_total_threads_per_threadgroup(128)]]
kernel void attend_selected(
    device const float* vectors [[buffer(0)]],  // [B, K, rows, kPadded], rotated if kPackedKeys
    device const float* bias [[buffer(1)]],     // [B, K, rows]
    device const Exact* keys [[buffer(2)]],     // [B, H, C, kDim]
    device const uint* key_sign [[buffer(3)]],
    device const uint* key_mag [[buffer(4)]],
    device const half* key_scale [[buffer(5)]],
    device const float* key_levels [[buffer(6)]],
    device const Value* values [[buffer(7)]],  // [B, H, C, kValueDim]
    device const uint* value_sign [[buffer(8)]],
    device const uint* value_mag [[buffer(9)]],
    device const half* value_scale [[buffer(10)]],
    device const float* value_levels [[buffer(11)]],
    device const uint* indices [[buffer(12)]],  // [B, K, S]
    device const uint* count [[buffer(13)]],    // [B, K]
    device const Table* table [[buffer(14)]],
    device float* sums [[buffer(15)]],   // [B, K, rows, splits, kValueDim]
    device float* state [[buffer(16)]],  // [B, K, rows, splits, 2]
    constant float& softcap [[buffer(17)]],
    constant Sizes& sizes [[buffer(18)]],
    uint3 group [[threadgroup_position_in_grid]],  // splits / 4, rows / kRows, B * K
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint index [[thread_index_in_threadgroup]]) {
  threadgroup float query[kRows * kPadded];
  threadgroup float weights[kThreads * kRows];
  const long first = long(group.y) * kRows;
  const long selection = group.z % sizes.heads;
  const long batch = group.z / sizes.heads;
  const long head = selection * sizes.key_heads / sizes.heads;
  const long flat = long(group.z) * sizes.rows;
  load_rows(query, vectors + (flat + first) * kPadded, sizes.rows - first, index);
  const long split = long(group.x) * kSimds + simd;
  if (split >= sizes.splits) {
    return;
  }
  const Keys places = keys_of(keys, key_sign, key_mag, key_scale, bias + flat + first, sizes, batch, head);
  const Words words = {value_sign + batch * sizes.value_sign[0] + head * sizes.value_sign[1],
                       value_mag + batch * sizes.value_mag[0] + head * sizes.value_mag[1],
                       sizes.value_sign[2], sizes.value_mag[2], sizes.value_mag[3]};
  values += batch * sizes.values[0] + head * sizes.values[1];
  value_scale += batch * sizes.value_scale[0] + head * sizes.value_scale[1];
  indices += batch * sizes.indices[0] + selection * sizes.indices[1];
  table += batch * sizes.table[0];
  float key_level[kKeyLevels];
  float value_level[kValueLevels];
  if (kPackedKeys) {
    load_levels<kKeyLevels>(key_level, key_levels);
  }
  if (kPackedValues) {
    load_levels<kValueLevels>(value_level, value_levels);
  }
  float sum[kSlots * kRows];
  float top[kRows];
  float total[kRows];
  begin_rows(sum, kSlots * kRows, top, total);
  threadgroup float* mine = weights + simd * kRows * kWidth;
  const long begin = split * sizes.split_blocks * kWidth;
  const long selected = long(count[batch * sizes.count[0] + selection * sizes.count[1]]);
  const long end = min(begin + sizes.split_blocks * kWidth, selected);
  for (long now = begin; now < end; now += kWidth) {
    const bool valid = now + lane < end;
    const long token = valid ? long(indices[now + lane]) : 0;
    const long column = min(token, sizes.mask_columns - 1);
    float x[kRows];
    if (valid) {
      score_selected(places, token, sizes.rows - first, query, key_level, x);
    }
    const float scale = valid && kPackedValues ? float(value_scale[token]) : 1.0f;
    for (uint r = 0; r < kRows; ++r) {
      const long row = min(first + r, sizes.rows - 1);
      const long entry = query_offset(0, selection, row, sizes.group, sizes.queries, sizes.table);
      x[r] = valid ? weigh(x[r], softcap, table + entry + column * sizes.table[3]) : unreached();
      const float factor = soften(x[r], top[r], total[r], simd_max(x[r]));
      mine[r * kWidth + lane] = x[r] * scale;
      for (uint k = 0; k < kSlots; ++k) {
        sum[k * kRows + r] *= factor;
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    const uint number = uint(min(end - now, long(kWidth)));
    add_selected(values, sizes.values[2], words, indices + now, number, mine, value_level, lane, sum);
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (uint r = 0; r < kRows; ++r) {
    total[r] = simd_sum(total[r]);
  }
  write_rows(sums, state, (flat + first) * sizes.splits + split, sizes.splits, sizes.rows - first, sum, top, total, lane,
             kWidth);
}
