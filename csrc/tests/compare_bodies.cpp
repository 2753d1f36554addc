// Compares every body that the running machine can execute with the scalar one, on random and edge problems, without
// torch. Outputs start as NaN between sentinels, scratch as NaN, and behind inputs nothing can be read. Prints the
// worst difference of each function and exits with 1 if one is too large. tests/test_neon.py builds and runs it.
#include "bodies.h"
#include "cut.h"
#include "problems.h"

using namespace kvq;

namespace {

constexpr float TOLERANCE = 1e-5f, INTEGER_TOLERANCE = 1e-3f;
constexpr double CODE_SHARE = 1e-5;  // of codes may differ: those within rounding of a boundary

// What was compared of one function, and the worst difference.
struct Tally {
  const char *body, *function;
  int compared = 0, failed = 0;
  double worst = 0;
  void add(double difference, double allowed, const std::string &problem) {
    compared++;
    worst = difference > worst || difference != difference ? difference : worst;
    if (difference <= allowed) return;
    if (failed++ < 5) printf("%s %s: %g, allowed %g: %s\n", body, function, difference, allowed, problem.c_str());
  }
};

struct Worker {  // scratch of one task, NaN at first
  std::vector<char> memory;
  explicit Worker(int64_t pad) : memory(scratch_bytes(pad) + 64, (char)0xff) {}
  char *scratch() { return memory.data() + (64 - (uintptr_t)memory.data() % 64) % 64; }
};

using Code = void (*)(const Coding &, int64_t, int64_t, int64_t, char *);
void run_code(Code code, Packed &packed, const Dense &x, int64_t start, int64_t tokens, int rule) {
  Coding c = {packed.store(), packed.along_tokens, x, packed.batch, packed.heads, start, tokens, 0, rule};
  for (int64_t b = 0; b < packed.batch; b++)
    for (int64_t h = 0; h < packed.heads; h++)
      for (int64_t block = 0; tokens && block < ceil_div(start % TILE + tokens, TILE); block++) {
        Worker worker(round_up(packed.dim, TILE));
        code(c, b, h, block, worker.scratch());
      }
}

// Codes that differ, and scales by more than one unit in the last place of tokens whose codes do not explain it.
int64_t differing_codes(const Packed &a, const Packed &b) {
  int64_t codes = 0, scales = 0;
  for (size_t i = 0; i < a.sign.size(); i++) codes += __builtin_popcount(a.sign[i] ^ b.sign[i]);
  for (size_t i = 0; i < a.mag.size(); i++) codes += __builtin_popcount(a.mag[i] ^ b.mag[i]);
  for (size_t i = 0; i < a.scale.size(); i++) scales += std::abs(a.scale[i] - b.scale[i]) > 1;
  return codes + std::max<int64_t>(0, scales - codes);
}

using Task = void (*)(const Attention &, int64_t, char *);
void run_attention(const Kernels &k, Attention a, bool prepare, Task task, bool finish) {
  cut(a, prepare);
  std::vector<float> memory(place_scratch(a, nullptr) + 16, NAN);
  place_scratch(a, memory.data());
  int64_t pad = std::max(a.dim_pad, a.value_pad), tiles = ceil_div(a.batch * a.heads * a.rows, TILE);
  auto each = [&](int64_t count, Task run) {
    for (int64_t i = 0; i < count; i++) run(a, i, Worker(pad).scratch());
  };
  if (prepare) each(tiles, k.prepare);
  each(num_tasks(a), task);
  if (finish) each(tiles, k.finish);
}

struct Suite {
  const Body &body;
  const Kernels &ours = *body.kernels, &scalar = scalar_kernels;
  Tally converts{ours.name, "convert"}, rotates{ours.name, "rotate"}, encodes{ours.name, "encode"},
      decodes{ours.name, "decode"}, attends{ours.name, "attend"}, qks{ours.name, "qk"}, pvs{ours.name, "pv"},
      merges{ours.name, "merge"};

