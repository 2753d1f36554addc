// Rebuilds tokens start .. start + N of a store: out [B, H, N, kDim] = centre + balance * R^T (scale * value(code)), one
// simdgroup a token.
constant constexpr uint kPlanes = kBits - 1;
constant constexpr uint kLevels = 1 << kPlanes;

struct Sizes {
  long heads, tokens, start, along_tokens, out[3], centre[2], balance[2], has_centre, has_balance;
  long rounds, has_blocks, has_matrix, sign[3], mag[4], scale[2];
};

[[max_total_threads_per_threadgroup(128)]]
kernel void decode(
    device const uint* sign [[buffer(0)]],
    device const uint* mag [[buffer(1)]],
    device const half* scale [[buffer(2)]],
    device const float* levels [[buffer(3)]],
    device const float* centre [[buffer(4)]],
    device const float* balance [[buffer(5)]],
    device const float* signs [[buffer(6)]],
    device const float* blocks [[buffer(7)]],
    device const float* matrix [[buffer(8)]],
    device Out* out [[buffer(9)]],
    constant Sizes& sizes [[buffer(10)]],
    uint3 group [[threadgroup_position_in_grid]],  // tokens / 4, H, B
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float vectors[kSimds * kDim];
  const long n = long(group.x) * kSimds + simd;
  if (n >= sizes.tokens) {
    return;
  }
  const long token = sizes.start + n;
  const long head = group.y;
  const long batch = group.z;
  float level[kLevels];
  load_levels<kLevels>(level, levels);
  // A word holds 32 coordinates of a key, or one coordinate of 32 tokens of values.
  const long unit = sizes.along_tokens ? token / kWidth : token;
  sign += batch * sizes.sign[0] + head * sizes.sign[1] + unit * sizes.sign[2];
  mag += batch * sizes.mag[0] + head * sizes.mag[1] + unit * sizes.mag[2];
  const float s = float(scale[batch * sizes.scale[0] + head * sizes.scale[1] + token]);
  threadgroup float* v = vectors + simd * kDim;
  for (uint i = lane; i < kDim; i += kWidth) {
    const uint word = sizes.along_tokens ? i : i / kWidth;
    uint planes[kPlanes];
    for (uint p = 0; p < kPlanes; ++p) {
      planes[p] = mag[p * sizes.mag[3] + word];
    }
    v[i] = s * code_value<kPlanes>(level, sign[word], planes, sizes.along_tokens ? uint(token % kWidth) : lane);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  const Rotation rotation = {signs, blocks, matrix, sizes.rounds, sizes.has_blocks, sizes.has_matrix};
  rotate_vector(v, rotation, true, lane);
  centre += batch * sizes.centre[0] + head * sizes.centre[1];
  balance += batch * sizes.balance[0] + head * sizes.balance[1];
  out += batch * sizes.out[0] + head * sizes.out[1] + n * sizes.out[2];
  for (uint i = lane; i < kDim; i += kWidth) {
    const float balanced = sizes.has_balance ? v[i] * balance[i] : v[i];
    out[i] = Out(sizes.has_centre ? balanced + centre[i] : balanced);
  }
}
