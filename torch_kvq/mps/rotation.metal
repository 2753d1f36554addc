// R x and R^T x of one vector of kDim coordinates in threadgroup memory, by one simdgroup: R = matrix . blocks . mix ... mix
// (torch_kvq/codecs/rotation.py). A lane owns other coordinates in every step, hence the barrier after each.
constant constexpr uint kPerLane = (kDim + kWidth - 1) / kWidth;
constant constexpr uint kWindows = kPower == kDim ? 1 : 2;  // of a mixing round, kPower coordinates each

struct Rotation {
  device const float* signs;   // [rounds, kDim]
  device const float* blocks;  // [kDim / 4, 4, 4], if has_blocks
  device const float* matrix;  // [kDim, kDim], if has_matrix
  long rounds;
  long has_blocks;
  long has_matrix;
};

// Butterflies over the first kPower coordinates of x, not normalised.
inline void walsh_hadamard(threadgroup float* x, uint lane) {
  for (uint step = 1; step < kPower; step *= 2) {
    for (uint pair = lane; pair < kPower / 2; pair += kWidth) {
      const uint low = 2 * pair - pair % step;
      const float a = x[low];
      const float b = x[low + step];
      x[low] = a + b;
      x[low + step] = a - b;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}

inline void multiply_signs(threadgroup float* x, device const float* sign, uint lane) {
  const float factor = rsqrt(float(kPower));
  for (uint i = lane; i < kPower; i += kWidth) {
    x[i] *= sign[i] * factor;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// One mixing round: signs, then the transform, window by window; backwards if inverse.
inline void mix_round(threadgroup float* x, device const float* sign, bool inverse, uint lane) {
  for (uint n = 0; n < kWindows; ++n) {
    const bool last = kWindows == 2 && (n == 1) != inverse;
    const uint first = last ? kDim - kPower : 0;
    if (inverse) {
      walsh_hadamard(x + first, lane);
      multiply_signs(x + first, sign + first, lane);
    } else {
      multiply_signs(x + first, sign + first, lane);
      walsh_hadamard(x + first, lane);
    }
  }
}

inline void map_blocks(threadgroup float* x, device const float* blocks, bool inverse, uint lane) {
  const uint row = inverse ? 1 : 4;
  const uint column = inverse ? 4 : 1;
  for (uint n = lane; n < kDim / 4; n += kWidth) {
    device const float* m = blocks + 16 * n;
    threadgroup float* v = x + 4 * n;
    const float4 a = float4(v[0], v[1], v[2], v[3]);
    for (uint i = 0; i < 4; ++i) {
      v[i] = a.x * m[i * row] + a.y * m[i * row + column] + a.z * m[i * row + 2 * column] + a.w * m[i * row + 3 * column];
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

inline void multiply_matrix(threadgroup float* x, device const float* matrix, bool inverse, uint lane) {
  float product[kPerLane];
  for (uint k = 0; k < kPerLane; ++k) {
    const uint i = lane + k * kWidth;
    product[k] = 0.0f;
    for (uint j = 0; i < kDim && j < kDim; ++j) {
      product[k] += x[j] * matrix[inverse ? j * kDim + i : i * kDim + j];
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (uint k = 0; k < kPerLane; ++k) {
    if (lane + k * kWidth < kDim) {
      x[lane + k * kWidth] = product[k];
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// In place. All lanes of the simdgroup call it, with x written by any of them before a barrier.
inline void rotate_vector(threadgroup float* x, thread const Rotation& r, bool inverse, uint lane) {
  if (inverse && r.has_matrix) {
    multiply_matrix(x, r.matrix, true, lane);
  }
  if (inverse && r.has_blocks) {
    map_blocks(x, r.blocks, true, lane);
  }
  for (long n = 0; n < r.rounds; ++n) {
    mix_round(x, r.signs + (inverse ? r.rounds - 1 - n : n) * kDim, inverse, lane);
  }
  if (!inverse && r.has_blocks) {
    map_blocks(x, r.blocks, false, lane);
  }
  if (!inverse && r.has_matrix) {
    multiply_matrix(x, r.matrix, false, lane);
  }
}
