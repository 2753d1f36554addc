#include "checks.h"

#include <ostream>
#include <sstream>

namespace kvq {

namespace {

const char *dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Double:
      return "float64";
    default:
      return "another dtype";
  }
}

// The name of an argument or of a part of one, "keys" or "keys.mag"; put together only when printed.
struct Name {
  const char *owner, *part;
  Name(const char *owner, const char *part = nullptr) : owner(owner), part(part) {}
};
std::ostream &operator<<(std::ostream &out, const Name &name) {
  out << name.owner;
  return name.part ? out << "." << name.part : out;
}

template <class List>
std::string list_text(const List &sizes) {
  std::ostringstream out;
  out << "[";
  for (const int64_t *i = sizes.begin(); i != sizes.end(); i++) {
    out << (i == sizes.begin() ? "" : ", ");
    if (*i < 0)
      out << "*";
    else
      out << *i;
  }
  out << "]";
  return out.str();
}

#if defined(KVQ_CUDA)
thread_local int expected_device = -1;
#endif

void check_in_place(const Name &name, const Tensor &x) {
  KVQ_CHECK(in_place(x), name, "be on " + place(), device_text(x));
}

void check_sizes(const Name &name, const Tensor &x, Sizes sizes) {
  auto have = x.sizes();
  bool good = have.size() == sizes.size();
  for (size_t i = 0; good && i < sizes.size(); i++) good = sizes.begin()[i] < 0 || have[i] == sizes.begin()[i];
  KVQ_CHECK(good, name, "have the shape " + list_text(sizes), text(x));
  check_in_place(name, x);
}

void check_last(const Name &name, const Tensor &x) {
  int64_t last = x.dim() - 1, stride = x.stride(last);
  KVQ_CHECK(stride == 1 || x.size(last) == 1 || x.numel() == 0, name, "have a contiguous last dim",
            "stride " + std::to_string(stride));
}

void check_type(const Name &name, const Tensor &x, ScalarType type) {
  ScalarType have = x.scalar_type();
  KVQ_CHECK(have == type, name, std::string("be ") + dtype_name(type), dtype_name(have));
}

// Data of a tensor with this dtype and these sizes and a contiguous last dim; the strides of its other dims.
template <class T>
T *typed(const Name &name, const Tensor &x, ScalarType type, Sizes sizes, int64_t *strides) {
  check_type(name, x, type);
  check_sizes(name, x, sizes);
  check_last(name, x);
  auto have = x.strides();
  for (size_t i = 0; i + 1 < have.size(); i++) strides[i] = have[i];
  return (T *)x.data_ptr();
}

// A vector [B, H, D] a head, broadcast from fewer or shorter leading dims; null if empty.
const float *per_head(const Name &name, const Tensor &x, int64_t batch, int64_t heads, int64_t dim, int64_t *strides) {
  strides[0] = strides[1] = 0;
  if (x.numel() == 0) return nullptr;
  check_type(name, x, ScalarType::Float);
  check_in_place(name, x);
  auto sizes = x.sizes(), steps = x.strides();
  int64_t dims = (int64_t)sizes.size(), want[2] = {batch, heads};
  bool good = dims >= 1 && dims <= 3 && sizes[dims - 1] == dim && steps[dims - 1] == 1;
  for (int64_t i = 0; good && i + 1 < dims; i++) {
    int64_t axis = i + 3 - dims;
    good = sizes[i] == 1 || sizes[i] == want[axis];
    strides[axis] = sizes[i] == 1 ? 0 : steps[i];
  }
  KVQ_CHECK(good, name, "be contiguous in the last dim, of shape " + list_text(Sizes{batch, heads, dim}), text(x));
  return (const float *)x.data_ptr();
}

// A whole contiguous float32 tensor, null if empty.
const float *whole(const Name &name, const Tensor &x, Sizes sizes) {
  if (x.numel() == 0) return nullptr;
  check_type(name, x, ScalarType::Float);
  check_sizes(name, x, sizes);
  KVQ_CHECK(x.is_contiguous(), name, "be contiguous", "strides that are not");
#if defined(KVQ_CUDA)
  KVQ_CHECK((uintptr_t)x.data_ptr() % 16 == 0, name, "start at a multiple of 16 bytes", x.data_ptr());
#endif
  return (const float *)x.data_ptr();
}

}  // namespace

std::string text(const Tensor &x) { return std::string(dtype_name(x.scalar_type())) + " " + list_text(x.sizes()); }

std::string device_text(const Tensor &x) {
  if (x.is_cpu()) return "cpu";
  return (x.is_cuda() ? "cuda:" : "device ") + std::to_string(x.get_device_index());
}

#if defined(KVQ_CUDA)
std::string place() { return "cuda:" + std::to_string(expected_device); }
bool in_place(const Tensor &x) { return x.is_cuda() && x.get_device_index() == expected_device; }
void expect_device(int index) { expected_device = index; }
#else
std::string place() { return "the CPU"; }
bool in_place(const Tensor &x) { return x.is_cpu(); }
#endif

void check_place(const char *name, const Tensor &x) { check_in_place(name, x); }

