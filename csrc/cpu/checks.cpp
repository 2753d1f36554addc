#include "checks.h"

#include <cstdlib>
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

std::string list_text(const std::vector<int64_t> &sizes) {
  std::ostringstream out;
  for (size_t i = 0; i < sizes.size(); i++) {
    out << (i ? ", " : "[");
    if (sizes[i] < 0)
      out << "*";
    else
      out << sizes[i];
  }
  out << (sizes.empty() ? "[]" : "]");
  return out.str();
}

void check_sizes(const std::string &name, const Tensor &x, const std::vector<int64_t> &sizes,
                 bool contiguous_last = true) {
  bool good = x.dim() == (int64_t)sizes.size();
  for (size_t i = 0; good && i < sizes.size(); i++) good = sizes[i] < 0 || x.size(i) == sizes[i];
  KVQ_CHECK(good, name, "have the shape " + list_text(sizes), text(x));
  KVQ_CHECK(x.is_cpu(), name, "be on the CPU", "another device");
  int64_t last = x.dim() - 1;
  if (contiguous_last)
    KVQ_CHECK(x.numel() == 0 || x.size(last) == 1 || x.stride(last) == 1, name, "have a contiguous last dim",
              "stride " + std::to_string(x.stride(last)));
}

void check_type(const std::string &name, const Tensor &x, ScalarType type) {
  KVQ_CHECK(x.scalar_type() == type, name, std::string("be ") + dtype_name(type), dtype_name(x.scalar_type()));
}

template <class T>
T *typed(const std::string &name, const Tensor &x, ScalarType type, const std::vector<int64_t> &sizes, int64_t *strides,
         int count) {
  check_type(name, x, type);
  check_sizes(name, x, sizes);
  for (int i = 0; i < count; i++) strides[i] = x.stride(i);
  return (T *)x.data_ptr();
}

// A per-head vector [B, H, D], broadcast from fewer or shorter leading dims; null if empty.
const float *per_head(const std::string &name, const Tensor &x, int64_t batch, int64_t heads, int64_t dim,
                      int64_t *strides) {
  strides[0] = strides[1] = 0;
  if (x.numel() == 0) return nullptr;
  check_type(name, x, ScalarType::Float);
  int64_t dims = x.dim(), want[2] = {batch, heads};
  bool good = dims >= 1 && dims <= 3 && x.size(dims - 1) == dim && (dim == 1 || x.stride(dims - 1) == 1);
  for (int64_t i = 0; good && i + 1 < dims; i++) {
    int64_t axis = i + 3 - dims, size = x.size(i);
    good = size == 1 || size == want[axis];
    strides[axis] = size == 1 ? 0 : x.stride(i);
  }
  KVQ_CHECK(good && x.is_cpu(), name,
            "be on the CPU with the shape " + list_text({batch, heads, dim}) + " and a contiguous last dim", text(x));
  return (const float *)x.data_ptr();
}

struct Arena {
  char *memory = nullptr;
  int64_t size = 0;
  ~Arena() { std::free(memory); }
  char *take(int64_t bytes) {
    if (bytes > size) {
      std::free(memory);
      size = round_up(bytes, 4096);
      memory = (char *)std::aligned_alloc(64, size);
      if (!memory) size = 0;
      STD_TORCH_CHECK(memory, "torch_kvq: out of memory for ", bytes, " bytes of scratch");
    }
    return memory;
  }
};

}  // namespace

std::string text(const Tensor &x) {
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < x.dim(); i++) sizes.push_back(x.size(i));
  return std::string(dtype_name(x.scalar_type())) + " " + list_text(sizes);
}

int64_t size_at(const Tensor &x, int64_t dim) { return dim < x.dim() ? x.size(dim) : -1; }

Dtype dtype_of(const char *name, const Tensor &x) {
  ScalarType type = x.scalar_type();
  bool good = type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half;
  KVQ_CHECK(good, name, "be float32, bfloat16 or float16", dtype_name(type));
  return type == ScalarType::Float ? FLOAT32 : type == ScalarType::BFloat16 ? BFLOAT16 : FLOAT16;
}

Dense dense_of(const char *name, const Tensor &x, std::vector<int64_t> sizes) {
  Dense dense;
  dense.dtype = dtype_of(name, x);
  check_sizes(name, x, sizes);
  for (int i = 0; i < 3; i++) dense.stride[i] = x.stride(i);
  dense.data = (char *)x.data_ptr();
  return dense;
}

float *floats_of(const char *name, const Tensor &x, std::vector<int64_t> sizes, int64_t *strides) {
  check_type(name, x, ScalarType::Float);
  check_sizes(name, x, sizes, false);
  for (size_t i = 0; i < sizes.size(); i++) strides[i] = x.stride(i);
  return (float *)x.data_ptr();
}

