"""The Metal backend as a whole: who is chosen, what is registered, what falls back, compiled graphs, a real model."""

import subprocess
import sys
import warnings

import pytest
import torch
from metal_shaders import DEVICE, needs_emulator, needs_shaders, run, shaders  # noqa: F401
from op_cases import Case, encode, make_store, problem, relative_error
from test_ops import ARGUMENTS, calls

from torch_kvq import IsoQuantCache, backends, cli, ops
from torch_kvq.backends import metal
from torch_kvq.backends.metal import library, plan
from torch_kvq.ops import reference
from torch_kvq.ops.schemas import DENSE_NAMES, FUSED_NAMES, NAMES, NAMESPACE

FLOAT = torch.float32


@pytest.fixture
def choose(monkeypatch):
    """``load()`` as if it had not run, with or without an MPS device."""

    def load(available=True, wanted=None, **environment):
        registered = []
        monkeypatch.setattr(metal, "_state", metal._State())
        monkeypatch.setattr(metal, "register", lambda: registered.append(True))
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: available)
        monkeypatch.delenv(metal.VARIABLE, raising=False)
        for name, value in (environment | ({metal.VARIABLE: wanted} if wanted else {})).items():
            monkeypatch.setenv(name, value)
        served_by = metal.load()
        assert served_by == metal.served_by() == metal.load()
        assert registered == [True] * (served_by == metal.METAL)
        return served_by

    return load


def test_shaders_serve_an_mps_device(choose):
    assert choose() == "metal" and metal.skipped("attend") == {}


@pytest.mark.parametrize("reason, options", [
    ("no MPS device", dict(available=False)),
    ("KVQ_MPS=reference", dict(wanted="reference")),
    ("PYTORCH_MPS_FAST_MATH is set, which gives up the infinities of masks", dict(PYTORCH_MPS_FAST_MATH="1")),
])  # fmt: skip
def test_the_reference_serves_with_a_reason(choose, reason, options):
    assert choose(**options) == "reference" and metal.skipped("attend") == {"metal": reason}


def test_shaders_that_cannot_serve_are_an_error_if_asked_for(choose):
    with pytest.raises(RuntimeError, match="KVQ_MPS=metal cannot be: no MPS device"):
        choose(available=False, wanted="metal")
    with pytest.raises(ValueError, match="KVQ_MPS must be one of metal, reference, got 'fast'"):
        choose(wanted="fast")


def test_the_report_names_what_serves_each_operator(choose):
    choose(wanted="reference")
    report = backends.report()
    assert [row.op for row in report.rows if row.device == "mps"] == [*NAMES, *FUSED_NAMES]
    assert report["attend", "mps"].served_by == "reference" and report["attend"].device == "cpu"
    assert "metal: KVQ_MPS=reference" in str(report)
    choose(available=False)
    assert not [row for row in backends.report().rows if row.device == "mps"]


def run_python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.skipif(DEVICE == "mps", reason="there is an MPS device here")
def test_elsewhere_nothing_is_imported_or_registered():
    code = f"""
import sys, torch, torch_kvq
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
print(any(has_kernel("{NAMESPACE}::" + name, "MPS") for name in torch_kvq.ops.schemas.NAMES))
print(*(name for name in sys.modules if name.startswith("torch_kvq.backends.metal.")))
"""
    assert run_python(code) == ["False"]


def test_registration_needs_no_device_and_fakes_give_mps_shapes():
    code = f"""
import torch, torch_kvq
from torch._subclasses.fake_tensor import FakeTensorMode
torch_kvq.backends.metal.register()
names = torch_kvq.ops.schemas.NAMES
print(all(torch._C._dispatch_has_kernel_for_dispatch_key("{NAMESPACE}::" + name, "MPS") for name in names))
with FakeTensorMode():
    x, none = torch.empty(2, 3, 5, 64, device="mps"), torch.empty(0, device="mps")
    out = torch.empty_like(x)
    torch_kvq.ops.rotate(x, none, none, none, False, out)
    print(out.device, *out.shape)
"""
    assert run_python(code) == ["True", "mps:0", "2", "3", "5", "64"]


@pytest.fixture
def on_cpu():
    """``on_cpu(functions)``: operators of the CPU are answered by these, by name, until the test ends."""
    libraries = []

    def serve(functions):
        made = torch.library.Library(NAMESPACE, "IMPL")
        libraries.append(made)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there was a kernel before
            for name, function in functions.items():
                made.impl(name, function, "CPU")
        return made

    yield serve
    for made in reversed(libraries):
        made._destroy()


@needs_emulator
@pytest.mark.parametrize("name", DENSE_NAMES)
def test_opcheck(on_cpu, shaders, name):  # noqa: F811
    on_cpu({name: metal.launcher(name)})
    before = len(shaders._known)
    for _, arguments in (call for call in calls() if call[0] == name):
        torch.library.opcheck(getattr(ops, name), arguments)
    assert shaders._known and len(shaders._known) >= before


