// top_p_select, second part: from the cuts of rows to bit masks of the tokens that a selection keeps, 32 columns a
// word.
#pragma once

#include "sparse_mass.cuh"

namespace kvq {
namespace cuda {

constexpr int MARK_THREADS = 256, MARK_STEPS = 4, MARK_ROWS = 4, RESOLVE_THREADS = 1024, COMPACT_THREADS = 256,
              MAX_LISTED = 4096;

static_assert(MARK_ROWS * CODES <= MARK_THREADS, "a thread has one count");

struct Marks {
  uint32_t *kept;    // [B, K, words], of the union of rows
  uint32_t *doubt;   // [rows, words], in the bin of the cut
  uint32_t *counts;  // [rows, CODES] of float16 scores without a mask: how many of these are each code of that bin
  uint32_t *ready;   // [B, K, blocks] of `compact`: one more than the columns that a block has, 0 until they are known
  int words, steps;  // steps: of `mark`, up to MARK_STEPS
};

// Whether scores are float16 codes as they lie in memory, so that those in doubt are counted code by code.
template <class Score, bool MASKED>
constexpr bool has_codes() {
  return sizeof(Score) == 2 && !MASKED;
}

// Place of a float16 score in its bin.
__device__ __forceinline__ uint32_t code_in_bin(float score) {
  uint32_t bits = __half_as_ushort(__float2half_rn(score + 0.0f));
  return (bits & 0x8000 ? ~bits : bits) % CODES;
}

// Which of eight scores are not below `sure`, and which others not below `edge`.
struct PieceMarks {
  uint32_t keep, doubt;

  template <class Score>
  __device__ __forceinline__ PieceMarks(const ScoreRow &scores, const Piece<Score> &piece, bool masked, float sure,
                                        float edge, int first, int count)
      : keep(0), doubt(0) {
#pragma unroll
    for (int i = 0; i < PIECE; i++) {
      float x = float(piece.x[i]);
      if (masked && i < count) x = scores.masked(x, first + i);
      keep |= (uint32_t)!(x < sure) << i, doubt |= (uint32_t)(x >= edge) << i;
    }
    within(count);
  }
  // Of float16 codes, in pairs. No finite score is below the least one.
  __device__ __forceinline__ PieceMarks(const Piece<__half> &piece, float sure, float edge, int count) {
    const float least = -65504;
    keep = bits_of(piece, [pair = __float2half2_rn(fmaxf(sure, least))](__half2 x) { return __hgeu2_mask(x, pair); });
    doubt = bits_of(piece, [pair = __float2half2_rn(fmaxf(edge, least))](__half2 x) { return __hge2_mask(x, pair); });
    within(count);
  }
  template <class Test>
  static __device__ __forceinline__ uint32_t bits_of(const Piece<__half> &piece, Test test) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < PIECE; i += 2) bits |= test(__halves2half2(piece.x[i], piece.x[i + 1])) & 0x20001u << i;
    return (bits | bits >> 16) & 0xff;
  }
  __device__ __forceinline__ void within(int count) {
    uint32_t there = count < PIECE ? (1u << max(count, 0)) - 1 : 0xff;
    keep &= there, doubt &= there & ~keep;
  }
};

// A thread has eight columns a step, a byte of each mask, of some rows at a time.
template <class Score, bool MASKED>
__global__ void __launch_bounds__(MARK_THREADS, has_codes<Score, MASKED>() ? 5 : 4)
    mark(const __grid_constant__ TopP p, const RowCut *cuts, const __grid_constant__ Marks marks) {
  __shared__ uint32_t cells[MARK_ROWS][CODES];
  SelectionRows selection(p, blockIdx.y);
  int t = threadIdx.x, columns = (int)p.columns;
  auto unit_of = [&](int step) { return ((int)blockIdx.x * marks.steps + step) * MARK_THREADS + t; };
  uint32_t kept = 0;
  wait_for_kernels_ahead(), let_next_kernel_begin();
  for (int from = 0; from < selection.count(); from += MARK_ROWS) {
    const Score *scores[MARK_ROWS];
    uint8_t *doubts[MARK_ROWS];
    float sure[MARK_ROWS], edge[MARK_ROWS];
#pragma unroll
    for (int r = 0; r < MARK_ROWS; r++) {  // the last row again where there are no more
      RowPlace row = selection.row(min(from + r, selection.count() - 1));
      int64_t flat = row.flat(p);
      scores[r] = (const Score *)ScoreRow(p, row).scores, doubts[r] = (uint8_t *)(marks.doubt + flat * marks.words);
      sure[r] = cuts[flat].sure, edge[r] = cuts[flat].edge;
    }
    if (t < MARK_ROWS * CODES) cells[t / CODES][t % CODES] = 0;
    __syncthreads();
#pragma unroll 1
    for (int step = 0; step < marks.steps; step++) {
      int unit = unit_of(step), first = unit * PIECE, count = columns - first;
      if (unit < marks.words * 4) {
        __align__(16) Piece<Score> pieces[MARK_ROWS];
        uint32_t doubt = 0;  // a byte a row
#pragma unroll
        for (int r = 0; r < MARK_ROWS; r++) pieces[r].load(scores[r] + first, count);
#pragma unroll
        for (int r = 0; r < MARK_ROWS; r++) {
          if (from + r >= selection.count()) break;
          auto marked = [&] {
            if constexpr (has_codes<Score, MASKED>())
              return PieceMarks(pieces[r], sure[r], edge[r], count);
            else
              return PieceMarks(ScoreRow(p, selection.row(from + r)), pieces[r], MASKED, sure[r], edge[r], first,
                                count);
          }();
          kept |= marked.keep << (8 * step), doubts[r][unit] = (uint8_t)marked.doubt;
          doubt |= marked.doubt << (8 * r);
        }
        if (has_codes<Score, MASKED>())
          for (; doubt; doubt &= doubt - 1) {
            int place = __ffs((int)doubt) - 1, r = place / 8;
            const Score *of_row = r < 2 ? r < 1 ? scores[0] : scores[1] : r < 3 ? scores[2] : scores[3];
            atomicAdd(&cells[r][code_in_bin(float(of_row[first + place % 8]))], 1u);
          }
      }
      __syncwarp();  // else lanes with many in doubt go on alone to the end
    }
    __syncthreads();
    int row = from + t / CODES;
    if (has_codes<Score, MASKED>() && t < MARK_ROWS * CODES && row < selection.count() && cells[t / CODES][t % CODES])
      atomicAdd(&marks.counts[(int64_t)selection.row(row).flat(p) * CODES + t % CODES], cells[t / CODES][t % CODES]);
    __syncthreads();
  }
  uint8_t *to = (uint8_t *)(marks.kept + (int64_t)blockIdx.y * marks.words);
  for (int step = 0; step < marks.steps && unit_of(step) < marks.words * 4; step++)
    to[unit_of(step)] = (uint8_t)(kept >> (8 * step));
}

