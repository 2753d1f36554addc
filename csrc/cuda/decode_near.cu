// Launch of the kernels for a handful of exact tokens. They know nothing of bits: there are no packed tokens.
#include "decode_attend.h"
#include "decode_near.cuh"

namespace kvq {
namespace cuda {

namespace {

template <class T, class S>
void start(const Attention &a, cudaStream_t stream) {
  int warps = near_warps<S>(a);
  dim3 grid((unsigned)(a.batch * a.heads), S::SLICES, (unsigned)ceil_div(a.rows, S::NUM_ROWS));
  DecodeArgs args;
  to_args(a, args);
  launch_behind(near_kernel<T, S>, grid, 32 * warps, S::size(warps), stream, args);
}

template <class S>
void start(const Attention &a, cudaStream_t stream) {
  if (a.q.dtype == FLOAT16)
    start<__half, S>(a, stream);
  else
    start<__nv_bfloat16, S>(a, stream);
}

template <int DIM, int VDIM>
int64_t act(Action action, const Attention &a, cudaStream_t stream) {
  using Few = NearShape<DIM, VDIM, false>;
  using Many = NearShape<DIM, VDIM, true>;
  if (action == FITS) return near_steps(a) <= Few::MAX_WARPS;
  if (action == LAUNCH) a.rows <= 4 ? start<Few>(a, stream) : start<Many>(a, stream);
  return 0;
}

}  // namespace

int64_t decode_near(Action action, const Attention &a, void *, cudaStream_t stream) {
  if (a.length > 0) return 0;
  switch (1000 * a.dim + a.value_dim) {
    case 64064:
      return act<64, 64>(action, a, stream);
    case 80080:
      return act<80, 80>(action, a, stream);
    case 96096:
      return act<96, 96>(action, a, stream);
    case 128128:
      return act<128, 128>(action, a, stream);
    case 192128:
      return act<192, 128>(action, a, stream);
    case 256256:
      return act<256, 256>(action, a, stream);
    default:
      return 0;
  }
}

}  // namespace cuda
}  // namespace kvq
