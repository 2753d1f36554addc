// Where the CTAs that share a head's tokens form a cluster, they end its rows themselves: a warp a row adds up the
// parts, which it reads from the shared memory of all, at the same place in each. So there is neither scratch nor a
// second launch.
#pragma once

#include "decode_merge.cuh"

namespace kvq {
namespace cuda {

constexpr int MAX_CLUSTER = 8;  // CTAs

template <class T, class S>
struct ClusterRows {
  using End = RowEnd<T, S::VDIM>;
  static constexpr int N = End::N, AT_ONCE = 4;  // CTAs whose parts are on their way together
  End end;
  int rows, row, step;  // this warp ends `row`, if it is below `rows`, and every `step` rows another one
  float turned[N], exact[N], most = 0, all = 0, packed = 0;  // what a row's parts are together

  __device__ __forceinline__ ClusterRows(const Parts &parts, int rows, int rank, int warp)
      : rows(rows), step(parts.packed * WARPS) {
#pragma unroll
    for (int i = 0; i < N; i++) turned[i] = exact[i] = 0;
    row = parts.clustered && warp < WARPS ? parts.packed * warp + rank : rows;
  }

  // What does not depend on the parts.
  __device__ __forceinline__ void load(const DecodeArgs &a, int b, int h, int lane) {
    if (row < rows) end.load(a.values, b, h, lane);
  }

  __device__ __forceinline__ void add_up(const Parts &parts, const PartPlace &of_packed, const PartPlace &of_exact,
                                         float sink, int lane) {
    uint32_t from = shared_address(of_packed.sums + row * of_packed.pitch);
    uint32_t from_exact = shared_address(of_exact.sums + row * of_exact.pitch);
    int cta = lane % 16;  // whose state this lane reads: of packed tokens in the first half of the warp
    bool first_half = lane < 16;
    float state[2] = {NO_SCORE, 0}, weight, x[AT_ONCE][N], y[AT_ONCE][N];
    auto load = [&](int first) {
#pragma unroll
      for (int p = 0; p < AT_ONCE; p++) {
#pragma unroll
        for (int i = 0; i < N; i++) x[p][i] = y[p][i] = 0;
        if (first + p < parts.packed) End::load_part(x[p], address_in_cluster(from, first + p), lane);
        if (first + p < parts.exact) End::load_part(y[p], address_in_cluster(from_exact, first + p), lane);
      }
    };
    auto add = [&](int first) {
#pragma unroll
      for (int p = 0; p < AT_ONCE; p++) {
        float w = __shfl_sync(~0u, weight, first + p), w_exact = __shfl_sync(~0u, weight, 16 + first + p);
#pragma unroll
        for (int i = 0; i < N; i++) {
          turned[i] = fmaf(w, x[p][i], turned[i]);
          exact[i] = fmaf(w_exact, y[p][i], exact[i]);
        }
      }
    };
    if (cta < (first_half ? parts.packed : parts.exact))
      load_in_cluster(state, address_in_cluster(shared_address((first_half ? of_packed : of_exact).state + row), cta));
    load(0);
    most = largest_of_warp(fmaxf(state[0], sink));
    weight = fast_exp2(state[0] - most);
    all = weight * state[1], packed = first_half ? all : 0;
    all = warp_sum(all), packed = warp_sum(packed);
#pragma unroll
    for (int i = 0; i < N; i++) turned[i] = exact[i] = 0;
    add(0);
    for (int first = AT_ONCE; first < parts.packed; first += AT_ONCE) load(first), add(first);
  }

  // Ends the rows once all CTAs of the cluster have written their parts. `memory` [VDIM] is of this warp alone.
  __device__ __forceinline__ void finish(const DecodeArgs &a, const Parts &parts, const PartPlace &of_packed,
                                         const PartPlace &of_exact, float *memory, int b, int h, int first_row,
                                         int lane) {
    bool shared = parts.packed > 1;
    arrive_in_cluster(), wait_for_cluster();
    do {  // once if the parts are shared: a cluster has a warp for every row
      QueryPlace place(a, b, h, first_row + (row < rows ? row : 0));
      float sink = a.sink_logits ? a.sink_logits[place.head] * LOG2E : NO_SCORE;
      if (row < rows) add_up(parts, of_packed, of_exact, sink, lane);
      if (shared) arrive_in_cluster();  // nothing of the others is read any more
      if (row < rows) {
        end.finish(a, place, turned, exact, all, packed, most, sink, memory, lane);
      }
      row += step;
    } while (row < rows);
    if (shared) wait_for_cluster();
  }
};

}  // namespace cuda
}  // namespace kvq
