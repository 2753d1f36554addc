// Rows of a threadgroup: their queries, logits, running softmax, and what a split of the tokens leaves of them. In pv the
// table holds the weights themselves and there is no softmax.
constant constexpr uint kNoTable = 0;
constant constexpr uint kKeep = 1;     // a bool mask: attend where it is true
constant constexpr uint kAdd = 2;      // a float mask: added to the logits
constant constexpr uint kWeights = 3;  // weights of pv

// The first `count` rows of source [.., kPadded] into threadgroup memory, then zeros; all threads call it.
inline void load_rows(threadgroup float* query, device const float* source, long count, uint index) {
  for (uint k = index; k < kRows * kPadded; k += kThreads) {
    query[k] = kTable != kWeights && k / kPadded < count ? source[k] : 0.0f;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// What one token is to a row: its logit, or its weight in pv. `entry`: of the table, for this row and the token's column.
inline float weigh(float score, float softcap, device const Table* entry) {
  if (kTable == kWeights) {
    return float(*entry);
  }
  if (softcap > 0.0f) {
    score = softcap * precise::tanh(score / softcap);
  }
  if (kTable == kKeep) {
    return *entry ? score : -INFINITY;
  }
  return kTable == kAdd ? score + float(*entry) : score;
}

// What a token that is not attended is to a row; also the highest logit before any token.
inline float unreached() {
  return kTable == kWeights ? 0.0f : -INFINITY;
}

// Turns the logit of this lane's token into its weight relative to the highest logit so far, `top`, once that of new tokens
// was `highest`, and adds it to the lane's part of the sum of weights. Returns the factor of what was summed before.
inline float soften(thread float& logit, thread float& top, thread float& sum, float highest) {
  if (kTable == kWeights) {
    sum += logit;
    return 1.0f;
  }
  const float peak = max(top, highest);
  const float offset = peak == -INFINITY ? 0.0f : peak;
  const float factor = precise::exp(top - offset);
  logit = precise::exp(logit - offset);
  sum = sum * factor + logit;
  top = peak;
  return factor;
}

// Nothing seen yet: `count` sums, and the state of every row.
inline void begin_rows(thread float* sum, uint count, thread float* top, thread float* total) {
  for (uint k = 0; k < count; ++k) {
    sum[k] = 0.0f;
  }
  for (uint r = 0; r < kRows; ++r) {
    top[r] = unreached();
    total[r] = 0.0f;
  }
}

// What a split leaves of `count` rows, written by threads each of which owns the coordinates `begin`, `begin + step`, ..:
// sum[k * kRows + r] of its k-th, and the state, of which `total` is the sum of all weights. `first` is the split of the
// first row, `splits` further that of the next.
inline void write_rows(
    device float* sums, device float* state, long first, long splits, long count, thread const float* sum,
    thread const float* top, thread const float* total, uint begin, uint step) {
  for (uint r = 0; r < kRows && r < count; ++r) {
    const long at = first + r * splits;
    for (uint i = begin; i < kValueDim; i += step) {
      sums[at * kValueDim + i] = sum[i / step * kRows + r];
    }
    if (begin == 0) {
      state[2 * at] = top[r];
      state[2 * at + 1] = total[r];
    }
  }
}
