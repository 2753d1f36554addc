// Puts the splits of attend or pv together, one simdgroup a row: their sums weighted by exp(top - peak), those of packed
// tokens rotated back once, then divided by the sum of all weights:
//   out = (centre * w + balance * R^T (packed sums) + exact sums) / total, with w the weights of packed tokens.
struct Sizes {
  long rows, size[3], out[3], lse[3];  // rows: B * Hq * M; out, lse: strides
  long group, packed_splits, splits, normalise, has_sinks, centre[2], balance[2], has_centre, has_balance;
  long rounds, has_blocks, has_matrix;
};

// Sums of the weights of packed and of all tokens.
inline void sum_weights(
    device const float* state, constant Sizes& sizes, float offset, uint lane, thread float& packed, thread float& total) {
  for (long n = lane; n < sizes.splits; n += kWidth) {
    const float weight = state[2 * n + 1] * precise::exp(state[2 * n] - offset);
    total += weight;
    packed += n < sizes.packed_splits ? weight : 0.0f;
  }
  packed = simd_sum(packed);
  total = simd_sum(total);
}

[[max_total_threads_per_threadgroup(128)]]
kernel void finish(
    device const float* sums [[buffer(0)]],   // [rows, splits, kDim], packed splits first
    device const float* state [[buffer(1)]],  // [rows, splits, 2]: highest logit, sum of weights
    device const float* centre [[buffer(2)]],   // [B, H, kDim]
    device const float* balance [[buffer(3)]],  // [B, H, kDim]
    device const float* signs [[buffer(4)]],
    device const float* blocks [[buffer(5)]],
    device const float* matrix [[buffer(6)]],
    device const float* sink_logits [[buffer(7)]],  // [Hq], if has_sinks
    device Out* out [[buffer(8)]],
    device float* lse [[buffer(9)]],  // written if normalise
    constant Sizes& sizes [[buffer(10)]],
    uint group [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float vectors[kSimds * kDim];
  const long row = long(group) * kSimds + simd;
  if (row >= sizes.rows) {
    return;
  }
  const long batch = row / (sizes.size[1] * sizes.size[2]);
  const long query_head = row / sizes.size[2] % sizes.size[1];
  const long head = query_head / sizes.group;
  sums += row * sizes.splits * kDim;
  state += row * sizes.splits * 2;
  centre += batch * sizes.centre[0] + head * sizes.centre[1];
  balance += batch * sizes.balance[0] + head * sizes.balance[1];
  float peak = -INFINITY;
  for (long n = lane; n < sizes.splits; n += kWidth) {
    peak = max(peak, state[2 * n]);
  }
  peak = simd_max(peak);
  if (sizes.has_sinks) {
    peak = max(peak, sink_logits[query_head]);
  }
  const float offset = sizes.normalise && peak != -INFINITY ? peak : 0.0f;
  float packed = 0.0f;
  float total = 0.0f;
  sum_weights(state, sizes, offset, lane, packed, total);
  total += sizes.has_sinks ? precise::exp(sink_logits[query_head] - offset) : 0.0f;
  float rotated[kPerLane];
  float exact[kPerLane];
  for (uint k = 0; k < kPerLane; ++k) {
    rotated[k] = 0.0f;
    exact[k] = 0.0f;
  }
  for (long n = 0; n < sizes.splits; ++n) {
    const float weight = precise::exp(state[2 * n] - offset);
    for (uint k = 0; k < kPerLane; ++k) {
      const uint i = lane + k * kWidth;
      const float part = i < kDim ? weight * sums[n * kDim + i] : 0.0f;
      rotated[k] += n < sizes.packed_splits ? part : 0.0f;
      exact[k] += n < sizes.packed_splits ? 0.0f : part;
    }
  }
  threadgroup float* v = vectors + simd * kDim;
  for (uint k = 0; k < kPerLane; ++k) {
    if (lane + k * kWidth < kDim) {
      v[lane + k * kWidth] = rotated[k];
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  const Rotation rotation = {signs, blocks, matrix, sizes.rounds, sizes.has_blocks, sizes.has_matrix};
  rotate_vector(v, rotation, true, lane);
  const float share = !sizes.normalise ? 1.0f : total == 0.0f ? 0.0f : 1.0f / total;
  out += row_offset(row, sizes.size, sizes.out);
  for (uint k = 0; k < kPerLane; ++k) {
    const uint i = lane + k * kWidth;
    if (i < kDim) {
      const float balanced = sizes.has_balance ? v[i] * balance[i] : v[i];
      out[i] = Out((balanced + (sizes.has_centre ? packed * centre[i] : 0.0f) + exact[k]) * share);
    }
  }
  if (sizes.normalise && lane == 0) {
    lse[row_offset(row, sizes.size, sizes.lse)] = peak + precise::log(total);
  }
}
