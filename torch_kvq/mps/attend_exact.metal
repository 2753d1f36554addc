// Attention of up to kRows rows over exact tokens: sinks, recent tokens, prompts that are not packed yet. A simdgroup is a
// split, as in attend_words.metal; it leaves sums and state in the same place, not to be rotated back.
constant constexpr uint kSlots = (kValueDim + kWidth - 1) / kWidth;  // coordinates of a lane

struct Sizes {
  long heads, group, queries, rows;
  long length, num_sinks, exact_len, split_blocks, packed_splits, splits;
  long keys[3], values[3], table[4];  // strides
};

[[max_total_threads_per_threadgroup(128)]]
kernel void attend_exact(
    device const float* plain [[buffer(0)]],   // [B, H, rows, kPadded]
    device const Exact* keys [[buffer(1)]],    // [B, H, E, kDim]
    device const Exact* values [[buffer(2)]],  // [B, H, E, kValueDim]
    device const Table* table [[buffer(3)]],
    device float* sums [[buffer(4)]],   // [B, H, rows, splits, kValueDim]
    device float* state [[buffer(5)]],  // [B, H, rows, splits, 2]
    constant float& softcap [[buffer(6)]],
    constant Sizes& sizes [[buffer(7)]],
    uint3 group [[threadgroup_position_in_grid]],  // exact splits / 4, rows / kRows, B * H
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint index [[thread_index_in_threadgroup]]) {
  threadgroup float query[kRows * kPadded];
  threadgroup float weights[kThreads * kRows];
  const long first = long(group.y) * kRows;
  const long head = group.z % sizes.heads;
  const long batch = group.z / sizes.heads;
  const long flat = long(group.z) * sizes.rows;
  load_rows(query, plain + (flat + first) * kPadded, sizes.rows - first, index);
  const long split = sizes.packed_splits + long(group.x) * kSimds + simd;
  if (split >= sizes.splits) {
    return;
  }
  keys += batch * sizes.keys[0] + head * sizes.keys[1];
  values += batch * sizes.values[0] + head * sizes.values[1];
  table += batch * sizes.table[0];
  float sum[kSlots * kRows];
  float top[kRows];
  float total[kRows];
  begin_rows(sum, kSlots * kRows, top, total);
  threadgroup float* mine = weights + simd * kRows * kWidth;
  const long begin = (split - sizes.packed_splits) * sizes.split_blocks * kWidth;
  const long end = min(begin + sizes.split_blocks * kWidth, sizes.exact_len);
  for (long now = begin; now < end; now += kWidth) {
    const long token = now + lane;
    const long column = token < sizes.num_sinks ? token : token + sizes.length;
    float x[kRows];
    if (token < end) {
      score_exact(keys + token * sizes.keys[2], query, x);
    }
    for (uint r = 0; r < kRows; ++r) {
      const long entry = query_offset(0, head, min(first + r, sizes.rows - 1), sizes.group, sizes.queries, sizes.table);
      x[r] = token < end ? weigh(x[r], softcap, table + entry + column * sizes.table[3]) : unreached();
      const float factor = soften(x[r], top[r], total[r], simd_max(x[r]));
      mine[r * kWidth + lane] = x[r];
      for (uint k = 0; k < kSlots; ++k) {
        sum[k * kRows + r] *= factor;
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    const uint count = uint(min(end - now, long(kWidth)));
    for (uint t = 0; t < count; ++t) {
      device const Exact* value = values + (now + t) * sizes.values[2];
      for (uint k = 0; k < kSlots; ++k) {
        const float v = lane + k * kWidth < kValueDim ? float(value[lane + k * kWidth]) : 0.0f;
        for (uint r = 0; r < kRows; ++r) {
          sum[k * kRows + r] += mine[r * kWidth + t] * v;
        }
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (uint r = 0; r < kRows; ++r) {
    total[r] = simd_sum(total[r]);
  }
  write_rows(sums, state, (flat + first) * sizes.splits + split, sizes.splits, sizes.rows - first, sum, top, total, lane,
             kWidth);
}
