// Queries as the other kernels of attend and qk take them, one simdgroup a row of q [B, Hq, M, kDim]:
//   plain   scale * q, for exact keys
//   rotated scale * R (balance * q), for packed keys; both padded with zeros to whole words
//   bias    scale * q . centre, which every packed key adds: q . k = (q * balance) . ((k - centre) / balance) + q . centre
struct Sizes {
  long rows, size[3], q[3];  // rows: B * Hq * M; q: strides
  long group, centre[2], balance[2], has_centre, has_balance;
  long rounds, has_blocks, has_matrix;
};

[[max_total_threads_per_threadgroup(128)]]
kernel void query(
    device const In* q [[buffer(0)]],
    device const float* centre [[buffer(1)]],   // [B, H, kDim]
    device const float* balance [[buffer(2)]],  // [B, H, kDim]
    device const float* signs [[buffer(3)]],
    device const float* blocks [[buffer(4)]],
    device const float* matrix [[buffer(5)]],
    device float* plain [[buffer(6)]],    // [rows, kPadded]
    device float* rotated [[buffer(7)]],  // [rows, kPadded]
    device float* bias [[buffer(8)]],     // [rows]
    constant float& scale [[buffer(9)]],
    constant Sizes& sizes [[buffer(10)]],
    uint group [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float vectors[kSimds * kDim];
  const long row = long(group) * kSimds + simd;
  if (row >= sizes.rows) {
    return;
  }
  threadgroup float* v = vectors + simd * kDim;
  const long batch = row / (sizes.size[1] * sizes.size[2]);
  const long head = row / sizes.size[2] % sizes.size[1] / sizes.group;
  device const In* source = q + row_offset(row, sizes.size, sizes.q);
  centre += batch * sizes.centre[0] + head * sizes.centre[1];
  balance += batch * sizes.balance[0] + head * sizes.balance[1];
  float dot_centre = 0.0f;
  for (uint i = lane; i < kDim; i += kWidth) {
    const float x = float(source[i]) * scale;
    plain[row * kPadded + i] = x;
    dot_centre += sizes.has_centre ? x * centre[i] : 0.0f;
    v[i] = sizes.has_balance ? x * balance[i] : x;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  const Rotation rotation = {signs, blocks, matrix, sizes.rounds, sizes.has_blocks, sizes.has_matrix};
  rotate_vector(v, rotation, false, lane);
  dot_centre = simd_sum(dot_centre);
  if (lane == 0) {
    bias[row] = dot_centre;
  }
  for (uint i = lane; i < kPadded; i += kWidth) {
    rotated[row * kPadded + i] = i < kDim ? v[i] : 0.0f;
    if (i >= kDim) {
      plain[row * kPadded + i] = 0.0f;
    }
  }
}
