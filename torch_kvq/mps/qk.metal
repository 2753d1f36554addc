// Scores q . k of up to kRows rows against every token, one a thread: out [B, Hq, M, T]. What query.metal made has scale 1.
struct Sizes {
  long heads, group, queries, rows, length, num_sinks, exact_len;
  long key_sign[3], key_mag[4], key_scale[2], keys[3], out[4];  // strides
};

[[max_total_threads_per_threadgroup(128)]]
kernel void qk_packed(
    device const float* rotated [[buffer(0)]],  // [B, H, rows, kPadded]
    device const float* bias [[buffer(1)]],     // [B, H, rows]
    device const uint* key_sign [[buffer(2)]],
    device const uint* key_mag [[buffer(3)]],
    device const half* key_scale [[buffer(4)]],
    device const float* key_levels [[buffer(5)]],
    device Out* out [[buffer(6)]],
    constant Sizes& sizes [[buffer(7)]],
    uint3 group [[threadgroup_position_in_grid]],  // packed tokens / 128, rows / kRows, B * H
    uint index [[thread_index_in_threadgroup]]) {
  threadgroup float query[kRows * kPadded];
  const long first = long(group.y) * kRows;
  const long head = group.z % sizes.heads;
  const long batch = group.z / sizes.heads;
  const long flat = long(group.z) * sizes.rows + first;
  load_rows(query, rotated + flat * kPadded, sizes.rows - first, index);
  const long token = long(group.x) * kThreads + index;
  if (token >= sizes.length) {
    return;
  }
  float level[kKeyLevels];
  load_levels<kKeyLevels>(level, key_levels);
  float score[kRows];
  score_key(key_sign + batch * sizes.key_sign[0] + head * sizes.key_sign[1] + token * sizes.key_sign[2],
            key_mag + batch * sizes.key_mag[0] + head * sizes.key_mag[1] + token * sizes.key_mag[2], sizes.key_mag[3], query,
            level, score);
  const float scale = float(key_scale[batch * sizes.key_scale[0] + head * sizes.key_scale[1] + token]);
  for (uint r = 0; r < kRows && first + r < sizes.rows; ++r) {
    const long entry = query_offset(batch, head, first + r, sizes.group, sizes.queries, sizes.out);
    out[entry + (sizes.num_sinks + token) * sizes.out[3]] = Out(score[r] * scale + bias[flat + r]);
  }
}

[[max_total_threads_per_threadgroup(128)]]
kernel void qk_exact(
    device const float* plain [[buffer(0)]],  // [B, H, rows, kPadded]
    device const Exact* keys [[buffer(1)]],   // [B, H, E, kDim]
    device Out* out [[buffer(2)]],
    constant Sizes& sizes [[buffer(3)]],
    uint3 group [[threadgroup_position_in_grid]],  // exact tokens / 128, rows / kRows, B * H
    uint index [[thread_index_in_threadgroup]]) {
  threadgroup float query[kRows * kPadded];
  const long first = long(group.y) * kRows;
  const long head = group.z % sizes.heads;
  const long batch = group.z / sizes.heads;
  load_rows(query, plain + (long(group.z) * sizes.rows + first) * kPadded, sizes.rows - first, index);
  const long token = long(group.x) * kThreads + index;
  if (token >= sizes.exact_len) {
    return;
  }
  float score[kRows];
  score_exact(keys + batch * sizes.keys[0] + head * sizes.keys[1] + token * sizes.keys[2], query, score);
  const long column = token < sizes.num_sinks ? token : token + sizes.length;
  for (uint r = 0; r < kRows && first + r < sizes.rows; ++r) {
    const long entry = query_offset(batch, head, first + r, sizes.group, sizes.queries, sizes.out);
    out[entry + column * sizes.out[3]] = Out(score[r]);
  }
}
