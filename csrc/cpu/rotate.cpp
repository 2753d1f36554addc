// rotate: out = R x or R^T x for every vector of x [..., D]. 32 vectors a tile, tiles in parallel.
#include "problems.h"
#include "run.h"

namespace kvq {

namespace {

// Offset in elements of vector `index`.
int64_t offset_of(const Vectors &v, const int64_t *stride, int64_t index) {
  int64_t offset = 0;
  for (int i = v.leading - 1; i >= 0; i--) {
    offset += index % v.size[i] * stride[i];
    index /= v.size[i];
  }
  return offset;
}

void rotate(const Tensor &x, const Tensor &signs, const Tensor &blocks, const Tensor &matrix, bool inverse,
            const Tensor &out) {
  Vectors v = rotate_problem(x, signs, blocks, matrix, inverse, out);
  int x_size = v.x_dtype == FLOAT32 ? 4 : 2, out_size = v.out_dtype == FLOAT32 ? 4 : 2;
  const Kernels &k = kernels();
  run_parallel(ceil_div(v.count, TILE), scratch_bytes(round_up(v.rotation.dim, TILE)),
               [&](int64_t tile, char *scratch) {
                 const char *rows[TILE];
                 char *outs[TILE];
                 int n = 0;
                 for (int64_t i = tile * TILE; i < v.count && n < TILE; i++, n++) {
                   rows[n] = v.x + x_size * offset_of(v, v.x_stride, i);
                   outs[n] = v.out + out_size * offset_of(v, v.out_stride, i);
                 }
                 k.rotate(v.rotation, v.inverse, rows, v.x_dtype, outs, v.out_dtype, n, scratch);
               });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CPU, m) { m.impl("rotate", TORCH_BOX(&rotate)); }

}  // namespace kvq
