// The launch of attend_selected over packed tokens, and which problems it takes.
#include "sparse_packed.cuh"
#include "sparse_parts.h"

namespace kvq {
namespace cuda {

namespace {

// Whether rows of a store's planes are read in units of 16 bytes, and scales as the words that hold them.
bool gapless(const Store &s, int words) {
  bool good = (uintptr_t)s.sign % 16 == 0 && (uintptr_t)s.mag % 16 == 0 && (uintptr_t)s.scale % 4 == 0;
  for (int i = 0; i < 3; i++) good = good && s.sign_stride[i] % 4 == 0 && s.mag_stride[i] % 4 == 0;
  return good && s.mag_stride[3] == words && s.scale_stride[0] % 2 == 0 && s.scale_stride[1] % 2 == 0;
}

// Whether integers have a kernel, and its arguments: keys and values of three bits, 128 dims, 16-bit queries and
// outputs; rounding of weights to 15 bits is well below that of outputs.
bool gathers_packed(const Selected &s, SelectedArgs &args) {
  const Attention &a = s.attention;
  if (!s.packed_keys || !s.packed_values || a.dim != 128 || a.value_dim != 128 || a.q.dtype == FLOAT32) return false;
  if (a.keys.bits != 3 || a.values.bits != 3 || a.out.dtype != a.q.dtype || !(a.scale > 0) || !aligned(a.q))
    return false;
  if (!gapless(a.keys, 4) || !gapless(a.values, 4) || !plain(a.keys) || !to_args(a, args.attention)) return false;
  int64_t bytes[4] = {a.keys.sign_stride[2], a.keys.mag_stride[2], a.values.sign_stride[2], a.values.mag_stride[2]};
  int64_t selections = s.selection.selections;
  args.attention.group = (int)(a.group * a.heads / selections), args.attention.num_sinks = 0;
  args.indices = s.selection.indices, args.tokens = (int)s.tokens, args.each = (int)(selections / a.heads);
  for (int i = 0; i < 2; i++) args.index_stride[i] = s.selection.index_stride[i];
  uint32_t *to[4] = {&args.key_sign, &args.key_mag, &args.value_sign, &args.value_mag};
  for (int i = 0; i < 4; i++) bytes[i] *= WORD_BITS / 8, *to[i] = (uint32_t)bytes[i];
  return fits_int(bytes, 4);
}

// So much that a multiprocessor has no room for more than S::CTAS blocks of threads: as a launch begins while the scan
// ahead of it ends, more would crowd onto the multiprocessors that are free first.
template <class S>
int shared_bytes() {
  return once_a_device([] {
    int device = 0, all = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    return larger(S::BYTES, all / (S::CTAS + 1));
  });
}

template <class T, class S>
void gather_packed_by(const SelectedArgs &args, const Work &w, cudaStream_t stream) {
  launch_behind(attend_packed<T, S>, dim3(w.parts), THREADS, shared_bytes<S>(), stream, args, w);
}

void gather_packed(const SelectedArgs &args, Dtype dtype, const Work &w, cudaStream_t stream) {
  using Few = SelectedShape<false>;
  using Many = SelectedShape<true>;
  bool few = w.rows <= Few::NUM_ROWS;
  if (dtype == FLOAT16)
    return few ? gather_packed_by<__half, Few>(args, w, stream) : gather_packed_by<__half, Many>(args, w, stream);
  return few ? gather_packed_by<__nv_bfloat16, Few>(args, w, stream)
             : gather_packed_by<__nv_bfloat16, Many>(args, w, stream);
}

}  // namespace

bool packed_fits(const Selected &s) {
  SelectedArgs args;
  return gathers_packed(s, args);
}

int packed_ctas(int rows) { return rows <= 4 ? SelectedShape<false>::CTAS : SelectedShape<true>::CTAS; }

void launch_attend_packed(const Selected &s, const Work &w, cudaStream_t stream) {
  SelectedArgs args;
  gathers_packed(s, args);
  args.attention.rows = w.rows;
  gather_packed(args, s.attention.q.dtype, w, stream);
}

}  // namespace cuda
}  // namespace kvq
