// top_p_select: two reads of the scores and no sort. Masses of bins, the bin of the cut, marks, the cut within the bin,
// indices: five launches, each of which begins while the last one ends; a sixth for scores that are not float16 codes.
#include "sparse_compact.cuh"

namespace kvq {
namespace cuda {

namespace {

struct SelectPlan {
  MassPlan mass;
  Marks marks;
  RowCut *cuts;
  int64_t rows, heads, bytes;

  static int64_t heads_of(const TopP &p) { return p.batch * p.selection.selections; }
  SelectPlan(const TopP &p, int num_multiprocessors, char *scratch) {
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
    cuts = (RowCut *)take(rows, sizeof(RowCut));
    marks.kept = (uint32_t *)take(heads * marks.words, 4), marks.doubt = (uint32_t *)take(rows * marks.words, 4);
    marks.counts = (uint32_t *)take(rows * CODES, 4);
  }
};

template <class Score, bool MASKED>
void launch(const TopP &p, const SelectPlan &plan, cudaStream_t stream) {
  unsigned rows = (unsigned)plan.rows, heads = (unsigned)plan.heads;
  unsigned mark_blocks = (unsigned)ceil_div(plan.marks.words * 4, plan.marks.steps * MARK_THREADS);
  launch_behind(bin_masses<Score, MASKED>, dim3(rows * plan.mass.segments), MASS_THREADS, 0, stream, p, plan.mass);
  launch_behind(find_cut, dim3(rows), CUT_THREADS, 0, stream, p, plan.mass, plan.cuts, plan.marks.counts);
  launch_behind(mark<Score, MASKED>, dim3(mark_blocks, heads), MARK_THREADS, 0, stream, p, plan.cuts, plan.marks);
  constexpr bool CODES_COUNTED = has_codes<Score, MASKED>();
  if (!CODES_COUNTED)
    launch_behind(resolve, dim3(rows), RESOLVE_THREADS, 0, stream, p, plan.cuts, plan.marks);
  if (CODES_COUNTED || p.selection.capacity < p.columns)
    launch_behind(settle<CODES_COUNTED>, dim3(heads), SETTLE_THREADS, 0, stream, p, plan.cuts, plan.marks);
  dim3 grid((unsigned)ceil_div(plan.marks.words, COMPACT_THREADS), heads);
  launch_behind(compact, grid, COMPACT_THREADS, 0, stream, p, plan.marks);
}

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

}  // namespace cuda
}  // namespace kvq
