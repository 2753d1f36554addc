"""Every operator of the package, declared once. Kernels write to the ``out`` arguments and never allocate.

Shapes: ``B`` sequences, ``H`` key/value heads, ``Hq = G * H`` query heads, ``M`` query tokens, ``D`` head dim, ``Dv`` the
values' head dim. ``x``, ``q``, ``p`` and exact keys and values are float32, bfloat16 or float16 with a contiguous last
dim. A packed store is passed as the nine tensors of ``layout.PACKED_FIELDS``; a part that is absent is an empty tensor.
It stands for ``centre + balance * R^T(scale * value(code))`` with the rotation ``R`` of ``codecs/rotation.py``.

Token order of a layer, which is also the column order of masks and scores: ``num_sinks`` exact sinks, ``length`` packed
tokens, then the other exact tokens. ``exact_keys [B, H, E, D]`` holds sinks and recent tokens side by side, so column
``c`` is exact slot ``c`` below ``num_sinks`` and exact slot ``c - length`` from ``num_sinks + length`` on.
"""

import torch

NAMESPACE = "torch_kvq"

DENSE_SCHEMAS = (
    # out = R x, or R^T x with inverse. signs [rounds, D], blocks [D/4, 4, 4] or empty, matrix [D, D] or empty.
    "rotate(Tensor x, Tensor signs, Tensor blocks, Tensor matrix, bool inverse, Tensor(a!) out) -> ()",
    # Quantises x [B, H, N, D] into tokens start .. start+N of a store. rule: index into SCALE_RULES.
    "encode(Tensor x, Tensor levels, Tensor centre, Tensor balance, Tensor signs, Tensor blocks, Tensor matrix, int rule,"
    " bool along_tokens, int start, Tensor(a!) sign, Tensor(b!) mag, Tensor(c!) scale) -> ()",
    # Rebuilds tokens start .. start+N of a store into out [B, H, N, D].
    "decode(Tensor[] packed, bool along_tokens, int start, Tensor(a!) out) -> ()",
    # Softmax attention of q [B, Hq, M, D] over sinks, packed tokens start .. length and recent tokens. No values: the keys
    # are the values (MLA latents). mask [B, Hq, M, T] bool (True = attend) or float32 (added), any broadcast by stride 0.
    # sink_logits [Hq] float32 join the denominator only. softcap 0 is off. out [B, Hq, M, Dv], lse [B, Hq, M] float32.
    "attend(Tensor q, Tensor[] keys, Tensor[] values, Tensor exact_keys, Tensor exact_values, Tensor? mask,"
    " Tensor? sink_logits, int start, int length, int num_sinks, float scale, float softcap, Tensor(a!) out, Tensor(b!) lse)"
    " -> ()",
    # Unscaled scores q . k of q [B, Hq, M, D] against every token: out [B, Hq, M, T].
    "qk(Tensor q, Tensor[] keys, Tensor exact_keys, int length, int num_sinks, Tensor(a!) out) -> ()",
    # Weighted sum of values by p [B, Hq, M, T]: out [B, Hq, M, Dv].
    "pv(Tensor p, Tensor[] values, Tensor exact_values, int length, int num_sinks, Tensor(a!) out) -> ()",
    # Attention over the union of pieces: outs [P, B, Hq, M, Dv], lses [P, B, Hq, M] -> out, lse. Where a lse is -inf the piece
    # has no share, whatever its out.
    "merge(Tensor outs, Tensor lses, Tensor(a!) out, Tensor(b!) lse) -> ()",
)

