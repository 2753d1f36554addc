// sign_top_p_select in one launch, first part: how the work is cut, and the scores of a segment.
//
// An item is a kv head of a sequence, with four rows at most. Its tokens are cut into segments, one a block of threads,
// which keeps their scores in shared memory until it has written its part of the selection. Blocks of one item tell
// each other what they know. Where there are few and all run at once they are a cluster (sparse_item_share.cuh). Else
// they add up what they know in memory and wait for each other. They are in the grid one after another, an item's are
// no more than a quarter of what the device can hold at once, and they wait for none of a later item, so that those
// they wait for run, also while up to three other streams run this kernel.
#pragma once

#include "decode_asm.cuh"
#include "sparse_compact.cuh"
#include "sparse_words_scan.cuh"

namespace kvq {
namespace cuda {

// A multiprocessor is one block's: the fewer there are, the less is added up in memory and waited for, and the more
// tokens have room in a turn of blocks.
constexpr int ITEM_WARPS = 24, ITEM_THREADS = ITEM_WARPS * WARP, ITEM_CTAS = 1;
// Bins of scores from -64 to 64, the ends excluded.
constexpr int FIRST_SMALL = 0x2C00 >> BIN_SHIFT, SMALL_BINS = (0xD400 >> BIN_SHIFT) - FIRST_SMALL;
constexpr int WARP_UNITS = PART + WARP, STAGED_BYTES = ITEM_WARPS * WARP_UNITS * 16,  // signs, floats
    CELL_BYTES = SCAN_ROWS * SMALL_BINS * 4;

using Mass = unsigned long long;

constexpr int AT_ONCE = 4;           // streams that may run this kernel at the same time
constexpr int MAX_ITEM_CLUSTER = 8;  // what every device with clusters has

struct ItemNotes {
  RowCut cuts[SCAN_ROWS];
  float least[SCAN_ROWS];  // scores from here on are kept
  float exact[SCAN_ROWS];  // log-sum-exp
  int sums[ITEM_WARPS], large[SCAN_ROWS];
  int selected[MAX_ITEM_CLUSTER];  // by each block of the cluster
  uint32_t own_tops[SCAN_ROWS],
      tops[SCAN_ROWS];  // largest scores of rows with large ones, of this block and of the item
};

constexpr int NOTE_BYTES = (sizeof(ItemNotes) + 15) / 16 * 16;

// From row to row of scores, in halves; free of bank conflicts.
__host__ __device__ constexpr int pitch_of(int parts) { return parts * PART + 16; }

// Shared memory of a block of threads that has the scores of as many parts of 64 tokens.
constexpr int item_bytes(int parts) { return STAGED_BYTES + CELL_BYTES + NOTE_BYTES + SCAN_ROWS * pitch_of(parts) * 2; }

// Parts that fit, where a block may have `most` bytes and a multiprocessor has `all`, 1 KB a block its own.
constexpr int item_parts(int most, int all) {
  int share = all / ITEM_CTAS - 1024, bytes = share < most ? share : most;
  return (bytes - item_bytes(0)) / (SCAN_ROWS * PART * 2);
}
constexpr int MAX_PARTS = item_parts(227 * 1024, 228 * 1024);  // of an sm_90

// What a device can hold of this kernel: blocks of threads at once, and parts in each.
struct ItemRoom {
  int blocks, parts;
};

struct ItemPlan {
  int parts, segment_parts, segments, items, slots;
  bool codes_ahead;    // the kernel ahead codes the queries: nothing is scored before it has ended
  bool all_ahead;      // nothing is read before
  Mass *masses;        // [items, SCAN_ROWS, SMALL_BINS], relative to the peaks of bins and times 1 / unit
  Mass *large_masses;  // [items, SCAN_ROWS, NUM_BINS] of rows with larger scores, relative to no more than the largest
  uint32_t *counts;    // [items, segments, SCAN_ROWS, WARP]: scores of two codes of the bin of the cut, one more each
  uint32_t *tops;      // [items, SCAN_ROWS]: largest scores of such rows, as ordered bits
  uint32_t *large;     // [items]: such rows, as bits
  uint32_t *arrived;   // [items]: of meet_blocks
  uint32_t *ready;     // [items, segments]: one more than the tokens that a segment selects, 0 until they are known

