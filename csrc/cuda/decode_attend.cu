// Choice of the decode kernels.
#include "decode_attend.h"
#include "decode_args.h"

namespace kvq {
namespace cuda {

namespace {

constexpr int MAX_ROWS = 128;

int64_t with_kernel(Action action, const Attention &a, void *scratch, cudaStream_t stream) {
  if (decode_near(FITS, a, nullptr, nullptr)) return decode_near(action, a, nullptr, stream);
  switch (1000 * a.dim + a.value_dim) {
    case 64064:
      return decode_64(action, a, scratch, stream);
    case 80080:
      return decode_80(action, a, scratch, stream);
    case 96096:
      return decode_96(action, a, scratch, stream);
    case 128128:
      return decode_128(action, a, scratch, stream);
    case 192128:
      return decode_192(action, a, scratch, stream);
    case 256256:
      return decode_256(action, a, scratch, stream);
    default:
      return 0;
  }
}

// Whether a store's tokens are read in units of 16 bytes and lie without gaps.
bool gapless(const Store &s, int64_t unit) {
  bool good = aligned(s.sign) && aligned(s.mag) && aligned(s.scale) && s.sign_stride[2] == unit &&
              s.mag_stride[2] == unit * (s.bits - 1) && s.mag_stride[3] == unit;
  for (int i = 0; i < 2; i++)
    good = good && s.scale_stride[i] % 8 == 0 && s.sign_stride[i] % 4 == 0 && s.mag_stride[i] % 4 == 0;
  return good;
}

}  // namespace

bool decode_fits(const Attention &a) {
  if (a.batch * a.rows == 0) return false;
  if (a.shared || a.rows > MAX_ROWS || a.q.dtype == FLOAT32 || (a.length && a.start >= a.length) || !(a.scale > 0))
    return false;
  if (a.out.dtype != a.q.dtype ||
      (a.exact_len && (a.exact_keys.dtype != a.q.dtype || a.exact_values.dtype != a.q.dtype)))
    return false;
  if (!aligned(a.q) || !aligned(a.out)) return false;
  if (a.exact_len && !(aligned(a.exact_keys) && aligned(a.exact_values))) return false;
  if (!plain(a.keys) || !plain(a.values)) return false;
  if (a.length && !(gapless(a.keys, ceil_div(a.dim, WORD_BITS)) && gapless(a.values, a.value_dim))) return false;
  DecodeArgs args;
  return to_args(a, args) && with_kernel(FITS, a, nullptr, nullptr) != 0;
}

int64_t decode_scratch_bytes(const Attention &a) { return with_kernel(BYTES, a, nullptr, nullptr); }

void launch_decode(const Attention &a, void *scratch, cudaStream_t stream) { with_kernel(LAUNCH, a, scratch, stream); }

}  // namespace cuda
}  // namespace kvq
