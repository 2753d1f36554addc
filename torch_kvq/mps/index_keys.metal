// Index of keys x [B, H, N, kDim] at tokens start .. start + N: one simdgroup a key y = R ((x - centre) / balance), whose
// sign words are the ballots of the lanes. factor = |y|^2 / sum |y_i|, bias = query_centre . (x - centre).
constant constexpr float kLargestHalf = 65504.0f;

struct Sizes {
  long heads, tokens, start, x[3], query_centre[2], has_query_centre, has_sign;
  long centre[2], balance[2], has_centre, has_balance, rounds, has_blocks, has_matrix, sign[3], factor[2], bias[2];
};

[[max_total_threads_per_threadgroup(128)]]
kernel void index_keys(
    device const In* x [[buffer(0)]],
    device const float* query_centre [[buffer(1)]],  // [B, H, kDim]
    device const float* centre [[buffer(2)]],        // [B, H, kDim]
    device const float* balance [[buffer(3)]],       // [B, H, kDim]
    device const float* signs [[buffer(4)]],
    device const float* blocks [[buffer(5)]],
    device const float* matrix [[buffer(6)]],
    device uint* sign [[buffer(7)]],    // [B, H, C, W], written if has_sign
    device half* factor [[buffer(8)]],  // [B, H, C]
    device half* bias [[buffer(9)]],    // [B, H, C], written if has_query_centre
    constant Sizes& sizes [[buffer(10)]],
    uint3 group [[threadgroup_position_in_grid]],  // tokens / 4, H, B
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float vectors[kSimds * kDim];
  const long n = long(group.x) * kSimds + simd;
  const long token = sizes.start + n;
  if (n >= sizes.tokens) {
    return;
  }
  const long head = group.y;
  const long batch = group.z;
  threadgroup float* v = vectors + simd * kDim;
  x += batch * sizes.x[0] + head * sizes.x[1] + n * sizes.x[2];
  query_centre += batch * sizes.query_centre[0] + head * sizes.query_centre[1];
  centre += batch * sizes.centre[0] + head * sizes.centre[1];
  balance += batch * sizes.balance[0] + head * sizes.balance[1];
  float product = 0.0f;
  for (uint i = lane; i < kDim; i += kWidth) {
    const float centred = sizes.has_centre ? float(x[i]) - centre[i] : float(x[i]);
    product += sizes.has_query_centre ? centred * query_centre[i] : 0.0f;
    v[i] = sizes.has_balance ? centred / balance[i] : centred;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  const Rotation rotation = {signs, blocks, matrix, sizes.rounds, sizes.has_blocks, sizes.has_matrix};
  rotate_vector(v, rotation, false, lane);
  float total = 0.0f;
  float square = 0.0f;
  sign += batch * sizes.sign[0] + head * sizes.sign[1] + token * sizes.sign[2];
  for (uint k = 0; k < kPerLane; ++k) {
    const uint i = lane + k * kWidth;
    const float y = i < kDim ? v[i] : 0.0f;
    total += fabs(y);
    square += y * y;
    const uint word = uint(static_cast<simd_vote::vote_t>(simd_ballot(y < 0.0f)));
    if (lane == 0 && sizes.has_sign) {
      sign[k] = word;
    }
  }
  total = simd_sum(total);
  square = simd_sum(square);
  product = simd_sum(product);
  if (lane == 0) {
    const float length = total > 0.0f ? square / total : 0.0f;
    factor[batch * sizes.factor[0] + head * sizes.factor[1] + token] = half(length > kLargestHalf ? kLargestHalf : length);
    if (sizes.has_query_centre) {
      bias[batch * sizes.bias[0] + head * sizes.bias[1] + token] = half(clamp(product, -kLargestHalf, kLargestHalf));
    }
  }
}
