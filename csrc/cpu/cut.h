// How attend, qk and pv are cut into tasks. No torch.
//
// A task is (b, h, block of up to 32 rows, split of the tokens). A split is 1,024 tokens, doubled until there are at
// most 1,024 tasks or one split: enough tasks for every core. Only shapes decide, so results do not depend on the number
// of threads.
#pragma once

#include "kernels.h"

namespace kvq {

constexpr int64_t SPLIT_LEN = 1024, MAX_TASKS = 1024;

// Rows of a task: up to 32; where a task has one query head, a divisor of the number of its tokens.
static inline int64_t row_block_of(const Attention &a) {
  if (!a.by_head) return a.rows < TILE ? a.rows : TILE;
  int64_t block = a.queries < TILE ? a.queries : TILE;
  while (a.queries % block) block--;
  return block;
}

// Sets the sizes of the tasks, from those of the problem.
static inline void cut(Attention &a, bool prepare) {
  a.rows = a.group * a.queries;
  a.dim_pad = prepare ? (int)round_up(a.dim, TILE) : 0, a.value_pad = (int)round_up(a.value_dim, TILE);
  a.row_block = row_block_of(a), a.row_blocks = ceil_div(a.rows, a.row_block);
  int64_t longest = a.length > a.exact_len ? a.length : a.exact_len, blocks = a.batch * a.heads * a.row_blocks;
  a.split_len = SPLIT_LEN;
  while (a.split_len < longest && blocks * ceil_div(longest, a.split_len) > MAX_TASKS) a.split_len *= 2;
  a.packed_splits = ceil_div(a.length, a.split_len), a.exact_splits = ceil_div(a.exact_len, a.split_len);
}

static inline int64_t num_tasks(const Attention &a) {
  return a.batch * a.heads * a.row_blocks * (a.packed_splits + a.exact_splits);
}

// Points the scratch of a cut call into `memory`, if that is not null; returns how many floats it takes.
static inline int64_t place_scratch(Attention &a, float *memory) {
  int64_t flat = round_up(a.batch * a.heads * a.rows, TILE), tasks = num_tasks(a), total = 0;
  int64_t sizes[5] = {flat * a.dim_pad, flat * a.dim_pad, flat, tasks * a.row_block * a.value_pad,
                      tasks * a.row_block * 2};
  float **parts[5] = {&a.query, &a.rotated, &a.bias, &a.partial, &a.state};
  for (int i = 0; i < 5; i++) {
    if (memory) *parts[i] = memory + total;
    total += round_up(sizes[i], 16);
  }
  return total;
}

}  // namespace kvq
