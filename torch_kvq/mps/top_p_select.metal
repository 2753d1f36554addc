// Selects columns by their share of exp(score), without sorting: find_cuts finds the cut of each row bit by bit, in an order
// of integers; mark_columns gives every column the code of its largest share in the rows of a selection, 0 if none keeps it;
// write_selection writes down the columns that have a code, the largest if there is no room for all.
//
// A sum runs over threads and columns in one order, whatever the cut, so that fewer columns never have more mass.
constant constexpr uint kKeep = 1;  // a bool mask: may be selected where it is true
constant constexpr uint kAdd = 2;   // a float mask: added
constant constexpr uint kTopBit = 1u << 31;
constant constexpr float kLeast = -3.402823466e38f;

struct Sizes {
  long heads, queries, columns, mask_columns, selections, capacity, has_candidates;  // heads: Hq
  long scores[3], exact_lse[3], table[4], candidates[2], indices[2], count[2];       // strides
};

// Where the scores of a row and what hides them lie.
struct Row {
  device const In* scores;
  device const Table* table;
  device const uint* candidates;
};

inline Row row_of(
    device const In* scores, device const Table* table, device const uint* candidates, constant Sizes& sizes, long batch,
    long head, long query) {
  const long selection = head / (sizes.heads / sizes.selections);
  return {scores + batch * sizes.scores[0] + head * sizes.scores[1] + query * sizes.scores[2],
          table + batch * sizes.table[0] + head * sizes.table[1] + query * sizes.table[2],
          candidates + batch * sizes.candidates[0] + selection * sizes.candidates[1]};
}

// The score that counts: -inf where it is hidden.
inline float score_at(thread const Row& row, constant Sizes& sizes, long column) {
  float score = float(row.scores[column]);
  if (kTable != 0) {
    const long token = sizes.has_candidates ? long(int(row.candidates[column])) : column;
    const Table entry = row.table[clamp(token, long(0), sizes.mask_columns - 1) * sizes.table[3]];
    score = kTable == kAdd ? score + float(entry) : entry ? score : -INFINITY;
  }
  return score;
}

// NaN and +inf are kept and have no share.
inline float known(float score) {
  return score < INFINITY ? score : -INFINITY;
}

// Integers in the order of scores, and back.
inline uint code_of(float score) {
  const uint bits = as_type<uint>(score);
  return bits & kTopBit ? ~bits : bits | kTopBit;
}

inline float score_of(uint code) {
  return as_type<float>(code & kTopBit ? code ^ kTopBit : ~code);
}