Rotation rotation_of(const Tensor &signs, const Tensor &blocks, const Tensor &matrix, int64_t dim) {
  KVQ_CHECK(dim >= 4 && dim <= MAX_HEAD_DIM && dim % 4 == 0, "head dim", "be a multiple of 4 from 4 to 512", dim);
  Rotation r = {(int)dim, 0, nullptr, nullptr, nullptr};
  auto part = [&](const char *name, const Tensor &x, std::vector<int64_t> sizes) -> const float * {
    if (x.numel() == 0) return nullptr;
    check_type(name, x, ScalarType::Float);
    check_sizes(name, x, sizes);
    KVQ_CHECK(x.is_contiguous(), name, "be contiguous", "strides that are not");
    return (const float *)x.data_ptr();
  };
  r.signs = part("signs", signs, {-1, dim});
  if (r.signs) r.rounds = (int)signs.size(0);
  r.blocks = part("blocks", blocks, {dim / 4, 4, 4});
  r.matrix = part("matrix", matrix, {dim, dim});
  return r;
}

Store store_of(const char *name, const Tensors &packed, bool along_tokens, int64_t batch, int64_t heads, int64_t tokens,
               int64_t dim) {
  std::string prefix = std::string(name) + ".";
  KVQ_CHECK(packed.size() == NUM_PACKED_FIELDS, name, "be nine tensors", packed.size());
  Store s;
  s.rotation = rotation_of(packed[SIGNS], packed[BLOCKS], packed[MATRIX], dim);
  s.dim = (int)dim;
  const Tensor &mag = packed[MAG], &levels = packed[LEVELS];
  s.bits = (int)size_at(mag, 3) + 1;
  KVQ_CHECK(s.bits >= MIN_BITS && s.bits <= MAX_BITS, prefix + "mag", "have 1 to 3 planes in dim 3", text(mag));
  int64_t capacity = size_at(packed[SCALE], 2), last = along_tokens ? dim : ceil_div(dim, WORD_BITS);
  KVQ_CHECK(capacity % BLOCK_LEN == 0, prefix + "scale", "have a capacity that is a multiple of 32",
            text(packed[SCALE]));
  KVQ_CHECK(tokens <= capacity, prefix + "scale", "have a capacity of at least " + std::to_string(tokens),
            text(packed[SCALE]));
  int64_t units = along_tokens ? capacity / BLOCK_LEN : capacity;
  s.sign =
      typed<uint32_t>(prefix + "sign", packed[SIGN], ScalarType::Int, {batch, heads, units, last}, s.sign_stride, 3);
  s.mag =
      typed<uint32_t>(prefix + "mag", mag, ScalarType::Int, {batch, heads, units, s.bits - 1, last}, s.mag_stride, 4);
  s.scale =
      typed<uint16_t>(prefix + "scale", packed[SCALE], ScalarType::Half, {batch, heads, capacity}, s.scale_stride, 2);
  check_type(prefix + "levels", levels, ScalarType::Float);
  check_sizes(prefix + "levels", levels, {1 << (s.bits - 1)});
  for (int i = 0; i < 1 << (s.bits - 1); i++) s.levels[i] = ((const float *)levels.data_ptr())[i];
  s.centre = per_head(prefix + "centre", packed[CENTRE], batch, heads, dim, s.centre_stride);
  s.balance = per_head(prefix + "balance", packed[BALANCE], batch, heads, dim, s.balance_stride);
  return s;
}

Mask mask_of(const Tensor &mask, const std::vector<int64_t> &sizes) {
  Mask m;
  m.boolean = mask.scalar_type() == ScalarType::Bool;
  KVQ_CHECK(m.boolean || mask.scalar_type() == ScalarType::Float, "mask", "be bool or float32",
            dtype_name(mask.scalar_type()));
  bool good = mask.dim() == 4 && mask.is_cpu();
  for (int i = 0; good && i < 4; i++) good = mask.size(i) == sizes[i] || mask.size(i) == 1;
  KVQ_CHECK(good, "mask", "be on the CPU with the shape " + list_text(sizes), text(mask));
  for (int i = 0; i < 4; i++) m.stride[i] = mask.size(i) == 1 ? 0 : mask.stride(i);
  m.data = mask.data_ptr();
  return m;
}

char *call_scratch(int64_t bytes) {
  static thread_local Arena arena;
  return arena.take(bytes);
}
char *worker_scratch(int64_t bytes) {
  static thread_local Arena arena;
  return arena.take(bytes);
}

}  // namespace kvq
