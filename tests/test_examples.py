"""The examples run, and the real models and texts that the other tests lean on are what they claim to be."""

import pathlib
import subprocess
import sys

import pytest
import real_texts
import repackaged
import sparse_by_hand
import torch

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / "examples"
LEAST_TOKENS = 6000


def test_texts_are_long_and_distinct(smollm2):
    _, tokenizer = smollm2
    texts = real_texts.texts()
    assert {"reference", "datamodel", "docstrings", "code"} <= set(texts)
    assert len({text[:500] for text in texts.values()}) == len(texts)
    for name, text in texts.items():
        assert len(tokenizer(text[:40_000]).input_ids) >= LEAST_TOKENS, name


def test_brown_is_detagged(tmp_path):
    tagged = "\n\n\tThe/at jury/nn said/vbd ``/`` no/at ''/'' ;/. ;/.\n\n\n\tIt/pps (/( the/at court/nn )/) rose/vbd ./.\n"
    (tmp_path / "ca01").write_text(tagged)
    assert real_texts.brown(tmp_path) == 'The jury said " no "; It (the court) rose.'


@pytest.mark.versions
@pytest.mark.parametrize("repack", [repackaged.as_mixtral, repackaged.as_hybrid])
def test_repackaging_keeps_the_logits(smollm2, repack):
    model, tokenizer = smollm2
    ids = tokenizer(real_texts.texts()["reference"][:600], return_tensors="pt").input_ids
    with torch.inference_mode():
        expected, found = model(ids).logits, repack(model)(ids).logits
    torch.testing.assert_close(found, expected, atol=5e-4, rtol=0)


def test_sparse_attention_by_hand(capsys):
    sparse_by_hand.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    for signs, keys in zip(rows[::2], rows[1::2]):
        assert (signs[1], keys[1]) == ("signs", "keys") and signs[0] == keys[0]
        assert float(keys[3]) >= float(signs[0]) - 0.07 and float(keys[3]) > float(signs[3])
        assert float(keys[2].rstrip("%")) < 60 and float(keys[4]) < float(signs[4])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options", "words"),
    [
        (
            "demo.py",
            ["--prompt-len", "400", "--new-tokens", "8"],
            ["decompress_calls       0", "Wrote demo_kv_bytes.png"],
        ),
        ("chat.py", ["Count to five.", "Go on."], ["> Go on.", "decompress_calls       0"]),
    ],
)
def test_examples_run(smollm2, tmp_path, script, options, words):
    done = subprocess.run(
        [sys.executable, EXAMPLES / script, *options], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in words)
