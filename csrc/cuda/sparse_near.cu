// What a decode step does before it scans the index, in one launch: attention to sinks and window as near_kernel does
// it, the code of the queries, and zeros where blocks of scan_select add up. None of them waits for another; three
// launches of 3 us each would, and the scan for all of them. CTAs of attention come first, and their warps clear that
// have no row to end; those behind them have a query a warp.
#include "decode_attend.h"
#include "decode_near.cuh"
#include "sparse_near.h"
#include "sparse_query.cuh"

namespace kvq {
namespace cuda {

namespace {

constexpr int DIM = 128;  // that scan_select and near_kernel both have
using Near = NearShape<DIM, DIM, false>;
static_assert(Near::STATES >= DIM * (int)sizeof(float), "a query fits where a warp's sums would be");

// Grid: (heads and what the queries need beside them, slice of the values' dims).
struct NearPlan {
  int heads, queries;
  uint4 *cleared;
  int units;
};

// By warp `warp` of so many of each CTA of attention.
__device__ __forceinline__ void clear(const NearPlan &plan, int warp, int warps) {
  int cta = blockIdx.y * plan.heads + blockIdx.x;
  for (int i = (cta * warps + warp) * WARP + lane_id(); i < plan.units; i += Near::SLICES * plan.heads * warps * WARP)
    plan.cleared[i] = make_uint4(0, 0, 0, 0);
}

template <class T>
__global__ void __launch_bounds__(32 * Near::MAX_WARPS)
    near_and_queries(const __grid_constant__ DecodeArgs a, const __grid_constant__ QueryCoding c,
                     const __grid_constant__ NearPlan plan) {
  extern __shared__ __align__(16) char memory[];
  int more = (int)blockIdx.x - plan.heads, warp = warp_id();
  if (more < 0)
    return attend_near<T, Near>(a, blockIdx.x, blockIdx.y, 0, memory,
                                [&](int warp, int warps) { clear(plan, warp, warps); });
  fetch_parameters(c);
  int number = (more * Near::SLICES + blockIdx.y) * (blockDim.x / 32) + warp;
  if (number < plan.queries)
    quantise_row<DIM / 32>(c, number, (float *)(memory + warp * Near::STATES), lane_id(),
                           [] { let_next_kernel_begin(); });
}

}  // namespace

bool near_takes(const QueryCoding &c, const Attention &a) {
  return a.dim == DIM && a.value_dim == DIM && c.dim == DIM && a.rows <= Near::NUM_ROWS && decode_fits(a) &&
         decode_near(FITS, a, nullptr, nullptr) && fits_registers(c);
}

void launch_near(const QueryCoding &c, const Attention &a, void *cleared, int64_t bytes, cudaStream_t stream) {
  int warps = near_warps<Near>(a), queries = (int)(a.batch * a.heads * a.rows);
  NearPlan plan{(int)(a.batch * a.heads), queries, (uint4 *)cleared, (int)(bytes / sizeof(uint4))};
  DecodeArgs args;
  to_args(a, args);
  dim3 grid((unsigned)(plan.heads + ceil_div(queries, warps * Near::SLICES)), Near::SLICES);
  auto launch = [&](auto *kernel) {
    launch_behind(kernel, grid, 32 * warps, Near::size(warps), stream, args, c, plan);
  };
  if (a.q.dtype == FLOAT16)
    launch(near_and_queries<__half>);
  else
    launch(near_and_queries<__nv_bfloat16>);
}

}  // namespace cuda
}  // namespace kvq