@needs_emulator
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_attend_compiles_without_a_graph_break(on_cpu, shaders, backend):  # noqa: F811
    on_cpu({"attend": metal.launcher("attend")})
    arguments, _, expected, expected_lse = problem(Case("compile", tokens=33))

    def attend(q):
        out, lse = torch.empty_like(expected), torch.empty_like(expected_lse)
        ops.attend(q, *arguments[1:], out, lse)
        return out + 0, lse

    out, lse = torch.compile(attend, fullgraph=True, backend=backend)(arguments[0])
    assert relative_error(out, expected) <= 1e-5 and torch.allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


def generated(model, inputs):
    cache = IsoQuantCache(num_sinks=2, window_len=8, flush_len=4)
    options = dict(max_new_tokens=10, do_sample=False, return_dict_in_generate=True, output_logits=True)
    out = model.generate(**inputs, past_key_values=cache, **options)
    return out.sequences, torch.stack(out.logits), cache


@needs_emulator
def test_a_real_model_writes_the_same_tokens(on_cpu, monkeypatch, smollm2):
    import metalsim

    model, tokenizer = smollm2
    countries = "France is Paris, Italy Rome, Spain Madrid, Germany Berlin, Poland Warsaw, Norway Oslo, Greece Athens".split(
        ", "
    )
    inputs = tokenizer(
        "The capital of " + ". The capital of ".join(countries * 2) + ". The capital of Japan is", return_tensors="pt"
    )
    assert inputs.input_ids.shape[1] > 80, "too short to be packed"
    on_cpu({name: getattr(reference, name) for name in DENSE_NAMES})
    tokens, logits, _ = generated(model, inputs)
    monkeypatch.setattr(metal, "_state", metal._State())
    made = []

    def compile_shader(source):
        made.append(metalsim.compile_shader(source, orders=(3,)))
        return made[-1]

    monkeypatch.setattr(library, "shaders", library.Shaders(compile_shader))
    on_cpu({name: metal.launcher(name) for name in DENSE_NAMES})
    ours, our_logits, cache = generated(model, inputs)
    assert torch.equal(ours, tokens)
    assert (our_logits - logits).abs().max() < 1e-3 * logits.abs().max()
    assert metal.fallbacks() == {} and cache.stats.decompress_calls == 0
    counts = [launch.kernel for each in made for launch in each.launches]
    layers = model.config.num_hidden_layers
    assert counts.count("attend_words") >= 9 * layers and counts.count("encode_values") >= layers


@needs_emulator
def test_the_selftest_runs_every_operator_by_shaders(on_cpu, shaders):  # noqa: F811
    asked = []

    def recorded(name):
        serve = metal.launcher(name)
        return lambda *arguments: asked.append(name) or serve(*arguments)

    on_cpu({name: recorded(name) for name in NAMES})
    rows = dict(cli.selftest_rows("cpu"))
    assert set(asked) == set(NAMES) and len(rows) == 22
    assert max(rows.values()) < 1e-4


@needs_shaders
def test_a_call_without_a_shader_is_answered_by_the_reference_and_counted(monkeypatch):
    monkeypatch.setattr(metal, "_state", metal._State(served_by=metal.METAL))
    x, none, out = torch.randn(1, 1, 1, 1, 3, 8), torch.empty(0), torch.full((1, 1, 1, 1, 3, 8), torch.nan)
    with pytest.warns(UserWarning, match="torch_kvq.rotate runs its pure-torch reference, which is slow: vectors in 6 dims"):
        metal.launcher("rotate")(x, none, none, none, False, out)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        metal.launcher("rotate")(x, none, none, none, False, out)
    assert torch.equal(out, x)
    assert metal.fallbacks() == {"rotate": {"vectors in 6 dims": 2}}
    assert metal.skipped("rotate") == {"metal": "2 x vectors in 6 dims"} and metal.skipped("attend") == {}


@pytest.mark.parametrize(
    "error", [SyntaxError("program_source:3:1: error: unknown type\n1 error"), RuntimeError("no function")]
)
def test_a_shader_that_does_not_compile_is_tried_once(monkeypatch, error):
    attempts = []

    def compile_shader(source):
        attempts.append(source)
        raise error

    monkeypatch.setattr(metal, "_state", metal._State(served_by=metal.METAL))
    monkeypatch.setattr(library, "shaders", library.Shaders(compile_shader))
    x = torch.randn(1, 1, 40, 64)
    store = make_store(x, 3, False, fill=False)
    with pytest.warns(UserWarning, match="encode_keys does not compile"):
        encode(metal.launcher("encode"), x, store, False)
        encode(metal.launcher("encode"), x, store, False)
    assert len(attempts) == 1 and list(metal.fallbacks()["encode"].values()) == [2]
    expected = make_store(x, 3, False)
    assert torch.equal(store[0], expected[0]) and torch.equal(store[1], expected[1])


