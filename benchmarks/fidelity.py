"""Fidelity of packed caches on real models and texts: ``python benchmarks/fidelity.py --model smollm2-135m``.

Each row prefills a prefix of every text, packs it, then scores the rest one token at a time through the cache
(``torch_kvq.evaluate.fidelity``). ``--ablation`` compares rotations with every other help switched off.
"""

import argparse
import pathlib
import sys
import time

import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

import real_models
import real_texts

import torch_kvq
from torch_kvq import IsoQuantCache
from torch_kvq.evaluate import fidelity

DEFAULT = {
    "K3 V3 (default)": {},
    "K4 V4": dict(k_bits=4, v_bits=4),
    "K4 V3": dict(k_bits=4, v_bits=3),
    "K2 V2": dict(k_bits=2, v_bits=2),
    "K3 V3, balance off": dict(balance=False),
    "K3 V3, centring off": dict(center=False),
    "K3 V3, both off": dict(balance=False, center=False),
}
BARE = dict(balance=False, center=False, num_sinks=0, window_len=1, flush_len=1)
ROTATIONS = ("none", "so3", "so4", "hadamard", "isoquant", "hadamard2", "dense")
ABLATION = {f"{rotation}, nothing else": dict(rotation=rotation, **BARE) for rotation in ROTATIONS}


def token_batch(tokenizer, num_tokens: int) -> tuple[list[str], torch.Tensor]:
    """Names of the texts and their first ``num_tokens`` ids, ``[texts, num_tokens]``."""
    texts = real_texts.texts()
    start = [] if tokenizer.bos_token_id is None or not tokenizer("a").input_ids[0] == tokenizer.bos_token_id else None
    rows = [tokenizer(text, add_special_tokens=start is None).input_ids[:num_tokens] for text in texts.values()]
    return list(texts), torch.tensor(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", choices=list(real_models.SOURCES))
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--scored", type=int, default=512)
    parser.add_argument("--ablation", action="store_true")
    parser.add_argument("--rows", nargs="*", help="only the rows whose name contains one of these")
    args = parser.parse_args()
    model, tokenizer = real_models.load(args.model)
    names, ids = token_batch(tokenizer, args.prefix + args.scored)
    isa = torch_kvq.backends.cpu_isa()
    print(f"{args.model} {str(model.dtype)[6:]}, {len(names)} texts ({', '.join(names)})")
    print(f"prefix {args.prefix}, scored {args.scored}")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {isa}, {torch.get_num_threads()} thread(s)\n")
    print(f"{'cache':26} {'KL':>9} {'top-1':>7} {'delta NLL':>10} {'NLL':>8} {'worst text KL':>14} {'seconds':>8}")
    for name, options in (ABLATION if args.ablation else DEFAULT).items():
        if args.rows and not any(part in name for part in args.rows):
            continue
        began = time.perf_counter()
        got = fidelity(model, ids, lambda: IsoQuantCache(**options), args.prefix)  # noqa: B023
        worst = max(each.kl for each in got.per_sequence)
        seconds = time.perf_counter() - began
        figures = f"{got.kl:9.5f} {got.top1:7.4f} {got.delta_nll:+10.4f} {got.nll:8.4f} {worst:14.5f} {seconds:8.1f}"
        print(f"{name:26} {figures}", flush=True)


if __name__ == "__main__":
    main()
