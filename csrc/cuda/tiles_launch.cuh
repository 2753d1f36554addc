// The end of a CTA's work, and the launch of a shape.
#pragma once

#include "tiles_kernel.cuh"

namespace kvq {
namespace cuda {
namespace tiles {

// Sums of the warps that share rows, and the state of every row, to the scratch of the call.
template <class S, Mode MODE, bool PACKED>
__device__ __forceinline__ void write_part(const Worker<S, MODE, PACKED> &w, RowState<S> &state) {
  const Attention &a = w.a;
  float2 *states = w.template in<float2>(0);  // [TOKEN_WARPS, ROWS]: maximum, sum
  float *sums = w.template in<float>(w.at.sums);
  const Task task = w.task();
  int part = w.token_at / S::WARP_TOKENS;
  wait_copies();  // of queries, if there was no tile
  __syncthreads();
#pragma unroll
  for (int m = 0; m < S::ROW_TILES; m++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float sum = quad_sum(state.sum[m][i]);
      if (w.c == 0 && w.dim_at == 0)
        states[part * S::ROWS + w.row_at + 16 * m + 8 * i + w.g] =
            make_float2(MODE == ATTEND ? state.top[m][i] : 0, sum);
    }
  __syncthreads();
  float unit = state.unit / (1 << WEIGHT_BITS) * (PACKED ? step_of(w.value_store()) : 1);
  for (int turn = 0; turn < S::TOKEN_WARPS; turn++) {
    if (turn == part)
#pragma unroll
      for (int m = 0; m < S::ROW_TILES; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          int row = w.row_at + 16 * m + 8 * i + w.g;
          float by = unit, most = -INFINITY;
          for (int p = 0; p < S::TOKEN_WARPS; p++) most = fmaxf(most, states[p * S::ROWS + row].x);
          if (MODE == SUMS) by *= state.top[m][i];
          if (MODE == ATTEND) by *= most == -INFINITY ? 0 : fast_exp2(state.top[m][i] - most);
#pragma unroll
          for (int n = 0; n < S::WARP_DIMS / 8; n++) {
            float2 *to = (float2 *)(sums + row * S::SUM_PITCH + w.dim_at + 8 * n + 2 * w.c);
            float2 before = turn ? *to : make_float2(0, 0);
            *to = make_float2(before.x + by * state.sums[m][n][2 * i], before.y + by * state.sums[m][n][2 * i + 1]);
          }
        }
    __syncthreads();
  }
  int dims = a.value_dim;
  float *partial = a.partial + (int64_t)task.index * a.row_block * a.value_pad;
  for (int i = threadIdx.x; i < task.rows * dims; i += S::THREADS) {
    int row = i / dims, d = i % dims;
    partial[row * a.value_pad + d] = sums[row * S::SUM_PITCH + (w.shared_values() && PACKED ? place_of(d) : d)];
  }
  for (int row = threadIdx.x; row < task.rows; row += S::THREADS) {
    float most = -INFINITY, sum = 0;
    for (int p = 0; p < S::TOKEN_WARPS; p++) most = fmaxf(most, states[p * S::ROWS + row].x);
    for (int p = 0; p < S::TOKEN_WARPS; p++) {
      float2 s = states[p * S::ROWS + row];
      sum += s.x == -INFINITY && s.y == 0 ? 0 : s.y * fast_exp2(s.x - (most == -INFINITY ? 0 : most));
    }
    float *to = a.state + ((int64_t)task.index * a.row_block + row) * 2;
    to[0] = sum == sum ? most : sum, to[1] = sum;  // maxima skip NaN: not an empty row
  }
}

template <class S, Mode MODE, bool PACKED>
__device__ __forceinline__ void work(const Plan &plan, const Places &at, char *memory) {
  Worker<S, MODE, PACKED> worker(plan, at, memory);
  worker.set_up();
  __syncthreads();
  RowState<S> state;
  state.clear(MODE == SUMS ? LEAST_WEIGHT : -INFINITY);
  worker.run(state);
  if constexpr (MODE != SCORES) write_part(worker, state);
}

template <class S, Mode MODE>
__global__ void __launch_bounds__(S::THREADS, S::BLOCKS)
    tiles_kernel(const __grid_constant__ Plan plan, const __grid_constant__ Places at) {
  extern __shared__ uint4 memory[];
  if (blockIdx.x < plan.a.batch * plan.a.heads * plan.a.row_blocks * plan.a.packed_splits)
    work<S, MODE, true>(plan, at, (char *)memory);
  else
    work<S, MODE, false>(plan, at, (char *)memory);
}

template <class S, Mode MODE>
int shared_bytes(const Plan &plan) {
  return places_of<S, MODE>(plan).size;
}

template <class S, Mode MODE>
void launch(const Plan &plan, cudaStream_t stream) {
  const Attention &a = plan.a;
  int64_t grid = a.batch * a.heads * a.row_blocks * (a.packed_splits + a.exact_splits);
  if (!grid) return;
  Places at = places_of<S, MODE>(plan);
  cudaFuncSetAttribute((const void *)tiles_kernel<S, MODE>, cudaFuncAttributeMaxDynamicSharedMemorySize, at.size);
  cudaFuncSetAttribute((const void *)tiles_kernel<S, MODE>, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
  tiles_kernel<S, MODE><<<(unsigned)grid, S::THREADS, at.size, stream>>>(plan, at);
}

template <class S, Mode MODE>
constexpr Kernel kernel_of() {
  return {S::ROWS, S::TOKENS, S::BLOCKS, S::PRECISE, shared_bytes<S, MODE>, launch<S, MODE>};
}

}  // namespace tiles
}  // namespace cuda
}  // namespace kvq
