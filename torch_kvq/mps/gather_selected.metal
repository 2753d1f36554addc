// Copies selected rows of x [B, H, C, D] to out [B, K, S, D], one thread a coordinate; rows from the count on stay.
struct Sizes {
  long heads, key_heads, capacity, dim;  // heads: selections
  long x[3], indices[2], count[2], out[3];  // strides
};

[[max_total_threads_per_threadgroup(128)]]
kernel void gather_selected(
    device const In* x [[buffer(0)]],
    device const uint* indices [[buffer(1)]],  // [B, K, S]
    device const uint* count [[buffer(2)]],    // [B, K]
    device In* out [[buffer(3)]],
    constant Sizes& sizes [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]],  // S * D / 128, K, B
    uint index [[thread_index_in_threadgroup]]) {
  const long at = long(group.x) * kThreads + index;
  const long n = at / sizes.dim;
  const long i = at % sizes.dim;
  const long selection = group.y;
  const long batch = group.z;
  if (n >= long(count[batch * sizes.count[0] + selection * sizes.count[1]])) {
    return;
  }
  const long token = long(indices[batch * sizes.indices[0] + selection * sizes.indices[1] + n]);
  const long head = selection * sizes.key_heads / sizes.heads;
  out[batch * sizes.out[0] + selection * sizes.out[1] + n * sizes.out[2] + i] =
      x[batch * sizes.x[0] + head * sizes.x[1] + token * sizes.x[2] + i];
}