  // Rows through the identity: what is left is the conversion, which must be that of the scalar body bit for bit.
  void convert(const Vector<char> &rows, Dtype from, Dtype to) {
    constexpr int dim = MAX_HEAD_DIM;
    RotationData identity(dim, IDENTITY);
    int64_t count = rows.size() / element_bytes(from) / dim;
    for (int64_t row = 0; row < count; row++) {
      std::vector<char> out[2] = {std::vector<char>(dim * element_bytes(to)),
                                  std::vector<char>(dim * element_bytes(to))};
      const char *x = rows.data() + row * dim * element_bytes(from);
      for (int i = 0; i < 2; i++) {
        char *y = out[i].data();
        (i ? scalar : ours).rotate(identity.rotation, false, &x, from, &y, to, 1, Worker(dim).scratch());
      }
      int differ = 0;
      for (int i = 0; i < dim; i++) differ += !same(out[0].data(), out[1].data(), to, i);
      converts.add(differ, 0, "dtype " + std::to_string(from) + " to " + std::to_string(to));
    }
  }
  static bool same(const char *a, const char *b, Dtype dtype, int i) {
    if (dtype == FLOAT32) return same_word(((uint32_t *)a)[i], ((uint32_t *)b)[i], 0x7f800000);
    return same_word(((uint16_t *)a)[i], ((uint16_t *)b)[i], dtype == BFLOAT16 ? 0x7f80 : 0x7c00);
  }
  static bool same_word(uint32_t a, uint32_t b, uint32_t infinity) {
    uint32_t size = infinity | ((infinity & -infinity) - 1);
    return a == b || ((a & size) > infinity && (b & size) > infinity);  // any NaN for any NaN
  }
  void convert_all() {
    Vector<char> halves(2 << 16), floats(4 << 16);
    for (int i = 0; i < 1 << 16; i++) {
      uint32_t word = rng(), near_half = word_of(from_float16((uint16_t)i)) + 0x1000 + (int)(rng() % 3) - 1;
      word = i % 3 == 0 ? near_half : i % 3 == 1 ? (uint32_t)i << 16 | (0x7fff + rng() % 3) : word;
      memcpy(&halves[2 * i], &i, 2), memcpy(&floats[4 * i], &word, 4);
    }
    for (Dtype dtype : {BFLOAT16, FLOAT16}) convert(halves, dtype, FLOAT32), convert(floats, FLOAT32, dtype);
  }

  void rotate(int dim, RotationKind kind, Dtype dtype, int count) {
    RotationData rotation(dim, kind);
    Tensor x(dtype, 1, 1, count, dim, 0);
    for (bool inverse : {false, true}) {
      Output out[2] = {Output(count * dim), Output(count * dim)};
      for (int i = 0; i < 2; i++) {
        std::vector<const char *> rows;
        std::vector<char *> outs;
        for (int r = 0; r < count; r++) {
          rows.push_back(x.dense.data + r * dim * element_bytes(dtype));
          outs.push_back((char *)(out[i].data() + r * dim));
        }
        (i ? scalar : ours)
            .rotate(rotation.rotation, inverse, rows.data(), dtype, outs.data(), FLOAT32, count,
                    Worker(round_up(dim, TILE)).scratch());
      }
      rotates.add(difference(out[0], out[1], dim), TOLERANCE,
                  "D" + std::to_string(dim) + " kind " + std::to_string(kind));
    }
  }

