// Random and edge problems for the bodies as plain structs with the memory behind them, and outputs to compare.
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "kernels.h"

#define INLINE static inline
#include "body_float16.h"

namespace kvq {

constexpr int FENCE = 64;
constexpr float SENTINEL = 12345;

// Memory that ends where the readable memory does, so that a read behind an input is a crash.
template <class T>
struct Guarded {
  using value_type = T;
  static constexpr size_t PAGE = 1 << 16;  // a multiple of what machines have
  static size_t bytes(size_t n) { return (n * sizeof(T) + PAGE - 1) / PAGE * PAGE; }
  T *allocate(size_t n) {
    char *memory = (char *)mmap(nullptr, bytes(n) + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory + bytes(n), PAGE, PROT_NONE)) abort();
    return (T *)(memory + bytes(n)) - n;
  }
  void deallocate(T *x, size_t n) { munmap((char *)(x + n) - bytes(n), bytes(n) + PAGE); }
  bool operator==(const Guarded &) const { return true; }
  bool operator!=(const Guarded &) const { return false; }
};
template <class T>
using Vector = std::vector<T, Guarded<T>>;

std::mt19937 rng(7);
Vector<float> normal(int64_t n, float size = 1, float mean = 0) {
  std::normal_distribution<float> draw(mean, size);
  Vector<float> x(n);
  for (float &v : x) v = draw(rng);
  return x;
}
template <class T>
T pick(std::initializer_list<T> from) {
  return from.begin()[rng() % from.size()];
}

int element_bytes(Dtype dtype) { return dtype == FLOAT32 ? 4 : 2; }

// Floats between two fences, NaN at first.
struct Output {
  std::vector<float> all;
  explicit Output(int64_t n) : all(n + 2 * FENCE, NAN) {
    for (int i = 0; i < FENCE; i++) all[i] = all[all.size() - 1 - i] = SENTINEL;
  }
  float *data() { return all.data() + FENCE; }
  int64_t size() const { return (int64_t)all.size() - 2 * FENCE; }
  bool fenced() const {
    for (int i = 0; i < FENCE; i++)
      if (all[i] != SENTINEL || all[all.size() - 1 - i] != SENTINEL) return false;
    return true;
  }
};

// The largest difference in a row relative to the largest coordinate of that row, but at least a tenth of that of any;
// infinite where one is finite and the other is not, or a fence is broken.
double difference(Output &ours, Output &theirs, int64_t row) {
  if (!ours.fenced()) return INFINITY;
  float most = 1e-30f;
  for (int64_t i = 0; i < theirs.size(); i++)
    if (std::isfinite(theirs.data()[i])) most = std::max(most, std::fabs(theirs.data()[i]));
  double worst = 0;
  for (int64_t first = 0; first < theirs.size(); first += row) {
    float size = most / 10, error = 0;
    for (int64_t i = first; i < first + row; i++) {
      float a = ours.data()[i], b = theirs.data()[i];
      if (std::isnan(b) ? !std::isnan(a) : std::isinf(b) ? a != b : !std::isfinite(a)) return INFINITY;
      if (!std::isfinite(b)) continue;
      size = std::max(size, std::fabs(b)), error = std::max(error, std::fabs(a - b));
    }
    worst = std::max(worst, (double)error / size);
  }
  return worst;
}

// A tensor [batch, heads, tokens, dim] whose rows lie `gap` elements apart.
struct Tensor {
  Vector<char> memory;
  Dense dense;
  Tensor(Dtype dtype, int64_t batch, int64_t heads, int64_t tokens, int dim, int gap) {
    int64_t stride = dim + gap, rows = batch * heads * tokens;
    Vector<float> values = normal(rows * dim);
    memory.assign(rows ? (rows * stride - gap) * element_bytes(dtype) : 0, (char)0xff);
    dense = {memory.data(), dtype, {heads * tokens * stride, tokens * stride, stride}};
    for (int64_t i = 0; i < rows * dim; i++) {
      char *to = memory.data() + element_bytes(dtype) * (i / dim * stride + i % dim);
      uint16_t half = dtype == BFLOAT16 ? to_bfloat16(values[i]) : to_float16(values[i]);
      memcpy(to, dtype == FLOAT32 ? (void *)&values[i] : &half, element_bytes(dtype));
    }
  }
};
Dense dense_of(Output &x, int64_t heads, int64_t tokens, int64_t dim) {
  return {(char *)x.data(), FLOAT32, {heads * tokens * dim, tokens * dim, dim}};
}

enum RotationKind { IDENTITY, MIXED_BLOCKS, TWO_ROUNDS, DENSE };
struct RotationData {
  Vector<float> signs, blocks, matrix;
  Rotation rotation;
  RotationData(int dim, RotationKind kind) {
    int rounds = kind == MIXED_BLOCKS ? 1 : kind == TWO_ROUNDS ? 2 : 0;
    signs = normal(rounds * dim);
    for (float &x : signs) x = x < 0 ? -1 : 1;
    if (kind == MIXED_BLOCKS) blocks = normal(4 * dim, 0.5f);
    if (kind == DENSE) matrix = normal((int64_t)dim * dim, 1 / std::sqrt((float)dim));
    rotation = {dim, rounds, signs.data(), blocks.empty() ? nullptr : blocks.data(),
                matrix.empty() ? nullptr : matrix.data()};
  }
};