  // As many segments as begin at once, in as few turns as possible.
  ItemPlan(const SignScan &s, const ItemRoom &room) : slots(room.blocks) {
    parts = (int)ceil_div(s.tokens, PART), items = (int)(s.batch * s.heads), segments = 0,
    codes_ahead = all_ahead = false;
    if (room.parts < ITEM_WARPS || slots < 1) return;
    int64_t least = ceil_div(parts, room.parts), turns = ceil_div(items * least, slots), wanted = turns * slots / items;
    if (wanted > slots / AT_ONCE) wanted = slots / AT_ONCE;
    segment_parts = (int)ceil_div(parts, wanted > least ? wanted : least);
    if (segment_parts < ITEM_WARPS) segment_parts = ITEM_WARPS;
    segments = (int)ceil_div(parts, segment_parts);
  }
  bool fits() const { return segments && AT_ONCE * segments <= slots && (int64_t)items * segments < 1 << 30; }
  __device__ float unit() const { return (float)(1 << min(__clz(segment_parts * PART), 22)); }
};

// Which segment a block of threads has; the grid is of segments, kv heads and sequences.
struct SegmentPlace {
  int b, h, item, segment, first, parts;  // first token; parts of this segment
  __device__ __forceinline__ explicit SegmentPlace(const ItemPlan &plan) {
    // opaque, so that nothing of this is kept in registers across the scan
    b = opaque((int)blockIdx.z), h = opaque((int)blockIdx.y), segment = opaque((int)blockIdx.x);
    item = b * (int)gridDim.y + h;
    int part = segment * plan.segment_parts;
    first = part * PART, parts = min(plan.segment_parts, plan.parts - part);
  }
};

// What a block of threads has in shared memory.
struct ItemMemory {
  uint4 *staged;    // until all is scored
  float *masses;    // [SCAN_ROWS, NUM_BINS] afterwards
  uint32_t *cells;  // [SCAN_ROWS, SMALL_BINS] of masses
  ItemNotes *notes;
  __half *scores;  // [SCAN_ROWS, pitch]
  int pitch;

  __device__ __forceinline__ ItemMemory(uint4 *memory, const ItemPlan &plan) {
    staged = memory, masses = (float *)memory, cells = (uint32_t *)((char *)memory + STAGED_BYTES);
    notes = (ItemNotes *)((char *)cells + CELL_BYTES);
    scores = (__half *)((char *)notes + NOTE_BYTES), pitch = pitch_of(plan.segment_parts);
  }
  // Eight scores of a row.
  __device__ __forceinline__ __half *unit_at(int r, int unit) const { return scores + r * pitch + unit * PIECE; }
  // Of the segment, those that are selected: over all that comes before `notes`.
  __device__ __forceinline__ uint16_t *tokens() const { return (uint16_t *)staged; }
  // [SCAN_ROWS, CODES], behind masses.
  __device__ __forceinline__ uint32_t *counts() const { return (uint32_t *)(masses + SCAN_ROWS * NUM_BINS); }
  // Of eight tokens each, which are kept.
  __device__ __forceinline__ uint8_t *kept() const { return (uint8_t *)(counts() + SCAN_ROWS * CODES); }
};
static_assert(MAX_PARTS * PART * 2 <= STAGED_BYTES + CELL_BYTES, "selected tokens follow masses and bits");
static_assert(SCAN_ROWS * (NUM_BINS + CODES) * 4 + MAX_PARTS * PART / PIECE <= STAGED_BYTES, "bits follow counts");

// Which row of the problem row r of an item is.
__device__ __forceinline__ RowPlace row_of_item(const TopP &p, int item, int r) {
  int b = item / (int)p.selection.selections, k = item - b * (int)p.selection.selections;
  int group = (int)p.query_heads / (int)p.selection.selections;
  return RowPlace(b, k * group + r / (int)p.queries, r % (int)p.queries);
}

// Keeps eight scores of a row, of which `count` are tokens, and adds up their masses while all of the lane are small;
// `most`: the largest magnitude.
__device__ __forceinline__ void keep_scores(KeptScores<__half> scores, int count, __half *to, float units,
                                            uint32_t *cells, __half2 &most) {
  auto pair_at = [&](int i) { return *(const __half2 *)&scores.kept[i]; };
  const __half2 small = __float2half2_rn(SMALL_SCORE);
#pragma unroll
  for (int i = 0; i < PIECE / 2; i++) {
    __half2 pair = without_minus_zero(pair_at(i));
    scores.kept[i] = *(uint32_t *)&pair;
  }
  if (count >= PIECE) {
#pragma unroll
    for (int i = 0; i < PIECE / 2; i++) most = __hmax2_nan(most, __habs2(pair_at(i)));
    *(uint4 *)to = make_uint4(scores.kept[0], scores.kept[1], scores.kept[2], scores.kept[3]);
    if (__hblt2(most, small)) add_small<true>(pair_at, PIECE, units, cells);
    return;
  }
#pragma unroll
  for (int i = 0; i < PIECE / 2; i++) {
    uint32_t there = 2 * i + 1 < count ? ~0u : 2 * i < count ? 0xffff : 0, pair = scores.kept[i] & there;
    most = __hmax2_nan(most, __habs2(*(const __half2 *)&pair));
    scores.kept[i] = pair | (~there & 0xfc00fc00u);  // -inf is never kept
  }
  *(uint4 *)to = make_uint4(scores.kept[0], scores.kept[1], scores.kept[2], scores.kept[3]);
  if (__hblt2(most, small)) add_small<false>(pair_at, count, units, cells);
}

// What a lane brings of the parts of a head, one after another, the next while one is scored: signs of two tokens,
// which are copied, and factors or biases of four, which it makes floats for all lanes. Signs of tokens follow each
// other.
struct PartSource {
  const uint32_t *signs;
  const uint16_t *halves;
  unsigned long long loaded;  // four halves
  int slot;
  bool plain;  // whole parts are copied and loaded with few instructions

