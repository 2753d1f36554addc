"""``make demo``: one real model goes on with one text, with the library's cache and with packed keys and values.

Shows both texts, speed, resident bytes, what was counted, and how the bytes grow with the context. The model is
SmolLM2-135M-Instruct (see real_models.py), the prompt a page of Python's own reference and the start of a story.
"""

import argparse
import pydoc_data.topics
import textwrap
import warnings

import matplotlib
import torch
import transformers
from measure import Run, agreement, generate, growth, kv_share, resident_bytes
from real_models import load
from real_texts import plain
from transformers import DynamicCache

import torch_kvq
from torch_kvq import IsoQuantCache

matplotlib.use("Agg")
from matplotlib import pyplot

PICTURE = "demo_kv_bytes.png"
LENGTHS = [256, 512, 1024, 2048, 4096, 8192]
LABELS_FROM = 2048  # labels of shorter contexts would overlap
BAR_WIDTH = 56
PAYS_FROM = 0.20  # the papers' rule: share of keys and values in a decode step from which compression pays in time
STORY = "\n\nA short story about a dictionary that forgot its keys:\n\nOnce upon a time, there was a dictionary"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompt-len", type=int, default=2000, help="tokens")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    options = parser.parse_args()
    for name, least in (("prompt_len", 1), ("new_tokens", 2)):  # the time of a decode step needs a second token
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(options, name)}")
    warnings.filterwarnings("ignore", ".*past_key_values.*", FutureWarning)  # renamed `cache` in newer transformers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    model, tokenizer = load("smollm2-135m", getattr(torch, options.dtype))
    prompt = make_prompt(tokenizer, options.prompt_len)
    for kind in (DynamicCache, IsoQuantCache):  # the first calls of a process load code
        model.generate(prompt[:, -200:], past_key_values=kind(), max_new_tokens=4, do_sample=False)
    runs = {kind.__name__: generate(model, prompt, kind(), options.new_tokens) for kind in (DynamicCache, IsoQuantCache)}
    show_texts(runs, tokenizer)
    show_agreement(runs, model)
    show_table(runs, options.dtype)
    show_counters(runs["IsoQuantCache"].cache)
    show_speed(runs, model)
    sizes = {kind.__name__: growth(kind, model, LENGTHS) for kind in (DynamicCache, IsoQuantCache)}
    show_growth(sizes, options.dtype)
    draw_growth(sizes, options.dtype)


def make_prompt(tokenizer, length: int) -> torch.Tensor:
    """Token ids ``[1, length]``: the reference page on dictionaries, cut so that the story's start fits."""
    page, story = (
        tokenizer(text, return_tensors="pt").input_ids for text in (plain(pydoc_data.topics.topics["typesmapping"]), STORY)
    )
    return torch.cat([page[:, : length - story.shape[1]], story], 1)


def show_texts(runs: dict[str, Run], tokenizer) -> None:
    exact, ours = (run.tokens for run in runs.values())
    same = next((i for i, (a, b) in enumerate(zip(exact, ours)) if a != b), len(exact))
    for name, run in runs.items():
        print(f"\n{name} wrote:")
        marked = tokenizer.decode(run.tokens[:same]) + (" || " if same < len(exact) else "")
        text = STORY.splitlines()[-1] + marked + tokenizer.decode(run.tokens[same:])
        for paragraph in text.split("\n\n"):
            print(textwrap.fill(" ".join(paragraph.split()), 100, initial_indent="  ", subsequent_indent="  "))
    print(f"\nThe first {same} of {len(exact)} tokens agree" + (" (up to ||)." if same < len(exact) else "."))


def show_agreement(runs: dict[str, Run], model) -> None:
    same = agreement(model, runs["IsoQuantCache"], runs["DynamicCache"].tokens)
    print(f"Reading DynamicCache's text, IsoQuantCache would choose the same next token in {same:.1%} of the places.")


def show_table(runs: dict[str, Run], dtype: str) -> None:
    dense = resident_bytes(runs["DynamicCache"].cache)
    print(f"\n{'':16}{'prefill tok/s':>14}{'decode tok/s':>14}{'KV bytes':>14}{'ratio':>8}   ({dtype}, 1 sequence)")
    for name, run in runs.items():
        size = resident_bytes(run.cache)
        print(f"{name:16}{run.prefill_rate:14.1f}{run.decode_rate:14.1f}{size:14,}{dense / size:7.2f}x")


def show_counters(cache: IsoQuantCache) -> None:
    print(f"\ncache.stats\n{textwrap.indent(str(cache.stats), '  ')}")
    print(f"\ncache.report()\n{textwrap.indent(str(cache.report()), '  ')}")
    print(f"\ntorch_kvq.backends.report()\n{textwrap.indent(str(torch_kvq.backends.report()), '  ')}")


def show_speed(runs: dict[str, Run], model) -> None:
    """Says in words what the speed is, and that it is no gain where it is none."""
    speed = runs["IsoQuantCache"].decode_rate / runs["DynamicCache"].decode_rate
    share = kv_share(model, runs["DynamicCache"].cache)
    print(f"\nIsoQuantCache decodes at {speed:.2f} times the speed of DynamicCache here.")
    print(f"Keys and values are {share:.0%} of the bytes that a decode step reads.")
    if speed < 1:
        print(f"So packing saves memory and costs time; it is said to save time from a share of about {PAYS_FROM:.0%}.")


def show_growth(sizes: dict[str, list[int]], dtype: str) -> None:
    most = max(map(max, sizes.values()))
    print(f"\nResident KV bytes against context length ({dtype}, measured on caches that were grown)")
    for index, length in enumerate(LENGTHS):
        dense = sizes["DynamicCache"][index]
        for name, column in sizes.items():
            bar = "#" * max(1, round(BAR_WIDTH * column[index] / most))
            ratio = "" if name == "DynamicCache" else f"  {dense / column[index]:.2f}x"
            label = length if name == "DynamicCache" else ""
            print(f"{label:>6} {name:14}{column[index] / 2**20:8.1f} MiB {bar}{ratio}")


def draw_growth(sizes: dict[str, list[int]], dtype: str) -> None:
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    looks = zip(sizes.items(), ("#777777", "#c8442e"), (8, -24))  # names lie off the two lines, ratios between them
    for (name, column), colour, below in looks:
        sizes_mib = [size / 2**20 for size in column]
        axes.plot(LENGTHS, sizes_mib, marker="o", color=colour)
        place = (LENGTHS[-1], sizes_mib[-1])
        axes.annotate(name, place, xytext=(-8, below), textcoords="offset points", ha="right", color=colour)
    for length, dense, ours in zip(LENGTHS, *sizes.values()):
        if length >= LABELS_FROM:
            place = (length, ours / 2**20)
            axes.annotate(f"{dense / ours:.2f}x", place, xytext=(0, 7), textcoords="offset points", ha="center")
    most = 1.1 * max(map(max, sizes.values())) / 2**20
    axes.set(xlabel="context length, tokens", ylabel="resident keys and values, MiB", ylim=(0, most), xlim=(0, None))
    axes.set_title(f"SmolLM2-135M, {dtype}: bytes that a cache holds", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, dpi=150)
    print(f"\nWrote {PICTURE}")


if __name__ == "__main__":
    main()
