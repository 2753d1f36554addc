// attend_selected and qk_selected: which kernel takes a problem, and how many blocks of threads share it.
#include "decode_args.h"
#include "launch.h"
#include "sparse_combine.cuh"
#include "sparse_gather.cuh"
#include "sparse_parts.h"

namespace kvq {
namespace cuda {

namespace {

constexpr int MAX_PART_TILES = 4 * 1000;  // so that sums of lower bytes (decode_packed.cuh) stay within 32 bits

// Whether a block of the current device may have this much shared memory.
bool has_shared(int bytes) {
  int device = 0, most = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return bytes <= most;
}

// Whether tensor cores have a kernel: 16-bit dense keys and values of one dtype and head dim, aligned to 16 bytes.
bool gathers(const Selected &s) {
  const Attention &a = s.attention;
  if (s.packed_keys || s.packed_values || a.dim != a.value_dim) return false;
  if (a.dim != 64 && a.dim != 80 && a.dim != 96 && a.dim != 128 && a.dim != 256) return false;
  if (a.q.dtype == FLOAT32 || a.exact_keys.dtype != a.q.dtype || a.exact_values.dtype != a.q.dtype) return false;
  if (!has_shared(a.dim == 256  ? GatherShape<256>::BYTES
                  : a.dim <= 64 ? GatherShape<64>::BYTES
                                : GatherShape<128>::BYTES))
    return false;
  bool pairs = (uintptr_t)a.q.data % 4 == 0;
  for (int64_t stride : a.q.stride) pairs = pairs && stride % 2 == 0;
  return pairs && aligned(a.exact_keys) && aligned(a.exact_values);
}

// Blocks of threads that a multiprocessor holds.
int ctas_of(const Selected &s, int rows) {
  if (packed_fits(s)) return packed_ctas(rows);
  if (!gathers(s)) return 4;
  return s.attention.dim <= 128 ? GatherShape<128>::CTAS : GatherShape<256>::CTAS;
}

Work work_of(const Selected &s, int num_multiprocessors, char *scratch, int64_t &bytes) {
  const Attention &a = s.attention;
  Work w{};
  w.selections = (int)s.selection.selections, w.rows = (int)(a.group * a.heads / w.selections * a.queries);
  w.row_blocks = (int)ceil_div(w.rows, ITEM_ROWS), w.items = (int)(a.batch * w.selections * w.row_blocks);
  w.count = s.selection.count, w.count_stride = s.selection.count_stride;
  int64_t most = (int64_t)w.items * ceil_div(s.selection.capacity, SPARSE_TILE);
  int64_t fill = ctas_of(s, w.rows) * num_multiprocessors, least = ceil_div(most, MAX_PART_TILES) + w.items;
  fill = fill > 2 * w.items ? fill : 2 * w.items, fill = fill > least ? fill : least;
  most = most < w.items ? w.items : most;
  w.parts = (int)(most < fill ? most : fill);
  int64_t places = (int64_t)w.parts * ITEM_ROWS, sums = places * a.value_dim * 4, states = places * sizeof(float2);
  w.state = (float2 *)scratch, w.spans = (int2 *)(scratch + states);
  int64_t head = round_up(states + w.items * (int64_t)sizeof(int2), 256);
  w.sums = (float *)(scratch + head), bytes = head + sums;
  return w;
}

int any_bytes(const Attention &a) { return 4 * AnyShape(a.dim, a.value_dim).floats(); }

template <class Worker>
void gather_by(const Selected &s, const Work &w, cudaStream_t stream) {
  launch_behind(attend_gathered<Worker>, dim3(w.parts), GATHER_WARPS * WARP, Worker::S::BYTES, stream, s, w);
}

template <class T>
void gather(const Selected &s, const Work &w, cudaStream_t stream) {
  switch (s.attention.dim) {
    case 64:
      return gather_by<GatherWarp<T, 64>>(s, w, stream);
    case 80:
      return gather_by<GatherWarp<T, 80>>(s, w, stream);
    case 96:
      return gather_by<GatherWarp<T, 96>>(s, w, stream);
    case 128:
      return gather_by<GatherWarp<T, 128>>(s, w, stream);
    default:
      return gather_by<GatherWarp<T, 256>>(s, w, stream);
  }
}

void attend_parts(const Selected &s, const Work &w, cudaStream_t stream) {
  if (packed_fits(s)) {
    launch_attend_packed(s, w, stream);
  } else if (!gathers(s)) {
    launch_behind(attend_any, dim3(w.parts), ANY_THREADS, any_bytes(s.attention), stream, s, w);
  } else if (s.attention.q.dtype == FLOAT16) {
    gather<__half>(s, w, stream);
  } else {
    gather<__nv_bfloat16>(s, w, stream);
  }
}

void combine(const Selected &s, const Work &w, cudaStream_t stream) {
  launch_behind(combine_selected, dim3(w.items * ITEM_ROWS), JOIN_THREADS, combine_bytes(s.attention), stream, s, w);
}

}  // namespace

int64_t attend_selected_scratch_bytes(const Selected &s, int num_multiprocessors) {
  int64_t bytes;
  work_of(s, num_multiprocessors, nullptr, bytes);
  return bytes;
}

void launch_attend_selected(const Selected &s, int num_multiprocessors, void *scratch, cudaStream_t stream) {
  int64_t bytes;
  Work w = work_of(s, num_multiprocessors, (char *)scratch, bytes);
  if (!w.items) return;
  attend_parts(s, w, stream);
  if (!launch_join(s, nullptr, w, stream)) combine(s, w, stream);
}

void launch_merge_selected(const Selected &s, const Pieces &p, int num_multiprocessors, void *scratch,
                           cudaStream_t stream) {
  int64_t bytes;
  Work w = work_of(s, num_multiprocessors, (char *)scratch, bytes);
  if (!w.items) return;
  attend_parts(s, w, stream);
  if (launch_join(s, &p, w, stream)) return;
  Selected own = s;
  Attention &a = own.attention;
  a.out.dtype = p.outs_dtype, a.out.data = (char *)p.outs + p.outs_stride[0] * (p.outs_dtype == FLOAT32 ? 4 : 2);
  a.lse = (float *)p.lses + p.lses_stride[0];
  for (int i = 0; i < 3; i++) a.out.stride[i] = p.outs_stride[1 + i], a.lse_stride[i] = p.lses_stride[1 + i];
  combine(own, w, stream);
  launch_merge(p, stream);
}

void launch_qk_selected(const Selected &s, cudaStream_t stream) {
  int64_t bytes;
  Work w = work_of(s, 1, nullptr, bytes);
  if (!w.items || !s.selection.capacity) return;
  dim3 grid((unsigned)w.items, (unsigned)ceil_div(s.selection.capacity, WARP));
  launch_behind(score_any, grid, ANY_THREADS, any_bytes(s.attention), stream, s, w);
}

}  // namespace cuda
}  // namespace kvq
