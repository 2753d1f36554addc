// Quantises x [B, H, N, kDim] into tokens start .. start + N of a store. A simdgroup rotates and quantises one vector.
// Keys: its words are the ballots of the lanes. Values: a threadgroup takes a block of 32 tokens, whose codes wait in
// threadgroup memory, then each thread gathers the words of its coordinates; bits of older tokens are kept.
struct Sizes {
  long heads, tokens, start, rule, x[3], centre[2], balance[2], has_centre, has_balance;  // x, centre .. scale: strides
  long rounds, has_blocks, has_matrix, sign[3], mag[4], scale[2];
};

// (x - centre) / balance into threadgroup memory.
inline void load_vector(
    threadgroup float* v, device const In* x, device const float* centre, device const float* balance,
    constant Sizes& sizes, uint lane) {
  for (uint i = lane; i < kDim; i += kWidth) {
    const float centred = float(x[i]) - (sizes.has_centre ? centre[i] : 0.0f);
    v[i] = sizes.has_balance ? centred / balance[i] : centred;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

[[max_total_threads_per_threadgroup(128)]]
kernel void encode_keys(
    device const In* x [[buffer(0)]],
    device const float* levels [[buffer(1)]],
    device const float* centre [[buffer(2)]],
    device const float* balance [[buffer(3)]],
    device const float* signs [[buffer(4)]],
    device const float* blocks [[buffer(5)]],
    device const float* matrix [[buffer(6)]],
    device uint* sign [[buffer(7)]],   // [B, H, C, W]
    device uint* mag [[buffer(8)]],    // [B, H, C, kPlanes, W]
    device half* scale [[buffer(9)]],  // [B, H, C]
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
  load_vector(v, x + batch * sizes.x[0] + head * sizes.x[1] + n * sizes.x[2],
              centre + batch * sizes.centre[0] + head * sizes.centre[1],
              balance + batch * sizes.balance[0] + head * sizes.balance[1], sizes, lane);
  float level[kLevels];
  load_levels<kLevels>(level, levels);
  const Rotation rotation = {signs, blocks, matrix, sizes.rounds, sizes.has_blocks, sizes.has_matrix};
  uint code[kPerLane];
  const half s = quantise_vector(v, rotation, level, sizes.rule, code, lane);
  sign += batch * sizes.sign[0] + head * sizes.sign[1] + token * sizes.sign[2];
  mag += batch * sizes.mag[0] + head * sizes.mag[1] + token * sizes.mag[2];
  for (uint k = 0; k < kPerLane; ++k) {
    const bool inside = lane + k * kWidth < kDim;
    for (uint p = 0; p < kBits; ++p) {
      const bool bit = inside && ((code[k] >> p) & 1u);
      const uint word = uint(static_cast<simd_vote::vote_t>(simd_ballot(bit)));
      if (lane == 0 && p == kPlanes) {
        sign[k] = word;
      } else if (lane == 0) {
        mag[p * sizes.mag[3] + k] = word;
      }
    }
  }
  if (lane == 0) {
    scale[batch * sizes.scale[0] + head * sizes.scale[1] + token] = s;
  }
}

[[max_total_threads_per_threadgroup(128)]]
kernel void encode_values(
    device const In* x [[buffer(0)]],
    device const float* levels [[buffer(1)]],
    device const float* centre [[buffer(2)]],
    device const float* balance [[buffer(3)]],
    device const float* signs [[buffer(4)]],
    device const float* blocks [[buffer(5)]],
    device const float* matrix [[buffer(6)]],
    device uint* sign [[buffer(7)]],   // [B, H, C / 32, kDim]
    device uint* mag [[buffer(8)]],    // [B, H, C / 32, kPlanes, kDim]
    device half* scale [[buffer(9)]],  // [B, H, C]
    constant Sizes& sizes [[buffer(10)]],
    uint3 group [[threadgroup_position_in_grid]],  // blocks from that of start on, H, B
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint index [[thread_index_in_threadgroup]]) {
  threadgroup float vectors[kSimds * kDim];
  threadgroup uchar codes[kWidth * kDim];
  const long block = sizes.start / kWidth + group.x;
  const long head = group.y;
  const long batch = group.z;
  x += batch * sizes.x[0] + head * sizes.x[1];
  centre += batch * sizes.centre[0] + head * sizes.centre[1];
  balance += batch * sizes.balance[0] + head * sizes.balance[1];
  scale += batch * sizes.scale[0] + head * sizes.scale[1];
  float level[kLevels];
  load_levels<kLevels>(level, levels);
  const Rotation rotation = {signs, blocks, matrix, sizes.rounds, sizes.has_blocks, sizes.has_matrix};
  threadgroup float* v = vectors + simd * kDim;
  const uint first = uint(max(sizes.start - block * kWidth, long(0)));
  const uint last = uint(min(sizes.start + sizes.tokens - block * kWidth, long(kWidth)));
  for (uint t = simd; t < kWidth; t += kSimds) {
    uint code[kPerLane];
    for (uint k = 0; k < kPerLane; ++k) {
      code[k] = 0;
    }
    if (t >= first && t < last) {
      const long token = block * kWidth + t;
      load_vector(v, x + (token - sizes.start) * sizes.x[2], centre, balance, sizes, lane);
      const half s = quantise_vector(v, rotation, level, sizes.rule, code, lane);
      if (lane == 0) {
        scale[token] = s;
      }
    }
    for (uint k = 0; k < kPerLane; ++k) {
      if (lane + k * kWidth < kDim) {
        codes[t * kDim + lane + k * kWidth] = uchar(code[k]);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint kept = (1u << first) - 1;  // bits of tokens before start
  sign += batch * sizes.sign[0] + head * sizes.sign[1] + block * sizes.sign[2];
  mag += batch * sizes.mag[0] + head * sizes.mag[1] + block * sizes.mag[2];
  for (uint i = index; i < kDim; i += kThreads) {
    for (uint p = 0; p < kBits; ++p) {
      uint word = 0;
      for (uint t = 0; t < kWidth; ++t) {
        word |= ((uint(codes[t * kDim + i]) >> p) & 1u) << t;
      }
      device uint* target = p == kPlanes ? sign + i : mag + p * sizes.mag[3] + i;
      *target = (first ? *target & kept : 0u) | word;
    }
  }
}
