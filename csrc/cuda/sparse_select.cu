// top_p_select: two reads of the scores and no sort. Masses of bins, the bin of the cut, marks, the cut within the bin,
// indices: four launches, each of which begins while the last one ends; one more for scores that are not float16 codes,
// and where the capacity may be exceeded. With the scan in one launch, for up to four rows a kv head: sparse_item.cuh.
#include <array>

#include "devices.h"
#include "sparse_item_select.cuh"
#include "sparse_near.h"
#include "sparse_scan_masses.cuh"

namespace kvq {
namespace cuda {

namespace {

struct SelectPlan {
  MassPlan mass, scanned;
  Marks marks;
  RowCut *cuts;
  int64_t rows, heads, bytes;
  int compact_blocks, num_counters;

  static int64_t heads_of(const TopP &p) { return p.batch * p.selection.selections; }
  SelectPlan(const TopP &p, int num_multiprocessors, char *scratch, int scanned_segments = 0) : scanned{} {
    rows = p.batch * p.query_heads * p.queries, heads = heads_of(p), bytes = 0;
    int64_t piece_len = MASS_THREADS * PIECE, least = ceil_div(p.columns, piece_len * MAX_PIECES);
    int64_t wanted = ceil_div(2 * num_multiprocessors, rows), segments = wanted > least ? wanted : least;
    mass.pieces = (int)ceil_div(p.columns, segments * piece_len);
    mass.segments = (int)ceil_div(p.columns, mass.segment_len());
    marks.words = (int)ceil_div(p.columns, 32);
    int64_t units = marks.words * 4, steps = units * heads_of(p) / (2 * num_multiprocessors * MARK_THREADS);
    marks.steps = (int)(steps < 1 ? 1 : steps < MARK_STEPS ? steps : MARK_STEPS);
    auto take = [&](int64_t count, int64_t size) {
      char *at = scratch + bytes;
      bytes += round_up(count * size, 256);
      return at;
    };
    mass.masses = (float *)take(rows * mass.segments * NUM_BINS, 4), mass.tops = (float *)take(rows * mass.segments, 4);
    scanned.segments = scanned_segments;
    scanned.masses = (float *)take(rows * scanned_segments * NUM_BINS, 4);
    scanned.tops = (float *)take(rows * scanned_segments, 4);
    cuts = (RowCut *)take(rows, sizeof(RowCut));
    marks.kept = (uint32_t *)take(heads * marks.words, 4), marks.doubt = (uint32_t *)take(rows * marks.words, 4);
    compact_blocks = (int)ceil_div(marks.words, COMPACT_THREADS);
    num_counters = (int)(rows * CODES + heads * compact_blocks);
    marks.counts = (uint32_t *)take(num_counters, 4), marks.ready = marks.counts + rows * CODES;
  }
};

template <class Score, bool MASKED>
void launch(const TopP &p, const SelectPlan &plan, cudaStream_t stream) {
  unsigned rows = (unsigned)plan.rows, heads = (unsigned)plan.heads;
  unsigned mark_blocks = (unsigned)ceil_div(plan.marks.words * 4, plan.marks.steps * MARK_THREADS);
  launch_behind(bin_masses<Score, MASKED>, dim3(rows * plan.mass.segments), MASS_THREADS, 0, stream, p, plan.mass,
                plan.scanned);
  launch_behind(find_cut, dim3(rows), CUT_THREADS, 0, stream, p, plan.mass, plan.scanned, plan.cuts, plan.marks.counts,
                plan.num_counters);
  launch_behind(mark<Score, MASKED>, dim3(mark_blocks, heads), MARK_THREADS, 0, stream, p, plan.cuts, plan.marks);
  constexpr bool CODES_COUNTED = has_codes<Score, MASKED>();
  if (!CODES_COUNTED) launch_behind(resolve, dim3(rows), RESOLVE_THREADS, 0, stream, p, plan.cuts, plan.marks);
  launch_behind(compact<CODES_COUNTED>, dim3(plan.compact_blocks, heads), COMPACT_THREADS, 0, stream, p, plan.cuts,
                plan.marks);
  if (p.selection.capacity < p.columns)
    launch_behind(cap, dim3(heads), CAP_THREADS, 0, stream, p, plan.cuts, plan.marks);
}

// How many segments of masses a scan should have, 0 if scores are better added up by themselves.
int scan_segments(const SignScan &s, const TopP &p, int num_multiprocessors) {
  if (!in_words(s) || s.out.dtype != FLOAT16 || p.mask.data) return 0;
  int segments = ScanMassPlan(s, num_multiprocessors).mass.segments;
  return segments <= MAX_SEGMENTS ? segments : 0;
}

ItemRoom item_room(int num_multiprocessors) {
  int device = 0, most = 0, all = 0;
  cudaGetDevice(&device), cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  cudaDeviceGetAttribute(&all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  int parts = item_parts(most, all);
  return {num_multiprocessors * ITEM_CTAS, parts < MAX_PARTS ? parts : MAX_PARTS};
}

// Whether the blocks of each of so many items are a cluster, all of them at the same time. One block always is.
bool fit_clusters(int segments, int items) {
  if (segments < 2 || segments > MAX_ITEM_CLUSTER) return segments == 1;
  auto at_once = once_a_device([] {
    std::array<int, MAX_ITEM_CLUSTER + 1> counts{};
    for (int n = 2; n <= MAX_ITEM_CLUSTER; n++)
      counts[n] = count_item_clusters(scan_select<true>, n, ITEM_THREADS, item_bytes(MAX_PARTS));
    return counts;
  });
  return items <= at_once[segments];
}

// Scan and selection in one launch, of what scan_select takes.
struct ItemCall {
  ItemPlan plan;
  Marks marks;
  RowCut *cuts;
  char *cleared;
  int64_t cleared_bytes, bytes;
  bool clusters;

  static bool takes(const SignScan &s, const TopP &p, int num_multiprocessors) {
    return in_words(s) && s.index.sign_stride[2] == 4 && s.out.dtype == FLOAT16 && !p.mask.data &&
           s.group * s.queries <= SCAN_ROWS && p.selection.selections == s.heads &&
           ItemPlan(s, item_room(num_multiprocessors)).fits();
  }
  ItemCall(const SignScan &s, const TopP &p, int num_multiprocessors, char *scratch)
      : plan(s, item_room(num_multiprocessors)), marks{}, cleared_bytes(0), bytes(0) {
    clusters = fit_clusters(plan.segments, plan.items);
    int64_t items = plan.items;
    auto take = [&](int64_t count, int64_t size) {
      char *at = scratch + bytes;
      bytes += round_up(count * size, 256);
      return at;
    };
    cuts = (RowCut *)take(p.batch * p.query_heads * p.queries, sizeof(RowCut));
    marks.words = (int)ceil_div(p.columns, 32), marks.kept = (uint32_t *)take(items * marks.words, 4);
    cleared = scratch + bytes;
    if (clusters) return;
    plan.masses = (Mass *)take(items * SCAN_ROWS * SMALL_BINS, sizeof(Mass));
    plan.counts = (uint32_t *)take(items * plan.segments * SCAN_ROWS * WARP, 4),
    plan.tops = (uint32_t *)take(items * SCAN_ROWS, 4);
    plan.large = (uint32_t *)take(items, 4), plan.arrived = (uint32_t *)take(items, 4);
    plan.ready = (uint32_t *)take(items * plan.segments, 4), cleared_bytes = scratch + bytes - cleared;
    plan.large_masses = (Mass *)take(items * SCAN_ROWS * NUM_BINS, sizeof(Mass));
  }
  // A cluster needs nothing to add up in, but then no kernel ahead has waited for those before it.
  void clear(int num_multiprocessors, cudaStream_t stream) {
    plan.all_ahead = clusters;
    if (clusters) return;
    int64_t units = cleared_bytes / (int64_t)sizeof(uint4), blocks = ceil_div(units, CLEAR_THREADS);
    launch_behind(clear_items, dim3((unsigned)(blocks < num_multiprocessors ? blocks : num_multiprocessors)),
                  CLEAR_THREADS, 0, stream, (uint4 *)cleared, (int)units);
  }
  // Behind `clear` or a kernel that clears and codes the queries.
  void launch(const SignScan &s, const TopP &p, cudaStream_t stream) const {
    launch_clusters_behind(clusters ? scan_select<true> : scan_select<false>,
                           dim3((unsigned)plan.segments, (unsigned)s.heads, (unsigned)s.batch),
                           dim3(clusters ? (unsigned)plan.segments : 1u), ITEM_THREADS, item_bytes(plan.segment_parts),
                           stream, s, p, plan, cuts, marks);
    if (p.selection.capacity < p.columns)
      launch_behind(cap, dim3((unsigned)plan.items), CAP_THREADS, 0, stream, p, cuts, marks);
  }
};

}  // namespace

int64_t top_p_scratch_bytes(const TopP &p, int num_multiprocessors) {
  return SelectPlan(p, num_multiprocessors, nullptr).bytes;
}

void launch_top_p_select(const TopP &p, int num_multiprocessors, void *scratch, cudaStream_t stream) {
  SelectPlan plan(p, num_multiprocessors, (char *)scratch);
  bool half = p.scores.dtype == FLOAT16;
  if (p.mask.data)
    half ? launch<__half, true>(p, plan, stream) : launch<float, true>(p, plan, stream);
  else
    half ? launch<__half, false>(p, plan, stream) : launch<float, false>(p, plan, stream);
}

int64_t sign_top_p_scratch_bytes(const SignScan &s, const TopP &p, int num_multiprocessors) {
  if (ItemCall::takes(s, p, num_multiprocessors)) return ItemCall(s, p, num_multiprocessors, nullptr).bytes;
  return SelectPlan(p, num_multiprocessors, nullptr, scan_segments(s, p, num_multiprocessors)).bytes;
}

void launch_sign_top_p_select(const SignScan &s, const TopP &p, int num_multiprocessors, void *scratch,
                              cudaStream_t stream) {
  if (ItemCall::takes(s, p, num_multiprocessors)) {
    ItemCall item(s, p, num_multiprocessors, (char *)scratch);
    item.clear(num_multiprocessors, stream);
    return item.launch(s, p, stream);
  }
  int segments = scan_segments(s, p, num_multiprocessors);
  if (!segments) {
    launch_sign_scores(s, num_multiprocessors, stream);
    return launch_top_p_select(p, num_multiprocessors, scratch, stream);
  }
  SelectPlan plan(p, num_multiprocessors, (char *)scratch, segments);
  ScanMassPlan scan(s, num_multiprocessors);
  scan.mass.masses = plan.scanned.masses, scan.mass.tops = plan.scanned.tops;
  launch_behind(scan_masses, dim3(scan.grid()), SUM_THREADS, ScanMassPlan::bytes(), stream, s, scan);
  launch<__half, false>(p, plan, stream);
}

bool attend_top_p_select_fits(const QueryCoding &c, const Attention &a, const SignScan &s, const TopP &p,
                              int num_multiprocessors) {
  return near_takes(c, a) && ItemCall::takes(s, p, num_multiprocessors);
}

void launch_attend_top_p_select(const QueryCoding &c, const Attention &a, const SignScan &s, const TopP &p,
                                int num_multiprocessors, void *scratch, cudaStream_t stream) {
  ItemCall item(s, p, num_multiprocessors, (char *)scratch);
  item.plan.codes_ahead = true;
  launch_near(c, a, item.cleared, item.cleared_bytes, stream);
  item.launch(s, p, stream);
}

}  // namespace cuda
}  // namespace kvq