  // A store of `tokens` random tokens, encoded in two pieces by the scalar body; ours must agree.
  Packed packed(const Problem &p, int dim, int bits, bool along_tokens) {
    Packed theirs(p.batch, p.heads, p.length, dim, bits, along_tokens, p.rotation, p.plain), mine = theirs;
    int64_t first = p.length / 3;
    int rule = rng() % NUM_SCALE_RULES;
    for (int piece = 0; piece < 2; piece++) {
      int64_t start = piece ? first : 0, tokens = piece ? p.length - first : first;
      Tensor x(p.dtype, p.batch, p.heads, tokens, dim, 4 * piece);
      if (tokens) memset(x.memory.data(), 0, dim * element_bytes(p.dtype));  // one token is zero
      run_code(scalar.encode, theirs, x.dense, start, tokens, rule);
      run_code(ours.encode, mine, x.dense, start, tokens, rule);
    }
    int64_t codes = p.batch * p.heads * p.length * dim;
    encodes.add(differing_codes(mine, theirs), std::ceil(CODE_SHARE * codes), p.text());
    int64_t tokens = p.length - first, size = p.batch * p.heads * tokens * dim;
    Output out[2] = {Output(size), Output(size)};
    for (int i = 0; i < 2; i++)
      run_code((i ? scalar : ours).decode, theirs, dense_of(out[i], p.heads, tokens, dim), first, tokens, 0);
    decodes.add(difference(out[0], out[1], dim), TOLERANCE, p.text());
    return theirs;
  }

  void attention(const Problem &p) {
    int64_t heads = p.heads * p.group, rows = p.batch * heads * p.queries, width = p.length + p.exact;
    Packed keys = packed(p, p.dim, p.bits, false), values = packed(p, p.value_dim, p.value_bits, true);
    Tensor q(p.dtype, p.batch, heads, p.queries, p.dim, 8), weights(p.dtype, p.batch, heads, p.queries, (int)width, 0);
    Tensor exact_keys(p.dtype, p.batch, p.heads, p.exact, p.dim, 0);
    Tensor exact_values(p.dtype, p.batch, p.heads, p.exact, p.value_dim, 4);
    if (p.bad) memset(q.memory.data(), 0xff, element_bytes(p.dtype));  // NaN
    MaskData mask(p.mask, p);
    Vector<float> sink_logits = normal(heads);
    Attention a{};
    a.keys = keys.store(), a.values = values.store(), a.shared = p.shared;
    a.q = q.dense, a.p = weights.dense, a.exact_keys = exact_keys.dense, a.exact_values = exact_values.dense;
    a.batch = p.batch, a.heads = p.heads, a.group = p.group, a.queries = p.queries;
    a.length = p.length, a.exact_len = p.exact, a.num_sinks = p.num_sinks;
    a.dim = p.dim, a.scale = 1 / std::sqrt((float)p.dim);

    Attention attend = a;
    attend.start = p.start, attend.softcap = p.softcap, attend.mask = mask.mask, attend.normalise = true;
    attend.sink_logits = p.sink_logits ? sink_logits.data() : nullptr;
    attend.value_dim = p.shared ? p.dim : p.value_dim;
    Output out[2] = {Output(rows * attend.value_dim), Output(rows * attend.value_dim)},
           lse[2] = {Output(rows), Output(rows)};
    for (int i = 0; i < 2; i++) {
      attend.out = dense_of(out[i], heads, p.queries, attend.value_dim), attend.lse = lse[i].data();
      attend.lse_stride[0] = heads * p.queries, attend.lse_stride[1] = p.queries, attend.lse_stride[2] = 1;
      const Kernels &k = i ? scalar : ours;
      run_attention(k, attend, true, k.attend, true);
    }
    float allowed = body.integer ? INTEGER_TOLERANCE : TOLERANCE;
    attends.add(difference(out[0], out[1], attend.value_dim), allowed, p.text());
    attends.add(difference(lse[0], lse[1], rows), allowed, p.text());
    if (p.shared) return;

    Output scores[2] = {Output(rows * width), Output(rows * width)},
           sums[2] = {Output(rows * p.value_dim), Output(rows * p.value_dim)};
    Attention half = a;
    for (int i = 0; i < 2; i++) {
      const Kernels &k = i ? scalar : ours;
      half.value_dim = 0, half.out = dense_of(scores[i], heads, p.queries, width);
      run_attention(k, half, true, k.qk, false);
      half.value_dim = p.value_dim, half.out = dense_of(sums[i], heads, p.queries, p.value_dim);
      run_attention(k, half, false, k.pv, true);
    }
    if (width) qks.add(difference(scores[0], scores[1], width), TOLERANCE, p.text());
    pvs.add(difference(sums[0], sums[1], p.value_dim), TOLERANCE, p.text());
  }