  __device__ __forceinline__ PartSource(const SignScan &s, const ScanPlace &at, int lane) : loaded(0) {
    const SignIndex &x = s.index;
    const uint16_t *factors = x.factor + at.b * x.factor_stride[0] + at.h * x.factor_stride[1],
                   *biases = x.bias + at.b * x.bias_stride[0] + at.h * x.bias_stride[1];
    int64_t first = s.start + at.first;
    signs = x.sign + at.b * x.sign_stride[0] + at.h * x.sign_stride[1] + (first + lane) * 4;
    halves = (lane < WARP / 2 || !x.bias ? factors : biases) + first + lane % (WARP / 2) * 4;
    slot = opaque(slot_of(lane)), plain = (uintptr_t)halves % 8 == 0;
  }
  __device__ __forceinline__ void step() { signs += 4 * PART, halves += PART; }
  __device__ __forceinline__ void bring_all(uint4 *to) {
    copy_once(to + slot, signs);
    copy_once(to + (slot ^ 4) + WARP, signs + 4 * WARP);
    loaded = fresh_once(halves);
  }
  // The first `count` of a part.
  __device__ __forceinline__ void bring(uint4 *to, int count, int lane) {
    if (count >= PART && plain) return bring_all(to);
    if (lane < count) copy_async<16>(to + slot, signs);
    if (lane + WARP < count) copy_async<16>(to + (slot ^ 4) + WARP, signs + 4 * WARP);
    loaded = 0;
#pragma unroll 1
    for (int i = min(count - lane % (WARP / 2) * 4, 4) - 1; i >= 0; i--) loaded = loaded << 16 | fresh(halves + i);
  }
  __device__ __forceinline__ void store(float4 *to, const SignScan &s, int lane) const {
    float by = lane < WARP / 2 ? 1 : s.scale;
    float2 x = floats_of_pair<__half>((uint32_t)loaded), y = floats_of_pair<__half>((uint32_t)(loaded >> 32));
    if (lane < WARP / 2 || s.index.bias)
      to[lane] = make_float4(__fmul_rn(x.x, by), __fmul_rn(x.y, by), __fmul_rn(y.x, by), __fmul_rn(y.y, by));
  }
};

// Factors, and behind them scaled biases, of a part.
struct FloatScaling {
  const float4 *at;  // of the lane's first token
  __device__ __forceinline__ float2 two(const float4 *from, int i) const {
    float4 x = from[i / 2];
    return i % 2 ? make_float2(x.z, x.w) : make_float2(x.x, x.y);
  }
  __device__ __forceinline__ float2 factors(int i) const { return two(at, i); }
  __device__ __forceinline__ float2 biases(int i) const { return two(at + WARP / 2, i); }
};

// By all threads of a block, of which this is number t: no masses and no large scores.
__device__ __forceinline__ void clear_cells(const ItemMemory &m, int t) {
  for (int i = t; i < CELL_BYTES / 16; i += ITEM_THREADS) ((uint4 *)m.cells)[i] = make_uint4(0, 0, 0, 0);
  if (t < SCAN_ROWS) m.notes->large[t] = 0, m.notes->own_tops[t] = 0;
  __syncthreads();
}

// The log-sum-exp of the exact tokens of row r of an item.
__device__ __forceinline__ float load_exact(const SignScan &s, const TopP &p, const ScanPlace &at, int r) {
  int rows = (int)(s.group * s.queries), head = r, m = 0;
  if (s.queries > 1) head = r / (int)s.queries, m = r - head * (int)s.queries;
  const float *from = p.exact_lse + at.b * p.lse_stride[0] + (at.h * s.group + head) * p.lse_stride[1];
  return r < rows ? fresh(from + m * p.lse_stride[2]) : 0;
}

// Scores of a segment and the masses of their bins, and what is known of the exact tokens. Signs of tokens follow each
// other.
__device__ __forceinline__ void scan_segment(const SignScan &s, const TopP &p, const ItemPlan &plan,
                                             const ItemMemory &m) {
  int lane = lane_id(), warp = warp_id(), g = lane >> 2, c = lane & 3, thread = warp * WARP + lane;
  SegmentPlace block(plan);
  int part = block.parts * warp / ITEM_WARPS, left = block.parts * (warp + 1) / ITEM_WARPS - part;
  uint4 *staged = m.staged + warp * WARP_UNITS;
  float4 *floats = (float4 *)(staged + PART);
  floats[lane] = make_float4(0, 0, 0, 0);
  uint32_t *own = m.cells + c * SMALL_BINS - FIRST_SMALL;
  ScanPlace at(block.b, block.h, block.first + part * PART);
  PartSource source(s, at, lane);
  int to = c * m.pitch + 8 * g + part * PART;
  auto tokens_left = [&] {  // rarely needed
    int first = opaque((int)blockIdx.x) * plan.segment_parts * PART;
    return (int)s.tokens - first - (to - (lane_id() & 3) * m.pitch - 8 * (lane_id() >> 2));
  };
  if (plan.all_ahead) wait_for_kernels_ahead();
  if (left > 0) source.bring(staged, tokens_left(), lane);
  close_copies();
  clear_cells(m, thread);  // while the first copies are under way
  if (plan.codes_ahead) wait_for_kernels_ahead();
  float exact = load_exact(s, p, at, thread);
  ScanQueries<__half> queries(s, at, lane);
  if (thread < SCAN_ROWS) m.notes->exact[thread] = exact;
  bool used = c < opaque((int)(s.group * s.queries));
  float units = least_numbers(plan.unit());
  const int slot = opaque(first_slot(lane)),
            plain = source.plain ? 2 : INT32_MAX;  // with more parts left, the next is whole
  __half2 most = __half2half2(__ushort_as_half(0));
#pragma unroll 1
  for (; left > 0; left--) {
    source.store(floats, s, lane);
    wait_copy_groups<0>();
    __syncwarp();
    SignWords words(staged, slot);
    __syncwarp();  // before the copies of the next part
    if (left > 1) {
      source.step();
      if (left > plain)
        source.bring_all(staged);
      else
        source.bring(staged, tokens_left() - PART, lane);
    }
    close_copies();
    KeptScores<__half> scores;
    score_words(scores, queries, s, words, FloatScaling{floats + 2 * g});
    int there = left > 1 ? PIECE : tokens_left() - 8 * g;
    if (used) keep_scores(scores, there, m.scores + to, units, own, most);
    to += PART;
    __syncwarp();  // before the floats of the next part
  }
  if (!__hblt2(most, __float2half2_rn(SMALL_SCORE))) m.notes->large[c] = 1;
}

}  // namespace cuda
}  // namespace kvq