// Scores and columns in doubt of one row; in shared memory if they are few.
struct Doubts {
  const uint32_t *words;
  int num_words, count;
  const float *listed_scores;
  const int *listed_columns;

  template <class Use>
  __device__ __forceinline__ void each(const ScoreRow &scores, Use use) const {
    if (count <= MAX_LISTED) {
      for (int i = threadIdx.x; i < count; i += RESOLVE_THREADS) use(listed_columns[i], listed_scores[i]);
      return;
    }
    for (int w = threadIdx.x; w < num_words; w += RESOLVE_THREADS)
      for (uint32_t word = words[w]; word; word &= word - 1) {
        int column = w * 32 + __ffs(word) - 1;
        use(column, scores[column]);
      }
  }
};

// Of any scores, exactly those of the bin of the cut that are needed, found digit by digit of their ordered bits from
// the top.
__global__ void __launch_bounds__(RESOLVE_THREADS, 1)
    resolve(const __grid_constant__ TopP p, const RowCut *cuts, const __grid_constant__ Marks marks) {
  constexpr int DIGIT = 10, CELLS = 1 << DIGIT;
  static_assert(CELLS == RESOLVE_THREADS, "a thread has one cell");
  __shared__ float listed_scores[MAX_LISTED], sums[CELLS], shared[CELLS / WARP];
  __shared__ int listed_columns[MAX_LISTED], count, first;
  __shared__ unsigned long long cells[CELLS];
  wait_for_kernels_ahead(), let_next_kernel_begin();
  int t = threadIdx.x;
  int64_t row = blockIdx.x;
  RowCut cut = cuts[row];
  if (!(cut.edge < cut.sure)) return;  // no bin is cut
  ScoreRow scores(p, RowPlace(p, (int)row));
  Doubts doubts = {marks.doubt + row * marks.words, marks.words, 0, listed_scores, listed_columns};
  if (t == 0) count = 0;
  __syncthreads();
  for (int w = t; w < marks.words; w += RESOLVE_THREADS)
    for (uint32_t word = doubts.words[w]; word; word &= word - 1) {
      int column = w * 32 + __ffs(word) - 1, at = atomicAdd(&count, 1);
      if (at < MAX_LISTED) listed_columns[at] = column, listed_scores[at] = scores[column];
    }
  __syncthreads();
  doubts.count = count;
  uint32_t low = ordered_bits(cut.edge), span = ordered_bits(cut.sure) - low;  // places in the bin are below span
  uint32_t from = 0;                                                           // and the cut is at one from here on
  int digits = (int)ceil_div(32 - __clz((int)(span - 1)), DIGIT);
  const float unit = (float)(1ull << 36);  // 2^27 scores of a narrow bin fit
  float need = cut.need, most = cut.base >= cut.edge ? fminf(cut.sure, cut.base) : cut.sure;
  for (int shift = (digits - 1) * DIGIT; shift >= 0; shift -= DIGIT) {
    cells[t] = 0;
    if (t == 0) first = CELLS - 1;
    __syncthreads();
    doubts.each(scores, [&](int, float x) {
      uint32_t place = ordered_bits(x) - low - from;
      if (ordered_bits(x) - low >= from && place >> shift < CELLS)
        atomicAdd(&cells[place >> shift], (unsigned long long)(fast_exp2((x - most) * LOG2_E) * unit));
    });
    __syncthreads();
    float by = expf(most - cut.base) / unit;
    sums[t] = running_sum<CELLS>((float)cells[CELLS - 1 - t] * by, shared);
    __syncthreads();
    if (sums[t] >= need) atomicMin(&first, t);
    __syncthreads();
    need -= first ? sums[first - 1] : 0;
    from += (uint32_t)(CELLS - 1 - first) << shift;
    __syncthreads();
  }
  uint32_t *kept = marks.kept + (row / p.queries / (p.query_heads / p.selection.selections)) * marks.words;
  doubts.each(scores, [&](int column, float x) {
    if (ordered_bits(x) - low >= from) atomicOr(&kept[column / 32], 1u << (column % 32));
  });
}

}  // namespace cuda
}  // namespace kvq
