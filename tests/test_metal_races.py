"""Shaders under sanitizers, without each of their barriers, and within the limits of Metal; in the emulator only."""

import re

import metalsim
import pytest
import torch
from metal_shaders import emulated, needs_emulator, run
from op_cases import Case, make_store, problem
from sparse_cases import SparseCase, coded, index_of, selected_problem

from torch_kvq.backends import metal
from torch_kvq.backends.metal import library, plan
from torch_kvq.codecs.rotation import make_rotation
from torch_kvq.ops.schemas import SCALE_RULES

pytestmark = needs_emulator
FLOAT = torch.float32
BARRIER = re.compile(r"\n *(?:threadgroup|simdgroup)_barrier\([^\n]*")


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """No call may be answered by the reference; one threadgroup a head, so that loops over tokens repeat."""
    monkeypatch.setattr(metal, "_state", metal._State())
    monkeypatch.setattr(plan, "TARGET_GROUPS", 1)
    yield
    assert metal.fallbacks() == {}


def rotate(inverse=False):
    parts = [*make_rotation("isoquant", 80).tensors()[:2], make_rotation("dense", 80).matrix]
    run("rotate", (torch.randn(5, 80), *parts, inverse), ((5, 80), FLOAT))


def rotate_back():
    rotate(inverse=True)


def encode(along_tokens, kind="isoquant"):
    """Tokens 5 .. 42, which share their first and last block with others."""
    x = torch.randn(1, 2, 37, 80)
    sign, mag, scale, *codec = make_store(torch.randn(1, 2, 60, 80), 3, along_tokens, kind)
    metal.launcher("encode")(x, *codec, SCALE_RULES.index("unbiased"), along_tokens, 5, sign, mag, scale)


def encode_keys():
    encode(False)
    encode(False, "so4")


def encode_values():
    encode(True)
    encode(True, "so4")


def decode():
    store = make_store(torch.randn(1, 2, 37, 80), 4, True)
    run("decode", (store, True, 5), ((1, 2, 21, 80), torch.bfloat16))


def attend(**parts):
    arguments, _, out, lse = problem(Case("races", **(dict(dim=80, group=3, exact=70, kind="so4") | parts)))
    run("attend", arguments, (out.shape, FLOAT), (lse.shape, FLOAT))


def attend_words():
    attend(tokens=97, mask="bool", start=3, sink_logits=True)


def attend_dims():
    attend(tokens=515, start=3, softcap=9.0)


def attend_narrow():
    attend(tokens=515, dim=32, dtype=torch.float16, mask="float")


def attend_latent():
    attend(tokens=97, shared=True, heads=1, group=4)


def qk_and_pv():
    arguments, values, out, _ = problem(Case("races", tokens=131, dim=80, group=3, kind="so4"))
    q, keys, _, exact_keys, exact_values, *_ = arguments
    shape = (*q.shape[:3], 151)
    run("qk", (q, keys, exact_keys, 131, 4), (shape, FLOAT))
    run("pv", (torch.rand(shape), values, exact_values, 131, 4), (out.shape, FLOAT))


def merge():
    run("merge", (torch.randn(3, 2, 3, 1, 80), torch.randn(3, 2, 3, 1)), ((2, 3, 1, 80), FLOAT), ((2, 3, 1), FLOAT))


def index_and_scores():
    """A group of three query heads and a token behind the first threadgroup."""
    case = SparseCase("races", tokens=130, dim=80, kind="so4", centred=True)
    index = index_of(case)
    coded(index, 0.1, metal.launcher("quantise_query"))
    metal.launcher("index_keys")(index.keys, *index.transform, 0, index.sign, index.factor, index.bias)
    planes, terms, _ = coded(index, 0.1)
    arguments = planes, terms, index.sign, index.factor, index.bias, case.dim, 0.1, 1
    run("sign_scores", arguments, ((*planes.shape[:3], 129), FLOAT))


def top_p_select():
    """More than there is room for, of more columns than there are threads."""
    scores, lse = torch.randn(1, 4, 1, 200), torch.zeros(1, 4, 1)
    run("top_p_select", (scores, lse, None, None, 0.9), ((1, 2, 40), torch.int32), ((1, 2), torch.int32))


def selected(**parts):
    case = SparseCase("races", tokens=150, dim=80, kind="so4", share=0.6, mask="bool", **parts)
    arguments, *_ = selected_problem(case)
    q, keys, _, indices, count, *_ = arguments
    run("attend_selected", arguments, (q.shape, FLOAT), (q.shape[:3], FLOAT))
    return q, keys, indices, count


def selected_packed():
    selected(packed=True)


def selected_exact():
    q, keys, indices, count = selected()
    run("qk_selected", (q, keys, indices, count, 0.1), ((*q.shape[:3], indices.shape[2]), FLOAT))
    run("gather_selected", (*keys, indices, count), ((*indices.shape, 80), FLOAT))


RUNS = (
    rotate, rotate_back, encode_keys, encode_values, decode, attend_words, attend_dims, attend_narrow, attend_latent, qk_and_pv,
    merge, index_and_scores, top_p_select, selected_packed, selected_exact,
)  # fmt: skip


@pytest.mark.parametrize("kind", metalsim.PROGRAMS)
@pytest.mark.parametrize("each", RUNS, ids=lambda each: each.__name__)
def test_clean_under_sanitizers(monkeypatch, each, kind):
    """Four orders of threads; addresses do not depend on them."""
    monkeypatch.setattr(library, "shaders", emulated(kind=kind, orders=metalsim.ORDERS if kind == "thread" else (0,)))
    each()


