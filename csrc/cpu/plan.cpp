// What attend, qk and pv share: sizes, how the work is cut, scratch, and the order of the phases.
//
// A task is (b, h, block of up to 32 rows, split of the tokens). A split is 1,024 tokens, doubled until there are at
// most 1,024 tasks or one split: enough tasks for every core, and partial results stay below a hundredth of the dense
// cache. Only shapes decide, so results do not depend on the number of threads.
#include "checks.h"

namespace kvq {

namespace {
constexpr int64_t SPLIT_LEN = 1024, MAX_TASKS = 1024;
}

void check_heads(Attention &a, const Tensor &q, const char *name, int64_t heads) {
  a.batch = size_at(q, 0), a.queries = size_at(q, 2), a.heads = heads;
  int64_t query_heads = size_at(q, 1);
  KVQ_CHECK(q.dim() == 4, name, "have 4 dims", text(q));
  KVQ_CHECK(heads > 0 && query_heads % heads == 0, name, "have a multiple of " + std::to_string(heads) + " heads",
            text(q));
  a.group = query_heads / heads, a.rows = a.group * a.queries;
  KVQ_CHECK(a.length >= 0, "length", "be at least 0", a.length);
  KVQ_CHECK(a.num_sinks >= 0 && a.num_sinks <= a.exact_len, "num_sinks", "be from 0 to the number of exact tokens",
            a.num_sinks);
}

void plan(Attention &a, bool with_queries) {
  a.dim_pad = with_queries ? (int)round_up(a.dim, TILE) : 0, a.value_pad = (int)round_up(a.value_dim, TILE);
  a.row_block = a.rows < TILE ? a.rows : TILE;
  a.row_blocks = a.row_block ? ceil_div(a.rows, a.row_block) : 0;
  int64_t longest = a.length > a.exact_len ? a.length : a.exact_len, blocks = a.batch * a.heads * a.row_blocks;
  a.split_len = SPLIT_LEN;
  while (a.split_len < longest && blocks * ceil_div(longest, a.split_len) > MAX_TASKS) a.split_len *= 2;
  a.packed_splits = ceil_div(a.length, a.split_len), a.exact_splits = ceil_div(a.exact_len, a.split_len);
  int64_t flat = round_up(a.batch * a.heads * a.rows, TILE), tasks = blocks * (a.packed_splits + a.exact_splits);
  int64_t sizes[5] = {flat * a.dim_pad, flat * a.dim_pad, flat, tasks * a.row_block * a.value_pad,
                      tasks * a.row_block * 2},
          total = 0;
  for (int64_t &size : sizes) total += size = round_up(size, 16);
  float *memory = (float *)call_scratch(4 * total + 64),
        **parts[5] = {&a.query, &a.rotated, &a.bias, &a.partial, &a.state};
  for (int i = 0; i < 5; i++) *parts[i] = memory, memory += sizes[i];
}

namespace {
int64_t scratch_of(const Attention &a) { return scratch_bytes(a.dim_pad > a.value_pad ? a.dim_pad : a.value_pad); }
int64_t tiles_of(const Attention &a) { return ceil_div(a.batch * a.heads * a.rows, TILE); }
}  // namespace

void run_prepare(const Attention &a) {
  run_parallel(tiles_of(a), scratch_of(a), [&](int64_t i, char *scratch) { kernels().prepare(a, i, scratch); });
}

void run_tasks(const Attention &a, void (*task)(const Attention &, int64_t, char *)) {
  int64_t tasks = a.batch * a.heads * a.row_blocks * (a.packed_splits + a.exact_splits);
  run_parallel(tasks, scratch_of(a), [&](int64_t i, char *scratch) { task(a, i, scratch); });
}

void run_finish(const Attention &a) {
  run_parallel(tiles_of(a), scratch_of(a), [&](int64_t i, char *scratch) { kernels().finish(a, i, scratch); });
}

}  // namespace kvq
