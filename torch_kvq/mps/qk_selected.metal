// Scores of up to kRows rows against the keys of a selection, one a thread: out [B, Hq, M, S], -inf from its count on.
struct Sizes {
  long heads, group, queries, rows;  // heads: selections; rows: group * queries
  long key_heads, capacity;
  long keys[3], key_sign[3], key_mag[4], key_scale[2], indices[2], count[2], out[3];  // strides
};

[[max_total_threads_per_threadgroup(128)]]
kernel void qk_selected(
    device const float* vectors [[buffer(0)]],  // [B, K, rows, kPadded], rotated if kPackedKeys
    device const float* bias [[buffer(1)]],     // [B, K, rows]
    device const Exact* keys [[buffer(2)]],     // [B, H, C, kDim]
    device const uint* key_sign [[buffer(3)]],
    device const uint* key_mag [[buffer(4)]],
    device const half* key_scale [[buffer(5)]],
    device const float* key_levels [[buffer(6)]],
    device const uint* indices [[buffer(7)]],  // [B, K, S]
    device const uint* count [[buffer(8)]],    // [B, K]
    device float* out [[buffer(9)]],
    constant Sizes& sizes [[buffer(10)]],
    uint3 group [[threadgroup_position_in_grid]],  // S / 128, rows / kRows, B * K
    uint index [[thread_index_in_threadgroup]]) {
  threadgroup float query[kRows * kPadded];
  const long first = long(group.y) * kRows;
  const long selection = group.z % sizes.heads;
  const long batch = group.z / sizes.heads;
  const long head = selection * sizes.key_heads / sizes.heads;
  const long flat = long(group.z) * sizes.rows + first;
  load_rows(query, vectors + flat * kPadded, sizes.rows - first, index);
  const long n = long(group.x) * kThreads + index;
  if (n >= sizes.capacity) {
    return;
  }
  const Keys places = keys_of(keys, key_sign, key_mag, key_scale, bias + flat, sizes, batch, head);
  const bool valid = n < long(count[batch * sizes.count[0] + selection * sizes.count[1]]);
  float score[kRows];
  if (valid) {
    float level[kKeyLevels];
    if (kPackedKeys) {
      load_levels<kKeyLevels>(level, key_levels);
    }
    const long token = long(indices[batch * sizes.indices[0] + selection * sizes.indices[1] + n]);
    score_selected(places, token, sizes.rows - first, query, level, score);
  }
  for (uint r = 0; r < kRows && first + r < sizes.rows; ++r) {
    out[query_offset(batch, selection, first + r, sizes.group, sizes.queries, sizes.out) + n] = valid ? score[r] : -INFINITY;
  }
}
