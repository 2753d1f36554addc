// What attend, qk and pv share: scratch, the parts of a long call, and the order of the phases.
#include "cut.h"
#include "run.h"

namespace kvq {

namespace {

// A call with more rows (a long prompt on a packed cache) is done in parts, which bounds the scratch.
constexpr int64_t MAX_PART_ROWS = 16384;

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
    cut(part, prepare);
    place_scratch(part, (float *)call_scratch(4 * place_scratch(part, nullptr) + 64));
    int64_t tiles = ceil_div(heads * part.queries, TILE);
    int64_t scratch = scratch_bytes(part.dim_pad > part.value_pad ? part.dim_pad : part.value_pad);
    if (prepare) run_parallel(tiles, scratch, [&](int64_t i, char *memory) { k.prepare(part, i, memory); });
    run_parallel(num_tasks(part), scratch, [&](int64_t i, char *memory) { task(part, i, memory); });
    if (finish) run_parallel(tiles, scratch, [&](int64_t i, char *memory) { k.finish(part, i, memory); });
  }
}

}  // namespace kvq
