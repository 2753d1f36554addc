// How a problem is cut: the kernel, blocks of rows, splits of the tokens, parts of a long call, and its scratch.
#include "tiles.h"

namespace kvq {
namespace cuda {
namespace tiles {

namespace {

constexpr int64_t SCRATCH_BYTES = 512 << 20, MIN_SPLIT_TILES = 4, MANY_WAVES = 8, MIN_KIND_QUERIES = 16;
constexpr double GOOD_SHARE = 0.9;

bool gapless(const Store &s, int64_t unit_words) {
  bool good = (uintptr_t)s.sign % 16 == 0 && (uintptr_t)s.mag % 16 == 0 && s.sign_stride[2] == unit_words &&
              s.mag_stride[2] == unit_words * (s.bits - 1) && s.mag_stride[3] == unit_words;
  for (int i = 0; i < 2; i++) good = good && s.sign_stride[i] % 4 == 0 && s.mag_stride[i] % 4 == 0;
  return good;
}

bool in_quads(const Dense &x) {
  bool good = (uintptr_t)x.data % (x.dtype == FLOAT32 ? 16 : 8) == 0;
  for (int64_t stride : x.stride) good = good && stride % 4 == 0;
  return good;
}

// Splits of `tiles` tiles for `blocks` blocks of rows on `slots` places: the fewest that keep 9 of 10 places busy.
int64_t num_splits(int64_t blocks, int64_t tiles, int64_t slots, int64_t most) {
  if (most > ceil_div(tiles, MIN_SPLIT_TILES)) most = ceil_div(tiles, MIN_SPLIT_TILES);
  int64_t best = 1;
  double best_share = 0;
  for (int64_t splits = 1; splits <= most; splits++) {
    int64_t tasks = blocks * splits;
    double share = (double)tasks / (ceil_div(tasks, slots) * slots);
    if (share > best_share) best = splits, best_share = share;
    if (best_share >= GOOD_SHARE || tasks >= MANY_WAVES * slots) break;
  }
  return best;
}

const Kernels &kernels_for(const Attention &a, Mode mode) {
  int width = a.shared ? (int)round_up(a.dim, WORD_BITS) : a.value_dim;
  if (mode == SCORES) return score_kernels;
  if (mode == SUMS) return width <= 128 ? sum_kernels_128 : sum_kernels_512;
  bool precise = a.q.dtype == FLOAT32;
  if (a.exact_len) precise |= a.exact_keys.dtype == FLOAT32 || (!a.shared && a.exact_values.dtype == FLOAT32);
  if (precise) return width <= 128 ? precise_kernels_128 : precise_kernels_512;
  return width <= 64    ? attend_kernels_64
         : width <= 128 ? attend_kernels_128
         : width <= 256 ? attend_kernels_256
                        : attend_kernels_512;
}

template <class T>
void take(T *&part, int64_t count, int64_t &offset, char *memory) {
  part = (T *)(memory + offset);
  offset += round_up(count * (int64_t)sizeof(T), 256);
}

}  // namespace

Plan make_plan(const Attention &attention, const Kernel &kernel, Mode mode, int multiprocessors) {
  Plan plan{};
  plan.a = attention;
  Attention &a = plan.a;
  plan.precise = kernel.precise, plan.two_by_cap = 2 / a.softcap;
  plan.query_pad = (int)round_up(a.dim, WORD_BITS), plan.tile_len = kernel.tile_len;
  a.rows = a.group * a.queries, a.row_block = a.rows < kernel.rows ? a.rows : kernel.rows;
  a.row_blocks = ceil_div(a.rows, a.row_block), a.value_pad = a.value_dim;
  plan.packed_tiles = (int)ceil_div(a.length, plan.tile_len);
  plan.num_tiles = plan.packed_tiles + (int)ceil_div(a.exact_len, plan.tile_len);
  int64_t packed = a.start < a.length ? plan.packed_tiles - a.start / plan.tile_len : 0;
  int64_t exact = plan.num_tiles - plan.packed_tiles, tiles = packed > exact ? packed : exact;
  int64_t blocks = a.batch * a.heads * a.row_blocks, block_bytes = 4 * a.row_block * (a.value_dim + 2);
  int64_t most = SCRATCH_BYTES / 4 / (blocks * block_bytes);
  plan.split_tiles = 1;
  if (tiles) {
    int64_t splits = num_splits(blocks, tiles, (int64_t)multiprocessors * kernel.blocks, most > 1 ? most : 1);
    plan.split_tiles = (int)ceil_div(tiles, splits);
  }
  a.split_len = (int64_t)plan.split_tiles * plan.tile_len;
  a.packed_splits = ceil_div(packed, plan.split_tiles), a.exact_splits = ceil_div(exact, plan.split_tiles);
  const Store &keys = a.keys, &values = a.values;
  plan.gapless_keys = mode != SUMS && gapless(keys, plan.query_pad / WORD_BITS);
  plan.gapless_values = mode != SCORES && !a.shared && gapless(values, a.value_dim);
  plan.quads_keys = in_quads(a.exact_keys), plan.quads_values = in_quads(a.exact_values);
  if (mode == ATTEND && a.mask.data && a.queries >= MIN_KIND_QUERIES && tiles) {
    plan.mask_batches = a.mask.stride[0] ? (int)a.batch : 1;
    plan.mask_heads = a.mask.stride[1] ? (int)(a.heads * a.group) : 1;
    plan.mask_blocks = (int)ceil_div(a.queries, MASK_QUERIES);
  }
  return plan;
}

const Kernel &choose_kernel(const Attention &a, Mode mode, int multiprocessors, int shared_bytes) {
  const Kernels &kernels = kernels_for(a, mode);
  int i = 0;
  while (i + 1 < kernels.count && kernels.first[i].rows < a.rows) i++;
  while (i > 0 && kernels.first[i].shared_bytes(make_plan(a, kernels.first[i], mode, multiprocessors)) > shared_bytes)
    i--;
  return kernels.first[i];
}

int64_t place_scratch(Plan &plan, Mode mode, char *memory) {
  Attention &a = plan.a;
  int64_t flat = a.batch * a.heads * a.rows, bytes = 0, halves = flat * plan.query_pad;
  char *low = nullptr;
  bool rotated = mode != SUMS && a.packed_splits, plain = mode != SUMS && a.exact_splits;
  if (rotated) {
    take(plan.rotated, halves, bytes, memory);
    take(low, plan.precise ? 2 * halves : halves, bytes, memory);
    plan.rotated_low = low;
  }
  if (plain) {
    take(plan.plain, halves, bytes, memory);
    if (plan.precise) {
      take(low, 2 * halves, bytes, memory);
      plan.plain_low = low;
    }
  }
  if (rotated || plain) take(plan.info, flat, bytes, memory);
  int64_t kinds = (int64_t)plan.mask_batches * plan.mask_heads * plan.mask_blocks * plan.num_tiles;
  if (kinds) take(plan.mask_kinds, kinds, bytes, memory);
  int64_t rows = a.batch * a.heads * a.row_blocks * (a.packed_splits + a.exact_splits) * a.row_block;
  if (mode != SCORES) {
    take(a.partial, rows * a.value_pad, bytes, memory);
    take(a.state, rows * 2, bytes, memory);
  }
  return bytes;
}

int64_t part_queries(const Attention &a, const Kernel &kernel, Mode mode, int multiprocessors) {
  int64_t count = a.queries;
  for (;; count = ceil_div(count, 2)) {
    Plan plan = make_plan(part_of(a, 0, count), kernel, mode, multiprocessors);
    if (count == 1 || place_scratch(plan, mode, nullptr) <= SCRATCH_BYTES) return count;
  }
}

Attention part_of(const Attention &a, int64_t first, int64_t count) {
  Attention part = a;
  part.queries = count, part.rows = a.group * count;
  for (Dense *x : {&part.q, &part.p, &part.out})
    if (x->data) x->data += first * x->stride[2] * (x->dtype == FLOAT32 ? 4 : 2);
  if (a.lse) part.lse += first * a.lse_stride[2];
  if (a.mask.data) part.mask.data = (const char *)a.mask.data + first * a.mask.stride[2] * (a.mask.boolean ? 1 : 4);
  return part;
}

}  // namespace tiles
}  // namespace cuda
}  // namespace kvq
