// Attention over the union of P pieces: outs [P, B, H, M, D] weighted by exp(lses [P, B, H, M]); one thread a coordinate.
struct Sizes {
  long pieces, rows, dim, size[3], outs[4], lses[4], out[3], lse[3];  // rows: B * H * M; outs ..: strides
};

[[max_total_threads_per_threadgroup(128)]]
kernel void merge(
    device const In* outs [[buffer(0)]],
    device const float* lses [[buffer(1)]],
    device Out* out [[buffer(2)]],
    device float* lse [[buffer(3)]],
    constant Sizes& sizes [[buffer(4)]],
    uint2 group [[threadgroup_position_in_grid]],  // dim / 128, rows
    uint index [[thread_index_in_threadgroup]]) {
  const long i = long(group.x) * kThreads + index;
  const long row = group.y;
  if (i >= sizes.dim) {
    return;
  }
  device const float* weights = lses + row_offset(row, sizes.size, sizes.lses + 1);
  float peak = -INFINITY;
  for (long p = 0; p < sizes.pieces; ++p) {
    peak = max(peak, weights[p * sizes.lses[0]]);
  }
  const float offset = peak == -INFINITY ? 0.0f : peak;
  device const In* source = outs + row_offset(row, sizes.size, sizes.outs + 1) + i;
  float sum = 0.0f;
  float total = 0.0f;
  for (long p = 0; p < sizes.pieces; ++p) {
    const float weight = precise::exp(weights[p * sizes.lses[0]] - offset);
    total += weight;
    sum += weight == 0.0f ? 0.0f : weight * float(source[p * sizes.outs[0]]);
  }
  out[row_offset(row, sizes.size, sizes.out) + i] = Out(total == 0.0f ? 0.0f : sum / total);
  if (i == 0) {
    lse[row_offset(row, sizes.size, sizes.lse)] = peak + precise::log(total);
  }
}
