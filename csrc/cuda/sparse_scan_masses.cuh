// sign_top_p_select, first part: sign_scores of four words a token (sparse_words_scan.cuh) that also adds up the masses
// of bins (sparse_mass.cuh), while scores are in registers. A block of threads has a segment of the tokens of four
// rows.
#pragma once

#include "sparse_mass.cuh"
#include "sparse_words_scan.cuh"

namespace kvq {
namespace cuda {

constexpr int SUM_WARPS = 8, SUM_THREADS = SUM_WARPS * WARP, SUM_CTAS = 3, MAX_SEGMENTS = 12;

struct ScanMassPlan {
  ScanPlan scan;
  MassPlan mass;       // tops are 0, or NaN where scores are too large for these masses
  int segment_chunks;  // of every row

  ScanMassPlan(const SignScan &s, int num_multiprocessors) : scan(s, num_multiprocessors, SUM_CTAS), mass{} {
    int items = scan.all / scan.chunks, wanted = SUM_CTAS * num_multiprocessors / items;
    segment_chunks = (int)ceil_div(scan.chunks, wanted < 1 ? 1 : wanted);
    mass.segments = (int)ceil_div(scan.chunks, segment_chunks);
  }
  unsigned grid() const { return (unsigned)(scan.all / scan.chunks * mass.segments); }
  static int bytes() { return SUM_WARPS * 2 * CHUNK_UNITS * 16 + SCAN_ROWS * NUM_BINS * 4; }
};

// Adds the masses of a lane's first `count` scores to `cells` and their sizes to `most`; the others to a bin of NaN.
__device__ __forceinline__ void add_masses(KeptScores<__half> scores, int count, float units, uint32_t *cells,
                                           __half2 &most) {
#pragma unroll
  for (int i = 0; i < PIECE / 2; i++) {
    uint32_t pair = scores.kept[i];
    if (count < PIECE) {
      uint32_t there = 2 * i + 1 < count ? ~0u : 2 * i < count ? 0xffff : 0;
      pair &= there, scores.kept[i] |= ~there;
    }
    most = __hmax2_nan(most, __habs2(*(const __half2 *)&pair));
  }
  add_small<true>([&](int i) { return without_minus_zero(*(const __half2 *)&scores.kept[i]); }, PIECE, units, cells);
}

__global__ void __launch_bounds__(SUM_THREADS, SUM_CTAS)
    scan_masses(const __grid_constant__ SignScan s, const __grid_constant__ ScanMassPlan plan) {
  extern __shared__ uint4 memory[];
  __shared__ int is_large[SCAN_ROWS];
  int lane = lane_id(), warp = warp_id(), t = threadIdx.x, g = lane >> 2, c = lane & 3;
  uint4 *shared = memory + warp * 2 * CHUNK_UNITS;
  uint32_t *cells = (uint32_t *)(memory + SUM_WARPS * 2 * CHUNK_UNITS), *own = cells + c * NUM_BINS;
  int item = blockIdx.x / plan.mass.segments, start = blockIdx.x % plan.mass.segments * plan.segment_chunks,
      count = min(plan.segment_chunks, plan.scan.chunks - start), chunk = start + count * warp / SUM_WARPS,
      left = start + count * (warp + 1) / SUM_WARPS - chunk;
  for (int i = t; i < SCAN_ROWS * NUM_BINS; i += SUM_THREADS) cells[i] = 0;
  if (t < SCAN_ROWS) is_large[t] = 0;
  clear_biases(s, shared, lane);
  __syncthreads();
  wait_for_kernels_ahead(), let_next_kernel_begin();
  float units = least_numbers((float)(1 << min(__clz(count * CHUNK), 22)));
  ScanPlace at(s, plan.scan, item * plan.scan.chunks + chunk);
  ScanQueries<__half> queries(s, at, lane);
  __half2 most = __half2half2(__ushort_as_half(0));
  ChunkSource source(s, at, lane);
  if (left > 0) source.stage(shared, s, lane);
  close_copies();
  for (int buffer = 0; left > 0; left--, buffer ^= 1) {
    const uint4 *staged = shared + buffer * CHUNK_UNITS;
    if (left > 1) source.step(s), source.stage(shared + (buffer ^ 1) * CHUNK_UNITS, s, lane);
    close_copies();
    wait_copy_groups<1>();
    __syncwarp();
#pragma unroll 1
    for (int part = 0; part < CHUNK; part += PART) {
      int there = (int)s.tokens - at.first - part - 8 * g;
      KeptScores<__half> scores;
      score_part(scores, queries, s, staged + part, first_slot(lane),
                 HalfScaling(staged[FACTORS + part / 8 + g], staged[BIASES + part / 8 + g], s.scale));
      if (!queries.out || there <= 0) continue;
      scores.store(queries.out + part, there);
      add_masses(scores, there, units, own, most);
    }
    __syncwarp();  // before the copies of the chunk after the next
    at.first += CHUNK;
    if (queries.out) queries.out += CHUNK;
  }
  float2 both = __half22float2(most);
  if (!(both.x < SMALL_SCORE && both.y < SMALL_SCORE)) is_large[c] = 1;
  __syncthreads();
  int block = opaque((int)blockIdx.x), segment = block % plan.mass.segments;  // not kept in registers until here
  at = ScanPlace(s, plan.scan, block / plan.mass.segments * plan.scan.chunks);
  float each = 1 / (float)__float_as_uint(units);
  for (int r = 0; r < SCAN_ROWS && at.first_row + r < s.group * s.queries; r++) {
    int row = at.first_row + r, head = row / (int)s.queries, m = row - head * (int)s.queries;
    int64_t flat = ((at.b * s.heads + at.h) * s.group + head) * s.queries + m, to = flat * plan.mass.segments + segment;
    for (int i = t; i < NUM_BINS; i += SUM_THREADS)
      plan.mass.masses[to * NUM_BINS + i] =
          !is_bin_of_numbers(i) ? 0 : relative_mass(cells[r * NUM_BINS + i], peak_of(i), 0, each);
    if (t == 0) plan.mass.tops[to] = is_large[r] ? NAN : 0;
  }
}

}  // namespace cuda
}  // namespace kvq
