// A tile of packed tokens against rows: what attend_words.metal and attend_dims.metal share. Both leave, for each row and
// split of the tokens, sums [kValueDim] that are neither divided nor rotated back, and a state: highest logit, sum of
// weights. finish.metal puts the splits together. A scores, B softmax and C sum of values of the paper are fused; pv is C
// alone, its weights given by the table.
struct Sizes {
  long heads, group, queries, rows;  // rows: group * queries
  long start, length, num_sinks, first_block, split_blocks, packed_splits, splits;
  long key_sign[3], key_mag[4], key_scale[2], value_sign[3], value_mag[4], value_scale[2], table[4];  // strides
};

// What the threads of a threadgroup read, at its head and its first row.
struct Body {
  device const float* bias;
  device const uint* key_sign;
  device const uint* key_mag;
  device const half* key_scale;
  device const half* value_scale;
  device const Table* table;
};

// Rows of padding read the table and the bias of the last row.
inline long row_at(long first, uint r, constant Sizes& sizes) {
  return min(first + r, sizes.rows - 1);
}

// Logits (weights in pv) of one token for every row.
inline void weigh_token(
    thread const Body& body, constant Sizes& sizes, float softcap, long token, long head, long first,
    threadgroup const float* query, thread const float* level, thread float* x) {
  if (token < sizes.start || token >= sizes.length) {
    for (uint r = 0; r < kRows; ++r) {
      x[r] = unreached();
    }
    return;
  }
  float scale = 0.0f;
  if (kTable != kWeights) {
    score_key(body.key_sign + token * sizes.key_sign[2], body.key_mag + token * sizes.key_mag[2], sizes.key_mag[3], query,
              level, x);
    scale = float(body.key_scale[token]);
  }
  for (uint r = 0; r < kRows; ++r) {
    const long row = row_at(first, r, sizes);
    const long entry = query_offset(0, head, row, sizes.group, sizes.queries, sizes.table);
    const float score = kTable == kWeights ? 0.0f : x[r] * scale + body.bias[row];
    x[r] = weigh(score, softcap, body.table + entry + (sizes.num_sinks + token) * sizes.table[3]);
  }
}

// Scale of the value of a token; that of a token beyond the body may be anything.
inline float value_scale_of(thread const Body& body, constant Sizes& sizes, long token) {
  return token >= sizes.start && token < sizes.length ? float(body.value_scale[token]) : 0.0f;
}
