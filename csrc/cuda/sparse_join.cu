// The launch of the last step of attend_selected, and which problems it takes.
#include "sparse_join.cuh"
#include "sparse_parts.h"

namespace kvq {
namespace cuda {

namespace {

bool to_args(const Selected &s, const Pieces *p, const Work &w, JoinArgs &args) {
  const Attention &a = s.attention;
  args = JoinArgs{};
  args.heads = w.selections, args.queries = (int)a.queries, args.each = (int)(w.selections / a.heads);
  args.lse = a.lse;
  for (int i = 0; i < 3; i++) args.lse_stride[i] = (int)a.lse_stride[i];
  if (s.packed_values && !(plain(a.values) && to_args(a.values, args.values))) return false;
  if (p) {
    if (p->outs_dtype != a.out.dtype || !fits_int(p->outs_stride, 4) || !fits_int(p->lses_stride, 4)) return false;
    args.near.data = (char *)p->outs, args.near_lse = p->lses;
    for (int i = 0; i < 3; i++)
      args.near.stride[i] = (int)p->outs_stride[1 + i], args.near_lse_stride[i] = (int)p->lses_stride[1 + i];
  }
  return aligned(a.out) && to_args(a.out, args.out) && fits_int(a.lse_stride, 3);
}

template <class T>
void join(int dim, const JoinArgs &args, const Work &w, cudaStream_t stream) {
  auto launch = [&](void (*kernel)(JoinArgs, Work)) {
    launch_behind(kernel, dim3(w.items / w.row_blocks * w.rows), ROW_THREADS, 0, stream, args, w);
  };
  switch (dim) {
    case 64:
      return launch(join_row<T, 64>);
    case 80:
      return launch(join_row<T, 80>);
    case 96:
      return launch(join_row<T, 96>);
    case 128:
      return launch(join_row<T, 128>);
    default:
      return launch(join_row<T, 256>);
  }
}

}  // namespace

bool launch_join(const Selected &s, const Pieces *pieces, const Work &w, cudaStream_t stream) {
  int dim = s.attention.value_dim;
  JoinArgs args;
  if (s.attention.out.dtype == FLOAT32 || !to_args(s, pieces, w, args)) return false;
  if (dim != 64 && dim != 80 && dim != 96 && dim != 128 && dim != 256) return false;
  if (s.attention.out.dtype == FLOAT16)
    join<__half>(dim, args, w, stream);
  else
    join<__nv_bfloat16>(dim, args, w, stream);
  return true;
}

}  // namespace cuda
}  // namespace kvq