// The sum over a threadgroup, in all of its threads.
template <typename T>
inline T group_sum(threadgroup T* parts, T x, uint simd, uint lane) {
  x = simd_sum(x);
  if (lane == 0) {
    parts[simd] = x;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  x = (parts[0] + parts[1]) + (parts[2] + parts[3]);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return x;
}

inline float group_max(threadgroup float* parts, float x, uint simd, uint lane) {
  x = simd_max(x);
  if (lane == 0) {
    parts[simd] = x;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  x = max(max(parts[0], parts[1]), max(parts[2], parts[3]));
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return x;
}

// How many threads before this one have `yes`; `all`: how many in the threadgroup.
inline uint count_before(threadgroup uint* parts, bool yes, uint simd, uint lane, thread uint& all) {
  uint before = simd_prefix_exclusive_sum(yes ? 1u : 0u);
  const uint votes = simd_sum(yes ? 1u : 0u);
  if (lane == 0) {
    parts[simd] = votes;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  all = 0;
  for (uint s = 0; s < kSimds; ++s) {
    before += s < simd ? parts[s] : 0;
    all += parts[s];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return before;
}

[[max_total_threads_per_threadgroup(128)]]
kernel void find_cuts(
    device const In* scores [[buffer(0)]],        // [B, Hq, M, L]
    device const float* exact_lse [[buffer(1)]],  // [B, Hq, M]
    device const Table* table [[buffer(2)]],
    device const uint* candidates [[buffer(3)]],  // [B, K, L], if has_candidates
    device float* cuts [[buffer(4)]],  // [B, Hq, M, 3]: least score that is kept, highest score, log of the mass beside it
    constant float& top_p [[buffer(5)]],
    constant Sizes& sizes [[buffer(6)]],
    uint3 group [[threadgroup_position_in_grid]],  // M, Hq, B
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint index [[thread_index_in_threadgroup]]) {
  threadgroup float parts[kSimds];
  const long query = group.x;
  const long head = group.y;
  const long batch = group.z;
  const Row row = row_of(scores, table, candidates, sizes, batch, head, query);
  const float exact = exact_lse[batch * sizes.exact_lse[0] + head * sizes.exact_lse[1] + query * sizes.exact_lse[2]];
  float peak = exact;
  for (long column = index; column < sizes.columns; column += kThreads) {
    peak = max(peak, known(score_at(row, sizes, column)));
  }
  peak = group_max(parts, peak, simd, lane);
  const float offset = peak == -INFINITY ? 0.0f : peak;
  float mass = 0.0f;
  for (long column = index; column < sizes.columns; column += kThreads) {
    mass += precise::exp(known(score_at(row, sizes, column)) - offset);
  }
  const float before = precise::exp(exact - offset);
  const float total = group_sum(parts, mass, simd, lane) + before;
  const bool some = before < top_p * total;
  const float need = top_p * total - before;
  uint code = 0;
  for (uint step = some && top_p < 1.0f ? kTopBit : 0; step > 0; step >>= 1) {
    float above = 0.0f;
    for (long column = index; column < sizes.columns; column += kThreads) {
      const float score = known(score_at(row, sizes, column));
      above += code_of(score) >= (code | step) ? precise::exp(score - offset) : 0.0f;
    }
    code |= group_sum(parts, above, simd, lane) >= need ? step : 0;
  }
  if (index == 0) {
    const float cut = score_of(code);  // NaN if more is needed than there is
    device float* target = cuts + ((batch * sizes.heads + head) * sizes.queries + query) * 3;
    target[0] = some || top_p >= 1.0f ? (cut >= kLeast ? cut : kLeast) : INFINITY;
    target[1] = offset;
    target[2] = precise::log(total);
  }
}

[[max_total_threads_per_threadgroup(128)]]
kernel void mark_columns(
    device const In* scores [[buffer(0)]],
    device const Table* table [[buffer(1)]],
    device const uint* candidates [[buffer(2)]],
    device const float* cuts [[buffer(3)]],
    device uint* codes [[buffer(4)]],  // [B, K, L]
    constant Sizes& sizes [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],  // L / 128, K, B
    uint index [[thread_index_in_threadgroup]]) {
  const long column = long(group.x) * kThreads + index;
  const long batch = group.z;
  if (column >= sizes.columns) {
    return;
  }
  const long members = sizes.heads / sizes.selections;
  bool kept = false;
  float most = -INFINITY;
  for (long head = group.y * members; head < (group.y + 1) * members; ++head) {
    for (long query = 0; query < sizes.queries; ++query) {
      const float score = score_at(row_of(scores, table, candidates, sizes, batch, head, query), sizes, column);
      device const float* cut = cuts + ((batch * sizes.heads + head) * sizes.queries + query) * 3;
      const bool unknown = !(score < INFINITY);
      const float share = unknown ? INFINITY : score > -INFINITY ? (score - cut[1]) - cut[2] : -INFINITY;
      kept = kept || unknown || score >= cut[0];
      most = share > most ? share : most;
    }
  }
  codes[(batch * sizes.selections + group.y) * sizes.columns + column] = kept ? code_of(most == 0.0f ? 0.0f : most) : 0;
}

[[max_total_threads_per_threadgroup(128)]]
kernel void write_selection(
    device const uint* codes [[buffer(0)]],
    device const uint* candidates [[buffer(1)]],
    device uint* indices [[buffer(2)]],  // [B, K, capacity]
    device uint* count [[buffer(3)]],    // [B, K]
    constant Sizes& sizes [[buffer(4)]],
    uint2 group [[threadgroup_position_in_grid]],  // K, B
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint index [[thread_index_in_threadgroup]]) {
  threadgroup uint parts[kSimds];
  const long selection = group.x;
  const long batch = group.y;
  codes += (batch * sizes.selections + selection) * sizes.columns;
  candidates += batch * sizes.candidates[0] + selection * sizes.candidates[1];
  indices += batch * sizes.indices[0] + selection * sizes.indices[1];
  uint mine = 0;
  for (long column = index; column < sizes.columns; column += kThreads) {
    mine += codes[column] > 0 ? 1 : 0;
  }
  const uint capacity = uint(sizes.capacity);
  const uint kept = group_sum(parts, mine, simd, lane);
  // The code of the last column that stays, and how many are above: what the last refused code, least + 1, had found.
  uint least = 0;
  uint above = 0;
  for (uint step = kept > capacity ? kTopBit : 0; step > 0; step >>= 1) {
    mine = 0;
    for (long column = index; column < sizes.columns; column += kThreads) {
      mine += codes[column] >= (least | step) ? 1 : 0;
    }
    const uint found = group_sum(parts, mine, simd, lane);
    least |= found >= capacity ? step : 0;
    above = found >= capacity ? above : found;
  }
  const uint room = kept > capacity ? capacity - above : 0;
  uint written = 0;
  uint ties = 0;
  for (long first = 0; first < sizes.columns; first += kThreads) {
    const long column = first + index;
    const uint code = column < sizes.columns ? codes[column] : 0;
    uint equal = 0;
    uint staying = 0;
    const uint rank = ties + count_before(parts, code == least, simd, lane, equal);
    const bool stays = code > least || (code == least && rank < room);
    const uint place = written + count_before(parts, stays, simd, lane, staying);
    if (stays) {
      indices[place] = sizes.has_candidates ? candidates[column] : uint(column);
    }
    ties += equal;
    written += staying;
  }
  if (index == 0) {
    count[batch * sizes.count[0] + selection * sizes.count[1]] = written;
  }
}
