// Queries to 4-bit codes of y = R (balance * (q - query_centre)), one simdgroup a row of q [B, Hq, M, kDim]; planes are the
// ballots of its lanes. terms: scale * delta, scale * min(y), sum of the codes, scale * q . centre.
constant constexpr uint kQueryBits = 4;
constant constexpr float kTopCode = 15.0f;

struct Sizes {
  long rows, size[3], q[3], planes[4], terms[3];  // rows: B * Hq * M; q ..: strides
  long group, query_centre[2], has_query_centre, centre[2], balance[2], has_centre, has_balance;
  long rounds, has_blocks, has_matrix;
};

[[max_total_threads_per_threadgroup(128)]]
kernel void quantise_query(
    device const In* q [[buffer(0)]],
    device const float* query_centre [[buffer(1)]],  // [B, H, kDim]
    device const float* centre [[buffer(2)]],        // [B, H, kDim]
    device const float* balance [[buffer(3)]],       // [B, H, kDim]
    device const float* signs [[buffer(4)]],
    device const float* blocks [[buffer(5)]],
    device const float* matrix [[buffer(6)]],
    device uint* planes [[buffer(7)]],  // [B, Hq, M, 4, W]
    device float* terms [[buffer(8)]],  // [B, Hq, M, 4]
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
  q += row_offset(row, sizes.size, sizes.q);
  query_centre += batch * sizes.query_centre[0] + head * sizes.query_centre[1];
  centre += batch * sizes.centre[0] + head * sizes.centre[1];
  balance += batch * sizes.balance[0] + head * sizes.balance[1];
  float base = 0.0f;
  for (uint i = lane; i < kDim; i += kWidth) {
    const float x = float(q[i]);
    base += sizes.has_centre ? x * centre[i] : 0.0f;
    const float centred = sizes.has_query_centre ? x - query_centre[i] : x;
    v[i] = sizes.has_balance ? centred * balance[i] : centred;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  const Rotation rotation = {signs, blocks, matrix, sizes.rounds, sizes.has_blocks, sizes.has_matrix};
  rotate_vector(v, rotation, false, lane);
  base = simd_sum(base);
  float low = INFINITY;
  float high = -INFINITY;
  bool finite = isfinite(base);
  for (uint i = lane; i < kDim; i += kWidth) {
    low = min(low, v[i]);
    high = max(high, v[i]);
    finite = finite && isfinite(v[i]);
  }
  low = simd_min(low);
  high = simd_max(high);
  finite = simd_all(finite);
  const float delta = (high - low) / kTopCode;
  planes += row_offset(row, sizes.size, sizes.planes);
  uint sum = 0;
  for (uint k = 0; k < kPerLane; ++k) {
    const uint i = lane + k * kWidth;
    const bool coded = i < kDim && finite && delta > 0.0f;
    const uint code = coded ? uint(clamp(rint((v[i] - low) / delta), 0.0f, kTopCode)) : 0u;
    sum += code;
    for (uint j = 0; j < kQueryBits; ++j) {
      const uint word = uint(static_cast<simd_vote::vote_t>(simd_ballot((code >> j) & 1u)));
      if (lane == 0) {
        planes[j * sizes.planes[3] + k] = word;
      }
    }
  }
  sum = simd_sum(sum);
  if (lane == 0) {
    device float* target = terms + row_offset(row, sizes.size, sizes.terms);
    target[0] = finite ? scale * delta : NAN;
    target[1] = finite ? scale * low : NAN;
    target[2] = finite ? float(sum) : NAN;
    target[3] = finite ? scale * base : NAN;
  }
}
