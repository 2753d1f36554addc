"""The benchmarks run, what they write is whole, and no figure in a document differs from the committed results."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "benchmarks"))

import attend
import attend_sparse
import attend_tables
import caches
import chart
import generate
import generate_tables
import largest_context
import models
import recall_tables
import sparse_generate_tables
import timing
from render import Bar

import torch_kvq
from torch_kvq.backends import native
from torch_kvq.evaluate.selectors import default_selectors

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONTEXTS, ROUNDS, NEW_TOKENS = (200, 320), 3, 8
KV_BYTES_A_TOKEN = 2 * 2 * 2 * 64  # keys and values, layers, heads, head dim of the tiny shape


def run(script: str, *options: str, path: pathlib.Path) -> dict:
    """The JSON that a benchmark writes, after checks of what it may not hold; its standard output under ``printed``."""
    command = [sys.executable, ROOT / "benchmarks" / script, *options, "--json", path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=path.parent, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    text = path.read_text()
    assert str(ROOT) not in text and str(path.parent) not in text and socket.gethostname() not in text
    return json.loads(text) | dict(printed=done.stdout)


@pytest.fixture(scope="module")
def generated(tmp_path_factory) -> dict:
    contexts = ",".join(map(str, CONTEXTS))
    sizes = ["--layers", "2", "--contexts", contexts, "--rounds", str(ROUNDS), "--new-tokens", str(NEW_TOKENS)]
    path = tmp_path_factory.mktemp("generate") / "generate_cpu.json"
    return run("generate.py", "--shape", "tiny", *sizes, path=path)


@pytest.fixture(scope="module")
def attended(tmp_path_factory) -> dict:
    options = ["--shapes", "4,2,64,256", "2,4,2,64,512", "--exact", "32", "--prefill", "128", "--rounds", "3"]
    return run("attend.py", *options, path=tmp_path_factory.mktemp("attend") / "attend_cpu.json")


@pytest.fixture(scope="module")
def recalled(tmp_path_factory) -> dict:
    options = ["--models", "tiny", "--prefix", "250", "--scored", "50", "--queries", "5", "--budgets", "0.2,0.4"]
    return run("recall.py", *options, path=tmp_path_factory.mktemp("recall") / "recall.json")


@pytest.mark.parametrize("document", chart.documents(ROOT), ids=lambda path: path.name)
def test_documents_hold_what_the_results_give(document):
    assert document.read_text() == chart.filled(document, chart.read(ROOT), ROOT)


def test_the_readme_has_tables_and_a_chart():
    names = {match[2] + " " + match[3] for match in chart.BLOCK.finditer((ROOT / "README.md").read_text())}
    assert {"generate_cpu speed", "generate_cpu bytes", "generate_cpu chart", "attend_cpu speed"} <= names


def test_generate_gives_a_row_for_every_cache(generated):
    rows = {(row["context"], row["dtype"], row["cache"]): row for row in generated["rows"]}
    assert set(rows) == {(t, d, c) for t in CONTEXTS for d in ("float32", "bfloat16") for c in caches.CACHES}
    for (context, dtype, cache), row in rows.items():
        if cache in ("quanto", "hqq") and "missing" in row:
            assert row["missing"] == "package not installed"
            continue
        assert row["kv_tokens"] == context and row["step"]["rounds"] == ROUNDS
        assert 0 < row["rate_min"] <= row["rate"] <= row["rate_max"] and row["prefill_rate"] > 0
        dense = KV_BYTES_A_TOKEN * context * getattr(torch, dtype).itemsize
        assert row["kv_bytes"] == dense if cache == "dynamic" else 0.1 * dense < row["kv_bytes"] < 0.9 * dense
        if cache == "isoquant":
            assert row["decompress_calls"] == row["fallback_calls"] == 0
    assert generated["conditions"]["versions"]["torch"] == torch.__version__
    assert "decompress_calls of IsoQuantCache | <= 0 | 0        | held" in generated["printed"]


def test_attend_measures_both_sides(attended):
    isas, isa = attended["isas"], attended["isas"][0]
    assert set(isas) == {torch_kvq.backends.cpu_isa(dtype) for dtype in (torch.float32, torch.bfloat16)}
    assert [row["shape"] for row in attended["attend"]] == [[1, 4, 2, 64, 256], [2, 4, 2, 64, 512]]
    for row in attended["attend"] + attended["encode"]:
        assert {row["best_dense"], *isas} <= set(row["results"])
        dense = [side["median_ms"] for name, side in row["results"].items() if name not in isas]
        assert row["results"][row["best_dense"]]["median_ms"] == min(dense)
        assert all(0 < side["min_ms"] <= side["median_ms"] <= side["max_ms"] for side in row["results"].values())
    for row in attended["attend"]:
        each = row["flush"]["median_ms"] / attend.FLUSH_LEN
        assert row["flush"]["share"] == pytest.approx(each / row["results"][isa]["median_ms"]) and each > 0
    first = attended["attend"][0]
    assert first["packed_bytes"] == 2 * (256 - 32) * 2 * (3 * 64 / 8 + 2) and first["exact_bytes"] == 2 * 2 * 32 * 64 * 4
    assert attended["memory_rate"] > 0 and attended["encode"][0]["results"][isa]["share"] > 0


def test_the_twin_is_compared_with_the_kernels(attended):
    times = dict(
        packed=dict(median_ms=0.2, ratio=4.0, memory_share=0.6), triton=dict(median_ms=0.5, ratio=1.6, memory_share=0.2)
    )
    encode = dict(packed=dict(median_ms=1.0, memory_share=0.5), triton=dict(median_ms=2.6, memory_share=0.2))
    rows = dict(attend=[dict(shape=[1, 4, 2, 64, 256], results=times)], encode=[dict(shape=[1, 4, 2, 64, 128], results=encode)])
    found = {bar.what: bar.cells()[1:] for bar in attend_tables._gpu_bars(attended | rows) if "twin" in bar.what}
    assert found["Triton twin / packed, attend 4, 2, 64, 256"] == ["<= 2.5x", "2.50x", "held"]
    assert found["Triton twin / packed, encode 4, 2, 64, 128"] == ["<= 2.5x", "2.60x", "MISSED"]


def test_scores_of_the_paper_have_a_bar():
    times = dict(median_ms=0.0051, min_ms=0.005, max_ms=0.006, rounds=9)
    scores = [dict(shape=[1, 8, 8, 128, 16384], results=dict(scores=times))]
    result = dict(conditions=dict(device="cuda"), attend=[], scores=scores)
    assert [bar.cells()[1:] for bar in attend_tables._sparse_bars(result)] == [["<= 5 us", "5.10 us", "MISSED"]]
    assert "sign_scores" in attend_tables._sparse_all(result)


def test_scores_alone_are_measured():
    args = attend_sparse.parse(["--rounds", "2", "--shapes", "4,2,64,600"])
    with torch.inference_mode():
        row = attend_sparse.scores_row((1, 4, 2, 64, 300), args)
    assert row["results"]["scores"]["rounds"] == 2 and row["read_bytes"] == 2 * 300 * (8 + 4)


def test_attend_sparse_measures_a_step_and_its_parts(tmp_path):
    options = ["--shapes", "4,2,64,600", "--rounds", "2", "--share", "0.2"]
    result = run("attend_sparse.py", *options, path=tmp_path / "attend_sparse_cpu.json")
    (row,) = result["attend"]
    for side in ("sparse", "sparse packed"):
        assert 0.1 < row["selected"][side]["share"] < 0.4 and row["results"][side]["ratio"] > 0
        parts = [name for name in row["results"] if name.startswith(f"{side}: ")]
        assert len(parts) == 3
    assert row["read_bytes"]["sparse packed"] < row["read_bytes"]["sparse"] < row["dense_bytes"]
    views = chart.VIEWS[result["benchmark"]](result)
    assert "No bar is set" in views["bars"] and "4, 2, 64, 600" in views["speed"]
    assert all(text in result["printed"] for text in views.values())


def test_sparse_generate_gives_a_row_for_every_store(tmp_path):
    options = ["--shape", "tiny", "--layers", "1", "--contexts", "1300", "--rounds", "2", "--new-tokens", "20"]
    result = run("sparse_generate.py", *options, "--dtype", "float32", path=tmp_path / "sparse_generate_cpu.json")
    rows = {row["cache"]: row for row in result["rows"]}
    assert list(rows) == ["dynamic", "exact", "isoquant", "host"] and result["layers"] == 1
    token, dense = 2 * 2 * 64 * 4, rows["dynamic"]
    assert dense["bytes"] == (1300 + 21) * token and dense["host_bytes"] == dense["selected_bytes"] == 0
    for name in ("exact", "isoquant", "host"):
        row = rows[name]
        assert row["tokens"] == 1300 + 21 and row["decode"]["rounds"] == 2 and row["prefill"]["min_ms"] > 0
        assert 0 < row["index_bytes"] < row["selected_bytes"] and (row["host_bytes"] > 0) == (name == "host")
    assert rows["exact"]["selected_bytes"] == rows["host"]["selected_bytes"] == 2 * 130 * 2 * 64 * 4
    assert rows["host"]["bytes"] + rows["host"]["host_bytes"] == rows["exact"]["bytes"]
    views = chart.VIEWS[result["benchmark"]](result)
    assert all(text in result["printed"] for text in views.values()) and "No bar is set" in views["bars"]


def test_the_bars_of_stores():
    times = dict(exact=(102, 10.0), host=(140, 19.0), dynamic=(100, 8.0))
    rows = [
        dict(
            cache=cache,
            context=32768,
            prefill=dict(median_ms=first),
            decode=dict(median_ms=step),
            bytes=5 if cache == "host" else 100,
        )
        for cache, (first, step) in times.items()
    ]
    found = sparse_generate_tables._bars(dict(conditions=dict(device="cuda"), rows=rows))
    assert [bar.cells()[1:] for bar in found] == [
        ["<= 5%", "2.0%", "held"],
        ["<= 12%", "5.0%", "held"],
        ["<= 2x", "1.90x", "held"],
    ]


def test_the_largest_context_is_what_fits(tmp_path):
    options = ["--shape", "tiny", "--batch", "2", "--short", "512", "--dtype", "float32", "--memory", "9000000"]
    result = run("largest_context.py", *options, path=tmp_path / "largest_context_cpu.json")
    ours, dense = result["rows"]
    assert dense["kv_bytes"] == 2 * (dense["tokens"] + 2) * KV_BYTES_A_TOKEN * 4 <= 9000000
    for row in result["rows"]:
        assert row["peak_bytes"] <= 9000000 < 1.05 * row["peak_bytes"] and row["tried"] <= 3
    assert f"{ours['tokens'] / dense['tokens']:.2f}x" in result["printed"]
    assert all(text in result["printed"] for text in chart.VIEWS[result["benchmark"]](result).values())


def test_a_context_that_has_no_room_is_shortened(monkeypatch):
    model = models.load("tiny", torch.float32, "cpu")
    args = largest_context.parse(["--shape", "tiny", "--short", "64", "--batch", "1", "--memory", "900000"])
    whole = largest_context.measure(model, "dynamic", args)["tokens"]
    filled = largest_context.fill

    def refuse(cache, model, batch, tokens):
        if tokens > 0.95 * whole:
            raise RuntimeError("CUDA out of memory")
        filled(cache, model, batch, tokens)

    monkeypatch.setattr(largest_context, "fill", refuse)
    found = largest_context.measure(model, "dynamic", args)
    assert 0.93 * whole <= found["tokens"] <= 0.95 * whole and found["tried"] == 4


def test_recall_gives_a_row_for_every_selector_and_budget(recalled):
    model = recalled["models"]["tiny"]
    names = [selector.name for selector in default_selectors()]
    assert [(row["selector"], row["asked"]) for row in model["rows"]] == [(name, b) for name in names for b in (0.2, 0.4)]
    assert model["num_queries"] == 2 * 5 and model["layers"] == [0, 1]
    rows = {(row["selector"], row["asked"]): row for row in model["rows"]}
    for (name, asked), row in rows.items():
        assert row["budget"] == pytest.approx(rows["oracle", asked]["budget"], rel=1e-4) and len(row["layers"]) == 2
        assert model["exact_mass"] < row["recall"] < 1 and row["worst"] <= min(row["layers"])
        assert (row["top_p"] is None) == ("top-p" not in name)
    oracle, quest = (rows[name, 0.2]["recall"] for name in ("oracle", "Quest"))
    bar = recall_tables._bars(recalled)[0]
    assert bar.what == "tiny, RaBitQ over Quest, points" and bar.value == rows["RaBitQ", 0.2]["recall"] - quest
    assert f"| {oracle:.1%} " in recalled["printed"]


def test_charts_and_tables_come_from_the_files(generated, attended, recalled, tmp_path):
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    for name, result in (("generate_cpu", generated), ("attend_cpu", attended), ("recall", recalled)):
        (results / f"{name}.json").write_text(json.dumps(result))
    views = [f"generate_cpu {view}" for view in [*generate_tables.views(generated), "chart"]]
    views += [f"attend_cpu {view}" for view in [*attend_tables.views(attended), "chart"]]
    views += [f"recall {view}" for view in [*recall_tables.views(recalled), "chart"]]
    blocks = [f"<!-- {name}: begin -->\n1.5x, typed by hand\n<!-- {name}: end -->\n" for name in [*views, "absent speed"]]
    for document in (tmp_path / "README.md", results / "some.md"):
        document.write_text("Kept above\n" + "Kept between\n".join(blocks))
    chart.main(["--root", str(tmp_path)])
    text = (tmp_path / "README.md").read_text()
    assert "by hand" not in text and text.count(chart.MISSING) == 1 and text.count("Kept between") == len(blocks) - 1
    assert "](benchmarks/results/generate_cpu.png)" in text and "](attend_cpu.png)" in (results / "some.md").read_text()
    assert generate_tables.views(generated)["speed"] in text and attend_tables.views(attended)["speed"] in text
    assert "![recall: mass kept against budget](benchmarks/results/recall.png)" in text
    for name in ("generate_cpu", "attend_cpu", "recall"):
        assert (results / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert chart.filled(tmp_path / "README.md", chart.read(tmp_path), tmp_path) == text


def test_a_block_of_no_view_is_refused(attended, tmp_path):
    document = tmp_path / "README.md"
    document.write_text("<!-- attend_cpu sped: begin -->\n<!-- attend_cpu sped: end -->\n")
    with pytest.raises(KeyError, match="sped"):
        chart.filled(document, dict(attend_cpu=attended), tmp_path)


def row(context: int, dtype: str, cache: str, rate: float) -> dict:
    times = dict(rate=rate, rate_min=rate, rate_max=rate, kv_bytes=1, kv_tokens=context)
    return dict(context=context, dtype=dtype, cache=cache, **times, decompress_calls=0, fallback_calls=0)


def test_a_bar_is_held_against_the_faster_dtype():
    rates = dict(isoquant=(13.0, 12.0), dynamic=(9.0, 10.5), quanto=(4.0, 4.1), hqq=(5.0, 1.0))
    rows = [row(8000, dtype, cache, rates[cache][i]) for i, dtype in enumerate(("float32", "bfloat16")) for cache in rates]
    rows += [row(2000, "float32", cache, rates[cache][0]) for cache in ("isoquant", "hqq")]
    rows += [dict(context=2000, dtype="float32", cache="quanto", missing="package not installed")]
    result = dict(model="smollm2-135m", conditions=dict(device="cpu"), rows=rows)
    dense, quantized, *counters = generate_tables._bars(result)
    assert dense.cells()[0] == "8,000 tokens, IsoQuantCache (float32) over DynamicCache (bfloat16)"
    assert (dense.value, dense.cells()[-1]) == (13.0 / 10.5, "MISSED")
    assert (quantized.value, quantized.cells()[-1]) == (13.0 / 5.0, "MISSED")
    assert [bar.cells()[-1] for bar in counters] == ["held", "held"]
    assert generate_tables._bars(result | dict(rows=rows[1:2]))[0].cells()[-1] == "not measured"


@pytest.mark.parametrize(
    ("bar", "verdict"),
    [
        (Bar("a", 1.3, 1.3), "held"),
        (Bar("a", 1.29, 1.3), "MISSED"),
        (Bar("a", 0.14, 0.15, "%", at_most=True), "held"),
        (Bar("a", 0.16, 0.15, "%", at_most=True), "MISSED"),
        (Bar("a", None, 1.3), "not measured"),
    ],
)
def test_verdicts(bar, verdict):
    assert bar.cells()[-1] == verdict


def test_sides_take_turns_and_the_hopeless_one_leaves():
    order, seconds = [], dict(ours=1.0, fast=2.0, slow=4.1)
    sides = {name: lambda name=name: order.append(name) or seconds[name] for name in seconds}
    times = timing.in_turn(sides, 5, ("fast", "slow"))
    assert times == dict(ours=[1.0] * 5, fast=[2.0] * 5)
    assert all(set(order[i : i + 3]) == set(seconds) for i in range(0, 12, 3)) and set(order[12:]) == {"ours", "fast"}
    assert len({tuple(order[i : i + 3]) for i in range(0, 12, 3)}) > 1
    assert "slow" in timing.in_turn(sides, 5, ("slow",)) and timing.summary([2.0, 1.0, 3.0])["median_ms"] == 2000


@pytest.mark.parametrize(
    ("error", "reason"), [(ImportError, "package not installed"), (torch.OutOfMemoryError, "out of memory")]
)
def test_a_cache_that_cannot_be_had_is_a_row_that_says_so(monkeypatch, error, reason):
    def refuse(config):
        raise error

    monkeypatch.setitem(caches.CACHES, "hqq", refuse)
    options = ["--shape", "tiny", "--contexts", "40", "--rounds", "1", "--new-tokens", "4", "--caches", "dynamic,hqq"]
    args = generate.parse(options)
    model = models.load("tiny", torch.float32, "cpu")
    dynamic, hqq = generate.measure(dict(float32=model), 40, args)
    assert dynamic["kv_tokens"] == 40 and hqq == dict(context=40, dtype="float32", cache="hqq", missing=reason)


def test_bytes_of_a_quantised_cache_count_what_its_tensors_wrap():
    pytest.importorskip("optimum.quanto")
    model = models.load("tiny", torch.float32, "cpu")
    cache = caches.CACHES["quanto"](model.config)
    caches.fill(cache, model, batch=2, tokens=96)
    codes, groups = 2 * 96 * KV_BYTES_A_TOKEN // 2, 2 * 96 * KV_BYTES_A_TOKEN // 64
    assert caches.resident_bytes(cache) == codes + groups * (4 + 4)  # a scale and a shift in float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--contexts", "96"], "--contexts must be at least 97, half of all rounds and a token, got 96"),
        (["--caches", "dynamic,paged"], "--caches must be among isoquant, dynamic, quanto, hqq, got paged"),
        (["--new-tokens", "1"], "--new-tokens must be at least 2, got 1"),
        (["--device", "abacus"], "got 'abacus'"),
        (["--layers", "2"], "--layers needs --shape"),
    ],
)
def test_options_that_cannot_be_measured_are_refused(capsys, options, message):
    with pytest.raises(SystemExit):
        generate.parse(options)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("parse", [attend.parse, attend_sparse.parse])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shapes", "4,2,64,900", "a,b,c,d"], "--shapes: must be [B,]Hq,Hk,d,T, whole numbers from 1 on, got 'a,b,c,d'"),
        (["--shapes", "4,2,64"], "--shapes: must be [B,]Hq,Hk,d,T, whole numbers from 1 on, got '4,2,64'"),
        (["--shapes", "4,0,64,900"], "--shapes: must be [B,]Hq,Hk,d,T, whole numbers from 1 on, got '4,0,64,900'"),
        (["--rounds", "0"], "--rounds: must be a whole number from 1 on, got '0'"),
        (["--rounds", "few"], "--rounds: must be a whole number from 1 on, got 'few'"),
        (["--shapes", "4,3,64,900"], "--shapes: must have Hq that is a multiple of Hk, got '4,3,64,900'"),
        (["--shapes", "4,2,63,900"], "--shapes: must have d that is a multiple of 4 up to 512, got '4,2,63,900'"),
        (["--json", "nowhere/all.json"], "--json: must be a file in a folder that is there, got 'nowhere/all.json'"),
        (["--bits", "5"], "--bits: invalid choice: 5"),
    ],
)
def test_shapes_and_rounds_that_cannot_be_measured_are_refused(capsys, parse, options, message):
    with pytest.raises(SystemExit):
        parse(options)
    assert message in capsys.readouterr().err
    assert parse(["--shapes", "4,2,64,900", "3,4,2,64,900"]).shapes == [(1, 4, 2, 64, 900), (3, 4, 2, 64, 900)]


@pytest.mark.parametrize("wrong", ["abacus", "packed", "triton"])
def test_instruction_sets_that_are_not_here_are_refused(capsys, wrong):
    """Else another one would be measured under this name."""
    with pytest.raises(SystemExit):
        attend.parse(["--isas", native.cpu_isa(), wrong])
    assert f"--isas must be among {', '.join(native.available_isas())} here, got {wrong}" in capsys.readouterr().err
    assert attend.parse(["--isas", native.cpu_isa(), native.cpu_isa()]).isas == [native.cpu_isa()]
