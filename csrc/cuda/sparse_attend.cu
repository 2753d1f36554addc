// attend_selected and qk_selected: which kernel takes a problem, and how many blocks of threads share it.
#include "sparse_combine.cuh"
#include "sparse_packed.cuh"

namespace kvq {
namespace cuda {

namespace {

bool aligned(const Dense &x) {
  bool good = (uintptr_t)x.data % 16 == 0;
  for (int64_t stride : x.stride) good = good && stride % 8 == 0;
  return good;
}

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

bool gapless(const Store &s, int words) {
  bool good = (uintptr_t)s.sign % 16 == 0 && (uintptr_t)s.mag % 16 == 0 && (uintptr_t)s.scale % 4 == 0;
  for (int i = 0; i < 3; i++) good = good && s.sign_stride[i] % 4 == 0 && s.mag_stride[i] % 4 == 0;
  return good && s.mag_stride[3] == words && s.scale_stride[0] % 2 == 0 && s.scale_stride[1] % 2 == 0;
}

// Whether tensor cores have a kernel: keys and values of three bits, 128 dims, 16-bit queries.
bool gathers_packed(const Selected &s) {
  const Attention &a = s.attention;
  if (!s.packed_keys || !s.packed_values || a.dim != 128 || a.value_dim != 128 || a.q.dtype == FLOAT32) return false;
  return a.keys.bits == 3 && a.values.bits == 3 && gapless(a.keys, 4) && gapless(a.values, 4);
}

// Blocks of threads that a multiprocessor holds.
int ctas_of(const Selected &s) {
  if (gathers_packed(s)) return PackedShape<3, 128>::CTAS;
  if (!gathers(s)) return 4;
  return s.attention.dim <= 128 ? GatherShape<128>::CTAS : GatherShape<256>::CTAS;
}

Work work_of(const Selected &s, int num_multiprocessors, char *scratch, int64_t &bytes) {
  const Attention &a = s.attention;
  Work w{};
  w.selections = (int)s.selection.selections, w.rows = (int)(a.group * a.heads / w.selections * a.queries);
  w.row_blocks = (int)ceil_div(w.rows, ITEM_ROWS), w.items = (int)(a.batch * w.selections * w.row_blocks);
  w.count = s.selection.count, w.count_stride = s.selection.count_stride;
  int64_t most = (int64_t)w.items * ceil_div(s.selection.capacity, SPARSE_TILE), each = ctas_of(s);
  most = most < 1 ? 1 : most;
  w.parts = (int)(most < each * num_multiprocessors ? most : each * num_multiprocessors);
  int64_t places = (int64_t)(w.parts + w.items) * ITEM_ROWS, sums = round_up(places * a.value_dim * 4, 256);
  w.sums = (float *)scratch, w.state = (float2 *)(scratch + sums), bytes = sums + places * (int64_t)sizeof(float2);
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
  if (gathers_packed(s)) {
    gather_by<PackedWarp<3, 128>>(s, w, stream);
  } else if (!gathers(s)) {
    launch_behind(attend_any, dim3(w.parts), ANY_THREADS, any_bytes(s.attention), stream, s, w);
  } else if (s.attention.q.dtype == FLOAT16) {
    gather<__half>(s, w, stream);
  } else {
    gather<__nv_bfloat16>(s, w, stream);
  }
  launch_behind(combine_selected, dim3(w.items * ITEM_ROWS), JOIN_THREADS, combine_bytes(s.attention), stream, s, w);
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
