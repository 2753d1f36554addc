// rotate: out = R x or R^T x for every vector of x [..., D]. 32 vectors a tile, tiles in parallel.
#include "checks.h"

namespace kvq {

namespace {

// Address of vector `index` of the leading dims, counted row-major.
char *vector_at(const Tensor &x, char *data, int size, int64_t index) {
  int64_t offset = 0;
  for (int64_t i = x.dim() - 2; i >= 0; i--) {
    offset += index % x.size(i) * x.stride(i);
    index /= x.size(i);
  }
  return data + size * offset;
}

void rotate(const Tensor &x, const Tensor &signs, const Tensor &blocks, const Tensor &matrix, bool inverse,
            const Tensor &out) {
  int64_t last = x.dim() - 1;
  KVQ_CHECK(last >= 0 && x.is_cpu() && out.is_cpu(), "x", "have a last dim and be on the CPU like out", text(x));
  bool same = x.dim() == out.dim();
  for (int64_t i = 0; same && i <= last; i++) same = x.size(i) == out.size(i);
  KVQ_CHECK(same, "out", "have the shape of x, " + text(x), text(out));
  Rotation rotation = rotation_of(signs, blocks, matrix, x.size(last));
  Dtype x_dtype = dtype_of("x", x), out_dtype = dtype_of("out", out);
  KVQ_CHECK(x.stride(last) == 1 && out.stride(last) == 1, "x and out", "have a contiguous last dim",
            "strides that are not");
  char *from = (char *)x.data_ptr(), *to = (char *)out.data_ptr();
  int x_size = x_dtype == FLOAT32 ? 4 : 2, out_size = out_dtype == FLOAT32 ? 4 : 2;
  int64_t count = x.numel() / rotation.dim;
  const Kernels &k = kernels();
  run_parallel(ceil_div(count, TILE), scratch_bytes(round_up(rotation.dim, TILE)), [&](int64_t tile, char *scratch) {
    const char *rows[TILE];
    char *outs[TILE];
    int n = 0;
    for (int64_t i = tile * TILE; i < count && n < TILE; i++, n++) {
      rows[n] = vector_at(x, from, x_size, i);
      outs[n] = vector_at(out, to, out_size, i);
    }
    k.rotate(rotation, inverse, rows, x_dtype, outs, out_dtype, n, scratch);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CPU, m) { m.impl("rotate", TORCH_BOX(&rotate)); }

}  // namespace kvq