BAD = [
    ("q must have 4 dims", "q", lambda a: a["q"][0]),
    ("q must have a batch of 1", "q", lambda a: a["q"].repeat(2, 1, 1, 1)),
    ("q must have a multiple of 2 heads", "q", lambda a: a["q"][:, :3]),
    ("q must have the shape [1, 4, 1, 64]", "q", lambda a: a["q"][..., :60]),
    ("q must be float32, bfloat16 or float16", "q", lambda a: a["q"].double()),
    ("q must have a contiguous last dim", "q", lambda a: a["q"].repeat(1, 1, 1, 2)[..., ::2]),
    ("keys must be nine tensors", "keys", lambda a: a["keys"][:8]),
    ("keys.scale must have a capacity of at least", "length", lambda a: 5000),
    ("keys.mag must have 1 to 3 planes", "keys", lambda a: [a["keys"][0], a["keys"][1][:, :, :, :0], *a["keys"][2:]]),
    ("values.sign must be int32", "values", lambda a: [a["values"][0].long(), *a["values"][1:]]),
    (
        "values.signs must have the shape [1, 64]",
        "values",
        lambda a: [*a["values"][:6], a["values"][6][:, :60], *a["values"][7:]],
    ),
    ("start must be from 0 to length", "start", lambda a: 200),
    ("num_sinks must be from 0", "num_sinks", lambda a: 21),
    ("mask must be bool or float32", "mask", lambda a: torch.zeros(1, 4, 1, 148, dtype=torch.int32)),
    ("mask must be on cpu with the shape", "mask", lambda a: torch.ones(1, 4, 1, 147, dtype=torch.bool)),
    ("sink_logits must have the shape [4]", "sink_logits", lambda a: torch.ones(3)),
    ("out must have the shape", "out", lambda a: a["out"][:, :3]),
    ("lse must be float32", "lse", lambda a: a["lse"].double()),
]


@pytest.mark.parametrize("message, name, change", BAD, ids=[bad[0] for bad in BAD])
def test_an_error_names_the_argument_and_comes_before_any_launch(monkeypatch, message, name, change):
    monkeypatch.setattr(library, "shaders", library.Shaders(lambda source: pytest.fail("compiled")))
    arguments, _, out, lse = problem(Case("errors"))
    named = dict(zip(ARGUMENTS, (*arguments, out.clone(), lse.clone())))
    named[name] = change(named)
    with pytest.raises(RuntimeError) as caught:
        metal.launcher("attend")(*named.values())
    assert message in str(caught.value) and ", got " in str(caught.value)


@needs_emulator
def test_launches_are_checked_as_torch_does_not(shaders):  # noqa: F811
    shader = shaders.get("merge", ("merge.metal",), In=FLOAT, Out=FLOAT)
    outs, lses, out, lse = torch.randn(2, 1, 1, 1, 8), torch.randn(2, 1, 1, 1), torch.empty(1, 1, 1, 8), torch.empty(1, 1, 1)
    sizes = dict(
        pieces=2, rows=1, dim=8, size=(1, 1, 1), outs=outs.stride()[:4], lses=lses.stride(), out=(8, 8, 8), lse=(1, 1, 1)
    )
    tensors = dict(outs=outs, lses=lses, out=out, lse=lse)
    for wrong, message in (
        (dict(outs=outs.half()), "outs must be torch.float32 on cpu, got torch.float16"),
        (dict(other=out), "arguments must be"),
    ):
        with pytest.raises(TypeError, match=message):
            shader.launch((1, 1), sizes, outs.device, **(tensors | wrong))
    for wrong, message in ((dict(more=1), "got or lacks more"), (dict(size=(1, 1)), "size must hold 3 numbers")):
        with pytest.raises(TypeError, match=message):
            shader.launch((1, 1), sizes | wrong, outs.device, **tensors)
    shader.launch((0, 1), {}, outs.device)  # nothing to do


def test_strategies_are_chosen_by_the_number_of_tokens():
    for tokens, words in ((1, True), (511, True), (512, False), (4097, False)):
        assert plan.split_packed(0, tokens, 8, 128).words == words
    assert plan.split_packed(700, 900, 8, 128).words
    assert plan.split_packed(7, 7, 8, 128).splits == 0


@pytest.mark.parametrize("start, stop", [(0, 1), (5, 511), (0, 512), (31, 4097), (300, 33000)])
@pytest.mark.parametrize("others", [1, 8, 4000])
@pytest.mark.parametrize("value_dim", [32, 64, 128])
def test_splits_cover_every_block_once(start, stop, others, value_dim):
    cut = plan.split_packed(start, stop, others, value_dim)
    blocks = -(-stop // 32) - start // 32
    spans = cut.splits if cut.words else cut.groups
    assert cut.first == start // 32 and (spans - 1) * cut.blocks < blocks <= spans * cut.blocks
    assert cut.splits == (spans if cut.words else spans * plan.parts_of(value_dim))
    assert cut.words or cut.blocks % 4 == 0


def test_the_wheel_holds_every_source():
    tomllib = pytest.importorskip("tomllib")
    package = library.FOLDER.parent
    rules = tomllib.loads((package.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][package.name]
    assert {path for rule in rules for path in package.glob(rule)} >= set(library.FOLDER.iterdir())


def test_sources_are_ascii_without_project_headers():
    for path in library.FOLDER.glob("*.metal"):
        assert path.read_text().isascii()
        lines = path.read_text().splitlines()
        assert all(line == "#include <metal_stdlib>" for line in lines if line.startswith("#include"))
