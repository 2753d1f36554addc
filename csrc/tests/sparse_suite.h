// The functions of sparse attention of one body against the scalar one. A part of compare_bodies.cpp.
#pragma once

struct SparseProblem {
  int64_t batch, heads, group, queries, tokens;
  int dim, value_dim, bits, mask;
  bool plain, centred, packed, by_head, half;
  float softcap;
  Dtype dtype;
  RotationKind rotation;
  std::string text() const {
    char line[256];
    snprintf(line, sizeof line,
             "B%d G%d M%d T%d D%d-%d bits %d mask %d plain %d centred %d packed %d by head %d half %d softcap %g "
             "dtype %d rotation %d",
             (int)batch, (int)group, (int)queries, (int)tokens, dim, value_dim, bits, mask, plain, centred, packed,
             by_head, half, softcap, dtype, rotation);
    return line;
  }
};

SparseProblem sparse_problem_of(int dim, int64_t tokens) {
  SparseProblem p{};
  p.batch = pick({1, 2}), p.heads = 2, p.group = pick({1, 3, 4}), p.queries = pick({1, 1, 2, 5}), p.tokens = tokens;
  p.dim = dim, p.value_dim = rng() % 4 ? dim : 48, p.bits = pick({2, 3, 4}), p.mask = rng() % NUM_MASKS;
  p.plain = rng() % 4 == 0, p.centred = rng() % 2, p.packed = rng() % 2, p.by_head = rng() % 3 == 0;
  p.half = rng() % 2, p.softcap = rng() % 4 ? 0 : 5;
  p.dtype = pick({FLOAT32, BFLOAT16, FLOAT16});
  p.rotation = pick({IDENTITY, MIXED_BLOCKS, TWO_ROUNDS, DENSE});
  return p;
}

// What the scalar body makes of queries and keys, and what ours does.
struct SparseSuite {
  const Kernels &ours, &scalar = scalar_kernels;
  Tally queries{ours.name, "quantise_query"}, indices{ours.name, "index_keys"}, scores{ours.name, "sign_scores"},
      selects{ours.name, "top_p_select"}, qks{ours.name, "qk_selected"}, attends{ours.name, "attend_selected"};

  struct Coded {
    Vector<uint32_t> planes;
    Vector<float> terms;
    QueryCode code;
    explicit Coded(const SparseProblem &p) {
      int64_t words = ceil_div(p.dim, WORD_BITS), heads = p.heads * p.group, rows = p.batch * heads * p.queries;
      planes.assign(rows * QUERY_BITS * words, 0xffffffffu), terms.assign(rows * 4, NAN);
      int64_t row = QUERY_BITS * words;
      code = {planes.data(),
              {heads * p.queries * row, p.queries * row, row, words},
              terms.data(),
              {heads * p.queries * 4, p.queries * 4, 4}};
    }
  };
  struct Indexed {
    Vector<uint32_t> sign;
    Vector<uint16_t> factor, bias;
    SignIndex index;
    explicit Indexed(const SparseProblem &p) {
      int64_t words = ceil_div(p.dim, WORD_BITS), rows = p.batch * p.heads * p.tokens;
      sign.assign(rows * words, 0xffffffffu), factor.assign(rows, 0x7e00), bias.assign(p.centred ? rows : 0, 0x7e00);
      index = {sign.data(),
               {p.heads * p.tokens * words, p.tokens * words, words},
               factor.data(),
               p.centred ? bias.data() : nullptr,
               {p.heads * p.tokens, p.tokens},
               {p.heads * p.tokens, p.tokens}};
    }
  };

  void run(const SparseProblem &p) {
    int64_t heads = p.heads * p.group;
    Tensor q(p.dtype, p.batch, heads, p.queries, p.dim, 8), x(p.dtype, p.batch, p.heads, p.tokens, p.dim, 4);
    Vector<float> vectors[3] = {normal(p.batch * p.heads * p.dim), normal(p.batch * p.heads * p.dim, 0.3f),
                                normal(p.batch * p.heads * p.dim, 0.1f, 1)};
    HeadVectors given[3];
    for (int i = 0; i < 3; i++)
      given[i] = {(i ? p.plain : !p.centred) ? nullptr : vectors[i].data(), {p.heads * p.dim, p.dim}};
    RotationData rotation(p.dim, p.rotation);
    Coded mine(p), theirs(p);
    Indexed my_index(p), index(p);
    for (int i = 0; i < 2; i++) {
      const Kernels &k = i ? scalar : ours;
      const QueryCode &code = i ? theirs.code : mine.code;
      QueryCoding coding = {q.dense, given[0], given[1], given[2], rotation.rotation, 0.125f,
                            code,    p.batch,  p.heads,  p.group,  p.queries,         p.dim};
      for (int64_t tile = 0; tile < ceil_div(p.batch * heads * p.queries, TILE); tile++)
        k.quantise_query(coding, tile, Worker(round_up(p.dim, TILE)).scratch());
      int64_t first = p.tokens / 3;
      for (int piece = 0; piece < 2; piece++) {
        int64_t start = piece ? first : 0, count = piece ? p.tokens - first : first;
        Dense part = x.dense;
        part.data += start * part.stride[2] * element_bytes(p.dtype);
        Indexing n = {part,    given[0], given[1], given[2], rotation.rotation, i ? index.index : my_index.index,
                      p.batch, p.heads,  start,    count,    0,                 p.dim};
        for (int64_t b = 0; b < p.batch; b++)
          for (int64_t h = 0; h < p.heads; h++)
            for (int64_t block = 0; count && block < ceil_div(start % TILE + count, TILE); block++)
              k.index_keys(n, b, h, block, Worker(round_up(p.dim, TILE)).scratch());
      }
    }
    compare(p, mine, theirs, my_index, index);
    std::vector<float> estimates = score(p, theirs, index);
    select(p, estimates);
    attend(p, q);
  }