# Sparse attention (RaBitQCache): estimate logits from the signs of the keys, select tokens by probability mass, attend to them.
# W = ceil(D / 32) words, L tokens that can be selected, S the capacity of a selection. A selection is ``indices [B, K, S]``
# int32, ascending, of which ``count [B, K]`` int32 are valid and the rest is never read; K is H (one selection for the query
# heads of a kv head) or Hq (one a query head). ``keys`` and ``values`` that are selected from are either one tensor
# [B, H, C, D] or the nine of a packed store, both packed along D.
SPARSE_SCHEMAS = (
    # 4-bit codes of y = R (balance * (q - query_centre)), u = round((y - min(y)) / delta), half to even, delta = (max(y) -
    # min(y)) / 15. planes [B, Hq, M, 4, W] int32: plane j holds bit j of u in the layout of keys. terms [B, Hq, M, 4] float32:
    # scale * delta, scale * min(y), sum(u), scale * q . centre. Constant y: u = 0. Not finite: planes 0, terms NaN.
    # query_centre, centre, balance [B, H, D] or empty.
    "quantise_query(Tensor q, Tensor query_centre, Tensor centre, Tensor balance, Tensor signs, Tensor blocks, Tensor matrix,"
    " float scale, Tensor(a!) planes, Tensor(b!) terms) -> ()",
    # Index of keys x [B, H, N, D] at tokens start .. start+N, with y = R ((x - centre) / balance): sign [B, H, C, W] int32 as
    # in a packed store (1 = negative; empty: not written, a packed store has it), factor [B, H, C] float16 = |y|^2 / sum |y_i|
    # (0 for y = 0), bias [B, H, C] float16 = query_centre . (x - centre) (empty with query_centre: not written).
    "index_keys(Tensor x, Tensor query_centre, Tensor centre, Tensor balance, Tensor signs, Tensor blocks, Tensor matrix,"
    " int start, Tensor(a!) sign, Tensor(b!) factor, Tensor(c!) bias) -> ()",
    # Estimated logits of tokens start .. start+N: out [B, Hq, M, N] float32 or float16. With pop = popcount(sign) and
    # ip = sum_j 2^j popcount(planes[j] & sign), in this order of separately rounded float32 operations:
    # ((terms[1] * (D - 2 pop) + terms[0] * (terms[2] - 2 ip)) * factor [+ scale * bias]) + terms[3].
    "sign_scores(Tensor planes, Tensor terms, Tensor sign, Tensor factor, Tensor bias, int head_dim, float scale, int start,"
    " Tensor(a!) out) -> ()",
    # Selects tokens by their share of exp(score). scores [B, Hq, M, L] float32 or float16; mask [B, Hq, M, L] bool or float32
    # (added) as in attend; a score of -inf is hidden. exact_lse [B, Hq, M]: log-sum-exp of what is attended anyway. Each row
    # (query head and token) keeps the largest scores until their share with the exact part reaches top_p: those that cross it
    # are kept, equal scores together. top_p >= 1 keeps all that is not hidden. A score of NaN or +inf is kept and has no share.
    # The selection is the union over the rows of its heads; where it exceeds S, those tokens stay whose largest share in any of
    # these rows is largest, the earlier of equal ones. candidates [B, K, L] int32: column c stands for token candidates[c],
    # which is what indices then hold and where the mask is read.
    "top_p_select(Tensor scores, Tensor exact_lse, Tensor? mask, Tensor? candidates, float top_p, Tensor(a!) indices,"
    " Tensor(b!) count) -> ()",
    # scale * q . k of the selected keys: out [B, Hq, M, S] float32, -inf from count on.
    "qk_selected(Tensor q, Tensor[] keys, Tensor indices, Tensor count, float scale, Tensor(a!) out) -> ()",
    # Softmax attention over the selected tokens, which alone are read. mask [B, Hq, M, L], softcap, out, lse as in attend. None
    # selected or none visible: out 0, lse -inf.
    "attend_selected(Tensor q, Tensor[] keys, Tensor[] values, Tensor indices, Tensor count, Tensor? mask, float scale,"
    " float softcap, Tensor(a!) out, Tensor(b!) lse) -> ()",
    # Copies selected rows of x [B, H, C, D] to out [B, K, S, D] of the same dtype; rows from count on are not written. x may be
    # in pinned host memory and all else on a GPU. For those who attend to gathered rows by other means; no cache here does.
    "gather_selected(Tensor x, Tensor indices, Tensor count, Tensor(a!) out) -> ()",
)

# Several operators one after another, for devices that do it faster in one; elsewhere those operators are called (fused.py).
FUSED_SCHEMAS = (
    # encode of keys [B, H, N, D], packed along D, and of values [B, H, N, Dv], packed along T. codec: levels, centre, balance,
    # signs, blocks, matrix.
    "encode_kv(Tensor keys, Tensor values, Tensor[] key_codec, Tensor[] value_codec, int key_rule, int value_rule, int start,"
    " Tensor(a!) key_sign, Tensor(b!) key_mag, Tensor(c!) key_scale, Tensor(d!) value_sign, Tensor(e!) value_mag,"
    " Tensor(f!) value_scale) -> ()",
    # sign_scores, then top_p_select of these without a mask. scores [B, Hq, M, N]: room for the scores, which are of its dtype;
    # what it holds afterwards is not defined, as scores may never leave the kernel.
    "sign_top_p_select(Tensor planes, Tensor terms, Tensor sign, Tensor factor, Tensor bias, int head_dim, float scale,"
    " int start, Tensor exact_lse, float top_p, Tensor(a!) scores, Tensor(b!) indices, Tensor(c!) count) -> ()",
    # quantise_query, attend to exact tokens alone, then sign_top_p_select from token 0 on where these are attended to anyway.
    # keys and values as in attend, of which no token is read; planes, terms and scores: room for what comes in between.
    "attend_top_p_select(Tensor q, Tensor[] keys, Tensor[] values, Tensor exact_keys, Tensor exact_values, Tensor? sink_logits,"
    " Tensor query_centre, Tensor centre, Tensor balance, Tensor signs, Tensor blocks, Tensor matrix, Tensor sign,"
    " Tensor factor, Tensor bias, float scale, float top_p, Tensor(a!) out, Tensor(b!) lse, Tensor(c!) planes,"
    " Tensor(d!) terms, Tensor(e!) scores, Tensor(f!) indices, Tensor(g!) count) -> ()",
    # merge of outs [2, B, Hq, M, Dv] and lses [2, B, Hq, M]: outs[0] and lses[0] answer for other tokens, outs[1] and lses[1]
    # are what attend_selected gives, and need not be written.
    "merge_selected(Tensor q, Tensor[] keys, Tensor[] values, Tensor indices, Tensor count, Tensor? mask, float scale,"
    " float softcap, Tensor(a!) outs, Tensor(b!) lses, Tensor(c!) out, Tensor(d!) lse) -> ()",
)

SCHEMAS = DENSE_SCHEMAS + SPARSE_SCHEMAS + FUSED_SCHEMAS
DENSE_NAMES, SPARSE_NAMES, FUSED_NAMES = (
    tuple(schema.split("(", 1)[0] for schema in group) for group in (DENSE_SCHEMAS, SPARSE_SCHEMAS, FUSED_SCHEMAS)
)
NAMES = DENSE_NAMES + SPARSE_NAMES
SCALE_RULES = ("norm", "matched", "unbiased", "mse")

_library = torch.library.Library(NAMESPACE, "DEF")
for _schema in SCHEMAS:
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
