// What attend, qk and pv share: sizes, how the work is cut, scratch, and the order of the phases.
//
// A task is (b, h, block of up to 32 rows, split of the tokens). A split is 1,024 tokens, doubled until there are at
// most 1,024 tasks or one split: enough tasks for every core. A call with more than 16,384 rows (a long prompt on a
// packed cache) is done in parts, which bounds the scratch. Only shapes decide, so results do not depend on the number
// of threads.
#include "checks.h"

namespace kvq {

namespace {
constexpr int64_t SPLIT_LEN = 1024, MAX_TASKS = 1024, MAX_PART_ROWS = 16384;
}

void check_heads(Attention &a, const Tensor &q, const char *name, int64_t heads) {
  a.batch = size_at(q, 0), a.queries = size_at(q, 2), a.heads = heads;
  int64_t query_heads = size_at(q, 1);
  KVQ_CHECK(q.dim() == 4, name, "have 4 dims", text(q));
  KVQ_CHECK(heads > 0 && query_heads % heads == 0, name, "have a multiple of " + std::to_string(heads) + " heads",
            text(q));
  a.group = query_heads / heads;
  KVQ_CHECK(a.length >= 0, "length", "be at least 0", a.length);
  KVQ_CHECK(a.num_sinks >= 0 && a.num_sinks <= a.exact_len, "num_sinks", "be from 0 to the number of exact tokens",
            a.num_sinks);
}

namespace {

// Sizes of the tasks, and their scratch.
void plan(Attention &a, bool prepare) {
  a.rows = a.group * a.queries;
  a.dim_pad = prepare ? (int)round_up(a.dim, TILE) : 0, a.value_pad = (int)round_up(a.value_dim, TILE);
  a.row_block = a.rows < TILE ? a.rows : TILE, a.row_blocks = ceil_div(a.rows, a.row_block);
  int64_t longest = a.length > a.exact_len ? a.length : a.exact_len, blocks = a.batch * a.heads * a.row_blocks;
  a.split_len = SPLIT_LEN;
  while (a.split_len < longest && blocks * ceil_div(longest, a.split_len) > MAX_TASKS) a.split_len *= 2;
  a.packed_splits = ceil_div(a.length, a.split_len), a.exact_splits = ceil_div(a.exact_len, a.split_len);
  int64_t flat = round_up(a.batch * a.heads * a.rows, TILE), tasks = blocks * (a.packed_splits + a.exact_splits);
  int64_t sizes[5] = {flat * a.dim_pad, flat * a.dim_pad, flat, tasks * a.row_block * a.value_pad,
                      tasks * a.row_block * 2};
  float **parts[5] = {&a.query, &a.rotated, &a.bias, &a.partial, &a.state};
  int64_t total = 0;
  for (int64_t &size : sizes) total += size = round_up(size, 16);
  float *memory = (float *)call_scratch(4 * total + 64);
  for (int i = 0; i < 5; i++) *parts[i] = memory, memory += sizes[i];
}

// The problem of query tokens first .. first + count alone.
Attention part_of(const Attention &a, int64_t first, int64_t count) {
  Attention part = a;
  part.queries = count;
  for (Dense *x : {&part.q, &part.p, &part.out})
    if (x->data) x->data += first * x->stride[2] * (x->dtype == FLOAT32 ? 4 : 2);
  if (a.lse) part.lse += first * a.lse_stride[2];
  if (a.mask.data) part.mask.data = (const char *)a.mask.data + first * a.mask.stride[2] * (a.mask.boolean ? 1 : 4);
  return part;
}

}  // namespace

void run_phases(const Kernels &k, const Attention &a, bool prepare, void (*task)(const Attention &, int64_t, char *),
                bool finish) {
  int64_t heads = a.batch * a.heads * a.group;
  if (heads * a.queries == 0) return;
  int64_t step = heads < MAX_PART_ROWS ? MAX_PART_ROWS / heads : 1;
  for (int64_t first = 0; first < a.queries; first += step) {
    Attention part = part_of(a, first, a.queries - first < step ? a.queries - first : step);
    plan(part, prepare);
    int64_t tiles = ceil_div(heads * part.queries, TILE);
    int64_t tasks = part.batch * part.heads * part.row_blocks * (part.packed_splits + part.exact_splits);
    int64_t scratch = scratch_bytes(part.dim_pad > part.value_pad ? part.dim_pad : part.value_pad);
    if (prepare) run_parallel(tiles, scratch, [&](int64_t i, char *memory) { k.prepare(part, i, memory); });
    run_parallel(tasks, scratch, [&](int64_t i, char *memory) { task(part, i, memory); });
    if (finish) run_parallel(tiles, scratch, [&](int64_t i, char *memory) { k.finish(part, i, memory); });
  }
}

}  // namespace kvq