  void compare(const SparseProblem &p, const Coded &a, const Coded &b, const Indexed &c, const Indexed &d) {
    int64_t codes = 0, signs = 0;
    for (size_t i = 0; i < a.planes.size(); i++) codes += __builtin_popcount(a.planes[i] ^ b.planes[i]) > 0;
    queries.add(codes, std::ceil(1e-3 * a.planes.size()), "codes, " + p.text());
    for (size_t i = 0; i < a.terms.size(); i++) {
      float allowed = i % 4 == 2 ? 8 : 1e-4f;  // the sum of codes moves by a code that differs
      queries.add(std::fabs(a.terms[i] - b.terms[i]), allowed, "terms, " + p.text());
    }
    for (size_t i = 0; i < c.sign.size(); i++) signs += __builtin_popcount(c.sign[i] ^ d.sign[i]);
    indices.add(signs, std::ceil(CODE_SHARE * 32 * c.sign.size()), "signs, " + p.text());
    for (size_t i = 0; i < c.factor.size(); i++) {
      indices.add(std::abs(c.factor[i] - d.factor[i]), 1, "factor, " + p.text());
      if (!c.bias.empty())
        indices.add(std::fabs(from_float16(c.bias[i]) - from_float16(d.bias[i])), 0.02, "bias, " + p.text());
    }
  }

  // Bit-equal, of the same code and index.
  std::vector<float> score(const SparseProblem &p, const Coded &coded, const Indexed &indexed) {
    int64_t heads = p.heads * p.group, start = p.tokens / 4, count = p.tokens - start;
    int64_t rows = p.batch * heads * p.queries;
    Output out[2] = {Output(rows * count), Output(rows * count)};
    for (int i = 0; i < 2; i++) {
      SignScan s = {coded.code, indexed.index, dense_of(out[i], heads, p.queries, count),
                    0.125f,     p.batch,       p.heads,
                    p.group,    p.queries,     start,
                    count,      p.dim};
      if (p.half) s.out.dtype = FLOAT16;
      for (int64_t task = 0; task < p.batch * p.heads * ceil_div(count, SCAN_LEN); task++)
        (i ? scalar : ours).sign_scores(s, task, Worker(round_up(p.dim, TILE)).scratch());
    }
    int64_t differ = !out[0].fenced();
    const uint32_t *a = (uint32_t *)out[0].data(), *b = (uint32_t *)out[1].data();
    for (int64_t i = 0; i < rows * count / (p.half ? 2 : 1); i++) differ += a[i] != b[i];
    scores.add(differ, 0, p.text());
    std::vector<float> found(rows * count);
    for (int64_t i = 0; i < rows * count; i++)
      found[i] = p.half ? from_float16(((uint16_t *)out[1].data())[i]) : out[1].data()[i];
    return found;
  }

  // The columns that each selection keeps, and the totals of the rows.
  void select(const SparseProblem &p, const std::vector<float> &estimates) {
    int64_t heads = p.heads * p.group, rows = p.batch * heads * p.queries, columns = (int64_t)estimates.size() / rows;
    if (!columns) return;
    Vector<float> given(estimates.begin(), estimates.end()), lse = normal(rows, 2, 1);
    int kinds = rng() % 4;
    for (float &v : given) v = kinds == 0 && rng() % 4 == 0 ? -INFINITY : kinds == 1 ? std::round(v) : v;
    if (kinds == 2) given[0] = NAN, given[columns - 1] = INFINITY;
    TopP t{};
    t.scores = {(char *)given.data(), FLOAT32, {heads * p.queries * columns, p.queries * columns, columns}};
    t.exact_lse = lse.data(), t.lse_stride[0] = heads * p.queries, t.lse_stride[1] = p.queries, t.lse_stride[2] = 1;
    t.top_p = pick({0.0f, 0.5f, 0.9f, 1.0f}), t.batch = p.batch, t.query_heads = heads, t.queries = p.queries;
    t.columns = columns, t.selection.selections = p.by_head ? heads : p.heads;
    std::vector<RowCut> cuts[2];
    std::vector<uint32_t> kept[2];
    int64_t words = ceil_div(columns, TILE), selections = p.batch * t.selection.selections;
    for (int i = 0; i < 2; i++) {
      const Kernels &k = i ? scalar : ours;
      std::vector<char> memory(select_scratch_bytes(columns) + 64, (char)0xff);
      for (int64_t row = 0; row < rows; row++) cuts[i].push_back(k.select_row(t, row, memory.data()));
      kept[i].resize(words * selections);
      for (int64_t s = 0; s < selections; s++)
        k.select_union(t, cuts[i].data(), s, kept[i].data() + s * words, memory.data());
      std::vector<float> shares(select_row_len(columns));
      k.select_shares(t, cuts[i].data(), 0, shares.data(), memory.data());
    }
    for (int64_t row = 0; row < rows; row++) {
      selects.add(cuts[0][row].threshold != cuts[1][row].threshold, 0, "threshold, " + p.text());
      selects.add(std::fabs(cuts[0][row].total - cuts[1][row].total), 1e-4, "total, " + p.text());
    }
    selects.add(kept[0] != kept[1], 0, "columns, " + p.text());
  }

