"""The benchmark of experts: all modes of one process decode the same text, and what it writes is whole."""

import json
import pathlib
import sys

import pytest
import tiny_moe
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "benchmarks"))

import experts
import experts_tables
from experts_model import PROMPT, Trace, decode
from render import Bar

TOKENS, LAYERS, TOP_K = 6, 2, 4
SAME_TEXT = "different texts of resident and offloaded, beyond one"


@pytest.fixture
def model():
    return tiny_moe.build("qwen3_moe", implementation="grouped_mm")


@pytest.fixture
def numbers(model) -> dict:
    return experts.in_turn(model, TOKENS, recalls=(1.0,))


def test_every_mode_decodes_the_same_text(numbers):
    results, bars = numbers["results"], {bar.what: bar for bar in numbers["bars"]}
    assert list(results) == ["resident", "ours 0.5", "ours 0.5 recall 1.0", "ours 0.25", "ours 0.25 recall 1.0"]
    assert len({row["tokens"] for row in results.values()}) == 1 and bars[SAME_TEXT].is_held
    for mode, row in results.items():
        if mode != "resident":
            assert row["hits"] + row["misses"] == TOKENS * LAYERS * TOP_K and row["misses"] > 0
            assert row["useful_guesses"] > 0 if "recall" in mode else row["bytes_read"] == row["misses"] * row["expert_bytes"]


def test_a_trace_that_is_not_restarted_gives_another_text(model):
    trace = Trace(model, 2 * (PROMPT + TOKENS + 1))
    first, second = (decode(model, TOKENS)["tokens"] for _ in range(2))
    trace.restart()
    assert decode(model, TOKENS)["tokens"] == first != second
    assert not experts.different_texts([dict(tokens=first), dict(tokens=second)]).is_held


def test_what_is_written_names_its_conditions(numbers, monkeypatch, tmp_path, capsys):
    missed = Bar("speed", 1.0, 2.0)
    monkeypatch.setattr(experts, "run_cpu", lambda args: numbers | dict(bars=[missed], io=args.io, io_threads=args.io_threads))
    monkeypatch.setattr(sys, "argv", ["experts.py", "--json", str(tmp_path / "experts.json")])
    with pytest.raises(SystemExit) as exit:
        experts.main()
    assert exit.value.code == 1
    written = json.loads((tmp_path / "experts.json").read_text())
    assert written["benchmark"] == "experts" and written["shape"]["num_experts_per_tok"] == 8
    assert {"device", "processor", "threads", "date", "versions"} <= set(written["conditions"])
    assert {"torch", "transformers", "torch_kvq", "accelerate"} <= set(written["conditions"]["versions"])
    assert torch.__version__ in capsys.readouterr().out and Bar(**written["bars"][0]) == missed
    header, _, *lines = experts_tables.views(written)["speed"].splitlines()
    assert len(lines) == len(numbers["results"]) and "disk" not in header and "hits" in header
    assert lines[1].startswith("| 50% of experts in memory ") and "50% of experts in memory recall 1.0" in lines[2]


def test_of_several_rounds_the_median_counts():
    sides = [iter([5.0, 1.0, 9.0]), iter([2.0, 8.0, 4.0])]
    first, second = experts.in_rounds(3, *(lambda side=side: dict(cpu_s=next(side)) for side in sides))
    assert (first["cpu_s"], second["cpu_s"]) == (5.0, 4.0)
    assert first["cpu_rounds"] == [5.0, 1.0, 9.0] and second["cpu_rounds"] == [2.0, 8.0, 4.0]