# What runs every barrier of a file where it is needed.
USES = {
    "rotation.metal": (rotate, rotate_back),
    "rotate.metal": (rotate_back,),
    "query.metal": (attend_words,),
    "encode.metal": (encode_keys, encode_values),
    "decode.metal": (decode,),
    "softmax.metal": (attend_words,),
    "attend_words.metal": (attend_words,),
    "attend_dims.metal": (attend_dims,),
    "attend_exact.metal": (attend_words,),
    "finish.metal": (attend_words,),
    "quantise_query.metal": (index_and_scores,),
    "index_keys.metal": (index_and_scores,),
    "sign_scores.metal": (index_and_scores,),
    "top_p_select.metal": (top_p_select,),
    "attend_selected.metal": (selected_packed,),
}
BARRIERS = [
    (path.name, number)
    for path in sorted(library.FOLDER.glob("*.metal"))
    for number in range(len(BARRIER.findall(path.read_text())))
]


def test_every_file_with_barriers_is_run():
    assert {file for file, _ in BARRIERS} == USES.keys() and len(BARRIERS) > 15


@pytest.mark.parametrize("file, number", BARRIERS)
def test_a_dropped_barrier_is_caught(monkeypatch, file, number):
    text = library._text(file)
    found = list(BARRIER.finditer(text))[number]
    mutant = f"{text[: found.start()]}\n{text[found.end() :]}"

    def compile_shader(source):
        hit = mutant in source
        return metalsim.compile_shader(source, kind="thread" if hit else None, orders=(0,))

    monkeypatch.setattr(library, "_text", lambda name: mutant if name == file else original(name))
    monkeypatch.setattr(library, "shaders", library.Shaders(compile_shader))
    with pytest.raises(metalsim.MetalError, match="data race"):
        for each in USES[file]:
            each()


original = library._text


@pytest.fixture
def recorded(monkeypatch):
    """(source, library) of everything that is compiled."""
    made = []

    def compile_shader(source):
        made.append((source, metalsim.compile_shader(source, orders=(0,))))
        return made[-1][1]

    monkeypatch.setattr(library, "shaders", library.Shaders(compile_shader))
    return made


def test_types_and_address_spaces(recorded):
    for each in RUNS:
        each()
    kernels = {name for source, _ in recorded for name in metalsim.check(source)}
    written = set(re.findall(r"kernel void (\w+)", "".join(path.read_text() for path in library.FOLDER.glob("*.metal"))))
    assert kernels == written


WIDEST = [
    dict(dim=512, group=16, heads=1),
    dict(dim=256, group=16),
    dict(dim=128, value_dim=512, group=16),
    dict(dim=4, group=16),
]


@pytest.mark.parametrize("parts", WIDEST, ids=str)
def test_threadgroups_stay_within_the_limits(recorded, parts):
    """A third of the 32 KB of a threadgroup and 128 threads, at the largest head dims and numbers of rows."""
    for tokens in (40, 520):
        attend(tokens=tokens, **parts)
    x = torch.randn(1, 1, 40, parts["dim"])
    for along_tokens in (False, True):
        store = make_store(x, 4, along_tokens)
        metal.launcher("encode")(x, *store[3:], 0, along_tokens, 0, *store[:3])
        run("decode", (store, along_tokens, 0), (x.shape, FLOAT))
    launches = {launch.kernel: launch for _, made in recorded for launch in made.launches}
    assert {"attend_words", "attend_dims", "attend_exact", "encode_values", "finish"} <= launches.keys()
    assert all(launch.group == [128, 1, 1] for launch in launches.values())
    attending = max(launch.group_bytes for name, launch in launches.items() if name.startswith("attend"))
    assert attending <= 17 * 1024 and launches["encode_values"].group_bytes <= 24 * 1024


@pytest.mark.parametrize("tokens, kernel", [(333, "attend_words"), (4097, "attend_dims")])
@pytest.mark.parametrize("bits", [(3, 3), (4, 2)])
def test_attend_reads_packed_bytes_once_a_group_of_heads(monkeypatch, tokens, kernel, bits):
    """Every word and scale once for all eight query heads of a key head, and nothing else of the body."""
    made = []

    def compile_shader(source):
        made.append(metalsim.compile_shader(source, kind="loads", orders=(0,)))
        return made[-1]

    monkeypatch.setattr(library, "shaders", library.Shaders(compile_shader))
    monkeypatch.setattr(plan, "TARGET_GROUPS", 256)
    attend(tokens=tokens, dim=128, group=8, bits=bits, heads=2)
    (launch,) = (launch for each in made for launch in each.launches if launch.kernel == kernel)
    names = "rotated bias key_sign key_mag key_scale key_levels value_sign value_mag value_scale value_levels".split()
    loaded = dict(zip(names, launch.loaded))
    token_bytes, blocks = 128 // 8, -(-tokens // 32)
    assert loaded["key_sign"] == 2 * tokens * token_bytes
    assert loaded["key_mag"] == 2 * tokens * token_bytes * (bits[0] - 1)
    assert loaded["value_sign"] == 2 * 32 * blocks * token_bytes
    assert loaded["value_mag"] == 2 * 32 * blocks * token_bytes * (bits[1] - 1)
    assert loaded["key_scale"] == loaded["value_scale"] == 2 * tokens * 2