const float CODEBOOKS[3][MAX_LEVELS] = {{.4528f, 1.5104f},
                                        {.2451f, .756f, 1.344f, 2.152f},
                                        {.1284f, .3881f, .6568f, .9424f, 1.2562f, 1.6181f, 2.0690f, 2.7326f}};

// A store that holds junk until it is encoded.
struct Packed {
  int64_t batch, heads, capacity;
  bool along_tokens;
  Vector<uint32_t> sign, mag;
  Vector<uint16_t> scale;
  Vector<float> centre, balance;
  RotationData rotation;
  int dim, bits;
  Packed(int64_t batch, int64_t heads, int64_t tokens, int dim, int bits, bool along, RotationKind kind, bool plain)
      : batch(batch),
        heads(heads),
        capacity(round_up(tokens, TILE)),
        along_tokens(along),
        rotation(dim, kind),
        dim(dim),
        bits(bits) {
    int64_t units = batch * heads * (along ? capacity / TILE : capacity), width = along ? dim : ceil_div(dim, 32);
    sign.resize(units * width), mag.resize(units * width * (bits - 1)), scale.assign(batch * heads * capacity, 0x7e00);
    for (auto *words : {&sign, &mag})
      for (uint32_t &word : *words) word = rng();
    if (plain) return;
    centre = normal(batch * heads * dim, 0.3f), balance = normal(batch * heads * dim, 0.1f, 1);
  }
  Store store() {
    int64_t units = along_tokens ? capacity / TILE : capacity, width = along_tokens ? dim : ceil_div(dim, 32);
    int64_t planes = bits - 1, head = units * width;
    Store s = {dim,
               bits,
               sign.data(),
               mag.data(),
               scale.data(),
               {heads * head, head, width},
               {heads * head * planes, head * planes, width * planes, width},
               {heads * capacity, capacity},
               {},
               nullptr,
               centre.empty() ? nullptr : centre.data(),
               balance.empty() ? nullptr : balance.data(),
               {heads * dim, dim},
               {heads * dim, dim},
               rotation.rotation};
    memcpy(s.levels, CODEBOOKS[bits - 2], sizeof s.levels);
    return s;
  }
};

struct Problem {
  int64_t batch, heads, group, queries, length, exact, num_sinks, start;
  int dim, value_dim, bits, value_bits, mask;
  float softcap;
  bool sink_logits, shared, plain, bad;
  Dtype dtype;
  RotationKind rotation;
  std::string text() const {
    char line[256];
    snprintf(
        line, sizeof line,
        "B%d G%d M%d T%d+%d sinks %d start %d D%d-%d bits %d-%d mask %d softcap %g sink logits %d shared %d plain %d "
        "bad %d dtype %d rotation %d",
        (int)batch, (int)group, (int)queries, (int)length, (int)exact, (int)num_sinks, (int)start, dim, value_dim, bits,
        value_bits, mask, softcap, sink_logits, shared, plain, bad, dtype, rotation);
    return line;
  }
};

enum MaskKind { NO_MASK, BOOL_MASK, FLOAT_MASK, SHARED_MASK, DEAD_MASK, NUM_MASKS };
struct MaskData {
  Vector<uint8_t> seen;
  Vector<float> added;
  Mask mask{};
  MaskData(int kind, const Problem &p) {
    if (kind == NO_MASK) return;
    int64_t heads = p.heads * p.group, width = p.length + p.exact, rows = p.batch * heads * p.queries;
    seen.resize(rows * width), added.resize(rows * width);
    for (int64_t i = 0; i < rows * width; i++) {
      bool dead = kind == DEAD_MASK && i / width % p.queries == 0;
      seen[i] = !dead && rng() % 4 > 0;
      added[i] = seen[i] ? (float)(rng() % 100) / 50 : -INFINITY;
    }
    mask = {kind == FLOAT_MASK ? (void *)added.data() : seen.data(),
            kind != FLOAT_MASK,
            {heads * p.queries * width, kind == SHARED_MASK ? 0 : p.queries * width, width, 1}};
  }
};

Problem problem_of(int dim, int bits, int64_t length) {
  Problem p{};
  p.batch = pick({1, 2}), p.heads = 2, p.group = pick({1, 3, 4, 8}), p.queries = pick({1, 1, 2, 5});
  p.dim = dim, p.value_dim = rng() % 4 ? dim : pick({48, 64, 192}), p.bits = bits, p.value_bits = pick({2, 3, 4});
  p.length = length, p.exact = pick({0, 4, 20, 77}), p.num_sinks = p.exact ? pick({0, 4}) : 0;
  p.start = rng() % 3 ? 0 : rng() % (length + 1);
  p.mask = rng() % NUM_MASKS, p.softcap = rng() % 4 ? 0 : 5, p.sink_logits = rng() % 3 == 0;
  p.shared = rng() % 5 == 0, p.plain = rng() % 4 == 0, p.bad = rng() % 12 == 0;
  p.dtype = pick({FLOAT32, BFLOAT16, FLOAT16});
  p.rotation = pick({IDENTITY, MIXED_BLOCKS, MIXED_BLOCKS, TWO_ROUNDS, DENSE});
  if (length > 100) p.batch = 1, p.rotation = MIXED_BLOCKS;  // an emulator is slow
  return p;
}

}  // namespace kvq
