// Estimated logits of tokens start .. start + N from the signs of their keys: one thread a token, whose words it reads once
// for up to kRows rows. The order of operations is that of the schema (torch_kvq/ops/schemas.py), each rounded by itself, so
// results are those of the reference to the last bit.
constant constexpr uint kWords = kPadded / kWidth;
constant constexpr uint kQueryBits = 4;

struct Sizes {
  long heads, group, queries, rows, tokens, start, head_dim, has_bias;  // rows: group * queries
  long planes[4], terms[3], sign[3], factor[2], bias[2], out[3];        // strides
};

inline float estimate(float4 terms, float left, float inner, float factor, float bias, bool has_bias) {
#pragma clang fp contract(off)
  const float ends = terms.y * left;
  const float middle = terms.x * (terms.z - 2.0f * inner);
  const float score = (ends + middle) * factor;
  return (has_bias ? score + bias : score) + terms.w;
}

[[max_total_threads_per_threadgroup(128)]]
kernel void sign_scores(
    device const uint* planes [[buffer(0)]],  // [B, Hq, M, 4, kWords]
    device const float* terms [[buffer(1)]],  // [B, Hq, M, 4]
    device const uint* sign [[buffer(2)]],    // [B, H, C, kWords]
    device const half* factor [[buffer(3)]],  // [B, H, C]
    device const half* bias [[buffer(4)]],    // [B, H, C], if has_bias
    device Out* out [[buffer(5)]],            // [B, Hq, M, N]
    constant float& scale [[buffer(6)]],
    constant Sizes& sizes [[buffer(7)]],
    uint3 group [[threadgroup_position_in_grid]],  // N / 128, rows / kRows, B * H
    uint index [[thread_index_in_threadgroup]]) {
  threadgroup uint query[kRows * kQueryBits * kWords];
  threadgroup float numbers[kRows * 4];
  const long first = long(group.y) * kRows;
  const long head = group.z % sizes.heads;
  const long batch = group.z / sizes.heads;
  const uint count = uint(min(sizes.rows - first, long(kRows)));
  for (uint k = index; k < count * kQueryBits * kWords; k += kThreads) {
    const long row = first + k / (kQueryBits * kWords);
    const long at = query_offset(batch, head, row, sizes.group, sizes.queries, sizes.planes);
    query[k] = planes[at + k / kWords % kQueryBits * sizes.planes[3] + k % kWords];
  }
  for (uint k = index; k < count * 4; k += kThreads) {
    numbers[k] = terms[query_offset(batch, head, first + k / 4, sizes.group, sizes.queries, sizes.terms) + k % 4];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const long n = long(group.x) * kThreads + index;
  if (n >= sizes.tokens) {
    return;
  }
  const long token = sizes.start + n;
  sign += batch * sizes.sign[0] + head * sizes.sign[1] + token * sizes.sign[2];
  uint signs[kWords];
  uint negative = 0;
  for (uint w = 0; w < kWords; ++w) {
    signs[w] = sign[w];
    negative += popcount(signs[w]);
  }
  const float left = float(int(sizes.head_dim) - 2 * int(negative));
  const float length = float(factor[batch * sizes.factor[0] + head * sizes.factor[1] + token]);
  const float shift = sizes.has_bias ? scale * float(bias[batch * sizes.bias[0] + head * sizes.bias[1] + token]) : 0.0f;
  for (uint r = 0; r < count; ++r) {
    uint inner = 0;
    for (uint j = 0; j < kQueryBits; ++j) {
      for (uint w = 0; w < kWords; ++w) {
        inner += popcount(query[(r * kQueryBits + j) * kWords + w] & signs[w]) << j;
      }
    }
    const float4 number = float4(numbers[4 * r], numbers[4 * r + 1], numbers[4 * r + 2], numbers[4 * r + 3]);
    const float score = estimate(number, left, float(inner), length, shift, sizes.has_bias);
    out[query_offset(batch, head, first + r, sizes.group, sizes.queries, sizes.out) + n] = Out(score);
  }
}
