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

SCHEMAS = (
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
    # Attention over the union of pieces: outs [P, B, Hq, M, Dv], lses [P, B, Hq, M] -> out, lse.
    "merge(Tensor outs, Tensor lses, Tensor(a!) out, Tensor(b!) lse) -> ()",
)

NAMES = tuple(schema.split("(", 1)[0] for schema in SCHEMAS)
SCALE_RULES = ("norm", "matched", "unbiased", "mse")

_library = torch.library.Library(NAMESPACE, "DEF")
for _schema in SCHEMAS:
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