int64_t size_at(const Tensor &x, int64_t dim) { return dim < x.dim() ? x.size(dim) : -1; }

Dtype dtype_of(const char *name, const Tensor &x) {
  ScalarType type = x.scalar_type();
  bool good = type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half;
  KVQ_CHECK(good, name, "be float32, bfloat16 or float16", dtype_name(type));
  return type == ScalarType::Float ? FLOAT32 : type == ScalarType::BFloat16 ? BFLOAT16 : FLOAT16;
}

Dense dense_of(const char *name, const Tensor &x, Sizes sizes) {
  Dense dense;
  dense.dtype = dtype_of(name, x);
  check_sizes(name, x, sizes);
  check_last(name, x);
  auto strides = x.strides();
  for (int i = 0; i < 3; i++) dense.stride[i] = strides[i];
  dense.data = (char *)x.data_ptr();
  return dense;
}

float *floats_of(const char *name, const Tensor &x, Sizes sizes, int64_t *strides) {
  check_type(name, x, ScalarType::Float);
  check_sizes(name, x, sizes);
  auto have = x.strides();
  for (size_t i = 0; i < have.size(); i++) strides[i] = have[i];
  return (float *)x.data_ptr();
}

Rotation rotation_of(const Tensor &signs, const Tensor &blocks, const Tensor &matrix, int64_t dim) {
  KVQ_CHECK(dim >= 4 && dim <= MAX_HEAD_DIM && dim % 4 == 0, "head dim", "be a multiple of 4 from 4 to 512", dim);
  Rotation r = {(int)dim, 0, whole("signs", signs, {-1, dim}), nullptr, nullptr};
  if (r.signs) r.rounds = (int)signs.size(0);
  r.blocks = whole("blocks", blocks, {dim / 4, 4, 4});
  r.matrix = whole("matrix", matrix, {dim, dim});
  return r;
}

Store store_of(const char *name, const Tensors &packed, bool along_tokens, int64_t batch, int64_t heads, int64_t tokens,
               int64_t dim) {
  KVQ_CHECK(packed.size() == NUM_PACKED_FIELDS, name, "be nine tensors", packed.size());
  Store s;
  s.rotation = rotation_of(packed[SIGNS], packed[BLOCKS], packed[MATRIX], dim);
  s.dim = (int)dim;
  const Tensor &mag = packed[MAG], &scale = packed[SCALE];
  s.bits = (int)size_at(mag, 3) + 1;
  KVQ_CHECK(s.bits >= MIN_BITS && s.bits <= MAX_BITS, Name(name, "mag"), "have 1 to 3 planes in dim 3", text(mag));
  int64_t capacity = size_at(scale, 2), last = along_tokens ? dim : ceil_div(dim, WORD_BITS);
  int64_t units = along_tokens ? capacity / BLOCK_LEN : capacity, planes = s.bits - 1;
  KVQ_CHECK(capacity % BLOCK_LEN == 0, Name(name, "scale"), "have a capacity that is a multiple of 32", text(scale));
  KVQ_CHECK(tokens <= capacity, Name(name, "scale"), "have a capacity of at least " + std::to_string(tokens),
            text(scale));
  s.sign = typed<uint32_t>({name, "sign"}, packed[SIGN], ScalarType::Int, {batch, heads, units, last}, s.sign_stride);
  s.mag = typed<uint32_t>({name, "mag"}, mag, ScalarType::Int, {batch, heads, units, planes, last}, s.mag_stride);
  s.scale = typed<uint16_t>({name, "scale"}, scale, ScalarType::Half, {batch, heads, capacity}, s.scale_stride);
  const float *levels = whole({name, "levels"}, packed[LEVELS], {1 << planes});
  KVQ_CHECK(levels, Name(name, "levels"), "hold 2 ** (bits - 1) levels", "none");
  s.level_data = levels;
#if !defined(KVQ_CUDA)
  for (int i = 0; i < 1 << planes; i++) s.levels[i] = levels[i];
#endif
  s.centre = per_head({name, "centre"}, packed[CENTRE], batch, heads, dim, s.centre_stride);
  s.balance = per_head({name, "balance"}, packed[BALANCE], batch, heads, dim, s.balance_stride);
  return s;
}

Mask mask_of(const Tensor &mask, Sizes want) {
  Mask m;
  ScalarType type = mask.scalar_type();
  m.boolean = type == ScalarType::Bool;
  KVQ_CHECK(m.boolean || type == ScalarType::Float, "mask", "be bool or float32", dtype_name(type));
  auto sizes = mask.sizes(), strides = mask.strides();
  bool good = sizes.size() == 4 && in_place(mask);
  for (int i = 0; good && i < 4; i++) {
    good = sizes[i] == want.begin()[i] || sizes[i] == 1;
    m.stride[i] = sizes[i] == 1 ? 0 : strides[i];
  }
  KVQ_CHECK(good, "mask", "be on " + place() + " with the shape " + list_text(want),
            text(mask) + " on " + device_text(mask));
  m.data = mask.data_ptr();
  return m;
}

}  // namespace kvq