  void attend(const SparseProblem &p, const Tensor &q) {
    int64_t heads = p.heads * p.group, rows = p.batch * heads * p.queries, selections = p.by_head ? heads : p.heads;
    int64_t capacity = p.tokens + 3;
    Vector<int32_t> indices(p.batch * selections * capacity, 0x7fffffff), count(p.batch * selections, 0);
    for (int64_t s = 0; s < p.batch * selections; s++)
      for (int64_t i = 0; i < p.tokens; i++)
        if (rng() % 3 == 0) indices[s * capacity + count[s]++] = (int32_t)i;
    Packed keys(p.batch, p.heads, p.tokens, p.dim, p.bits, false, p.rotation, p.plain),
        values(p.batch, p.heads, p.tokens, p.value_dim, p.bits, false, p.rotation, p.plain);
    for (Packed *store : {&keys, &values}) {
      Tensor x(FLOAT32, p.batch, p.heads, p.tokens, store->dim, 0);
      run_code(scalar.encode, *store, x.dense, 0, p.tokens, MATCHED);
    }
    Tensor exact_keys(p.dtype, p.batch, p.heads, p.tokens, p.dim, 0),
        exact_values(p.dtype, p.batch, p.heads, p.tokens, p.value_dim, 4);
    Problem masked{};
    masked.batch = p.batch, masked.heads = p.heads, masked.group = p.group, masked.queries = p.queries;
    masked.length = p.tokens;
    MaskData mask(p.mask, masked);
    Selected s{};
    s.packed_keys = s.packed_values = p.packed, s.tokens = p.tokens;
    s.selection = {indices.data(), count.data(), {selections * capacity, capacity}, selections, selections, capacity};
    Attention &a = s.attention;
    a.keys = keys.store(), a.values = values.store(), a.exact_keys = exact_keys.dense;
    a.exact_values = exact_values.dense, a.q = q.dense, a.batch = p.batch, a.heads = p.heads, a.group = p.group;
    a.queries = p.queries, a.dim = p.dim, a.scale = 1 / std::sqrt((float)p.dim), a.by_head = p.by_head;
    if (!p.packed) a.keys = a.values = Store{};
    (p.packed ? a.length : a.exact_len) = capacity;
    Output scored[2] = {Output(rows * capacity), Output(rows * capacity)};
    Output out[2] = {Output(rows * p.value_dim), Output(rows * p.value_dim)}, lse[2] = {Output(rows), Output(rows)};
    for (int i = 0; i < 2; i++) {
      const Kernels &k = i ? scalar : ours;
      a.value_dim = 0, a.normalise = false, a.mask = Mask{}, a.softcap = 0;
      a.out = dense_of(scored[i], heads, p.queries, capacity);
      auto score = [&](const Attention &x, int64_t task, char *memory) { k.qk_selected(s, x, task, memory); };
      auto attend = [&](const Attention &x, int64_t task, char *memory) { k.attend_selected(s, x, task, memory); };
      run_attention(k, a, true, score, false);
      a.value_dim = p.value_dim, a.normalise = true, a.mask = mask.mask, a.softcap = p.softcap;
      a.out = dense_of(out[i], heads, p.queries, p.value_dim), a.lse = lse[i].data();
      a.lse_stride[0] = heads * p.queries, a.lse_stride[1] = p.queries, a.lse_stride[2] = 1;
      run_attention(k, a, true, attend, true);
    }
    qks.add(difference(scored[0], scored[1], capacity), TOLERANCE, p.text());
    attends.add(difference(out[0], out[1], p.value_dim), TOLERANCE, p.text());
    attends.add(difference(lse[0], lse[1], rows), TOLERANCE, p.text());
  }

  std::vector<const Tally *> tallies() const { return {&queries, &indices, &scores, &selects, &qks, &attends}; }
};