  void merge(int dim, Dtype dtype, int64_t pieces) {
    constexpr int64_t heads = 3, queries = 2, batch = 2, rows = batch * heads * queries;
    Tensor outs(dtype, pieces * batch, heads, queries, dim, 4);
    Vector<float> lses = normal(pieces * rows, 5);
    for (int64_t i = 0; i < pieces * rows; i++)
      if (i % rows == 1 || (i % rows == 2 && i < rows)) lses[i] = -INFINITY;  // of all pieces, of one
    Output out[2] = {Output(rows * dim), Output(rows * dim)}, lse[2] = {Output(rows), Output(rows)};
    const int64_t *step = outs.dense.stride;
    for (int i = 0; i < 2; i++) {
      Pieces p = {pieces,
                  batch,
                  heads,
                  queries,
                  dim,
                  outs.dense.data,
                  dtype,
                  {batch * step[0], step[0], step[1], step[2]},
                  lses.data(),
                  {rows, heads * queries, queries, 1},
                  dense_of(out[i], heads, queries, dim),
                  lse[i].data(),
                  {heads * queries, queries, 1}};
      for (int64_t row = 0; row < rows; row++) (i ? scalar : ours).merge(p, row, Worker(round_up(dim, TILE)).scratch());
    }
    merges.add(difference(out[0], out[1], dim), TOLERANCE, "D" + std::to_string(dim));
    merges.add(difference(lse[0], lse[1], rows), TOLERANCE, "lse, D" + std::to_string(dim));
  }

  bool report() const {
    int failed = 0;
    for (const Tally *t : {&converts, &rotates, &encodes, &decodes, &attends, &qks, &pvs, &merges}) {
      printf("%-10s %-8s %5d compared, %d failed, worst %.1e\n", t->body, t->function, t->compared, t->failed,
             t->worst);
      failed += t->failed + (t->compared == 0);
    }
    return failed == 0;
  }
};

bool agrees(const Body &body) {
  Suite suite{body};
  suite.convert_all();
  for (int dim : {4, 12, 64, 80, 96, 128, 256, 512})
    for (RotationKind kind : {IDENTITY, MIXED_BLOCKS, TWO_ROUNDS, DENSE})
      suite.rotate(dim, kind, pick({FLOAT32, BFLOAT16, FLOAT16}), pick({1, 31, 32}));
  for (int dim : {12, 64, 80, 96, 128, 256})
    for (int bits = MIN_BITS; bits <= MAX_BITS; bits++)
      for (int64_t length : {0, 1, 31, 32, 33, 513}) suite.attention(problem_of(dim, bits, length));
  Problem longest = problem_of(64, 3, 2100);  // more than one split
  longest.mask = NO_MASK, longest.exact = 1100, longest.start = 0, longest.shared = longest.bad = false;
  suite.attention(longest);
  for (int dim : {1, 12, 80, 128, 512})
    for (Dtype dtype : {FLOAT32, BFLOAT16, FLOAT16}) suite.merge(dim, dtype, pick({1, 2, 5}));
  return suite.report();
}

}  // namespace

int main() {
  bool good = true;
  for (const Body &body : bodies_here())
    if (body.kernels != &scalar_kernels) good &= agrees(body);
  printf(good ? "all agree with scalar\n" : "DIFFERENT\n");
  return good ? 0 : 1;
}
