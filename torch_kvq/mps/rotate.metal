// out = R x, or R^T x if inverse, of rows [n0, n1, n2, kDim]; one simdgroup a row. x and out may be the same memory.
struct Sizes {
  long rows, size[3], x[3], out[3];  // rows: n0 * n1 * n2; x, out: strides
  long inverse, rounds, has_blocks, has_matrix;
};

[[max_total_threads_per_threadgroup(128)]]
kernel void rotate_rows(
    device const In* x [[buffer(0)]],
    device const float* signs [[buffer(1)]],
    device const float* blocks [[buffer(2)]],
    device const float* matrix [[buffer(3)]],
    device Out* out [[buffer(4)]],
    constant Sizes& sizes [[buffer(5)]],
    uint group [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float vectors[kSimds * kDim];
  const long row = long(group) * kSimds + simd;
  if (row >= sizes.rows) {
    return;  // the whole simdgroup
  }
  threadgroup float* v = vectors + simd * kDim;
  device const In* source = x + row_offset(row, sizes.size, sizes.x);
  for (uint i = lane; i < kDim; i += kWidth) {
    v[i] = float(source[i]);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  const Rotation rotation = {signs, blocks, matrix, sizes.rounds, sizes.has_blocks, sizes.has_matrix};
  rotate_vector(v, rotation, sizes.inverse, lane);
  device Out* target = out + row_offset(row, sizes.size, sizes.out);
  for (uint i = lane; i < kDim; i += kWidth) {
    target[i] = Out(v[i]);
  }
}
