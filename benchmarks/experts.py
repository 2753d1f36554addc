"""A mixture of experts larger than its memory: load, bytes, speed, against a resident model and accelerate's disk offload.

``python benchmarks/experts.py --device cpu --folder /disk/moe --json experts.json`` writes a 3.3 GB checkpoint of a generated
Qwen3-MoE into ``--folder`` (16 layers of 64 experts of 3 MiB, top 8) unless it is there, and runs every mode in a process of
its own. Routers are made to follow one synthetic trace with the locality published for a real model, the same in each mode.
``Cold`` means that the page cache of the checkpoint and of the offload folder is dropped before each token; ours then reads
with O_DIRECT. Memory is ``RssAnon``, sampled, beyond what the process held once everything was imported (some 300 MB);
disk bytes are the kernel's count for the process.

``--device cuda`` takes Qwen3-30B-A3B's shape with random weights, experts in page-locked memory, and no disk.
Every bar is shown with its verdict; the exit status is 1 if one is missed.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import experts_tables
import timing
import torch
import transformers
from experts_model import PROMPT, Foreteller, Memory, Trace, anonymous_bytes, config, decode, drop_page_cache, write_checkpoint
from render import Bar
from torch import nn

from torch_kvq import load_with_expert_offload, offload_experts
from torch_kvq.experts import expert_device_map
from torch_kvq.experts.families import find_experts
from torch_kvq.experts.predictors import PREDICTORS

SHARES, RECALLS = (0.25, 0.5, 0.75), (0.5, 0.8, 1.0)
MB = 1e6

# ---- one mode, in a process of its own


def run_mode(args: argparse.Namespace) -> dict:
    """``resident``, ``accelerate`` or ``ours``: load, then decode."""
    torch.set_num_threads(args.threads)
    quiet()
    transformers.Qwen3MoeForCausalLM  # noqa: B018 - imported now, not within what is measured
    base = anonymous_bytes()
    drop_page_cache(args.folder)
    offload_folder = tempfile.mkdtemp(dir=args.folder) if args.mode == "accelerate" else None
    began = time.perf_counter()
    with Memory() as memory:
        model = load(args, offload_folder)
        load_s = time.perf_counter() - began
    dense = sum(p.nbytes for p in model.parameters()) - sum(
        p.nbytes for module in find_experts(model).values() for p in module.parameters()
    )
    result = dict(load_s=load_s, load_anonymous=memory.peak - base, imports_anonymous=base, dense_bytes=dense)
    handle = getattr(model, "expert_offload", None)
    if handle is not None:
        result["load_expert_bytes"] = handle.stats().bytes_read
    if not args.own_routing:
        Trace(model, PROMPT + args.tokens + 1)
    if offload_folder:
        os.sync()
    cold = (lambda: drop_page_cache(args.folder, offload_folder)) if args.mode != "resident" else (lambda: None)
    with Memory() as memory:
        result.update(decode(model, args.tokens, cold))
    result["decode_anonymous"] = memory.peak - base
    if offload_folder:
        for path in pathlib.Path(offload_folder).iterdir():
            path.unlink()
        os.rmdir(offload_folder)
    return result


def load(args: argparse.Namespace, offload_folder: str | None) -> nn.Module:
    common = dict(dtype=torch.bfloat16, attn_implementation="sdpa")
    if args.mode == "ours":
        offload = dict(threads=args.io_threads)
        if args.recall is not None:
            offload.update(predictor=lambda model: Foreteller(args.recall), num_guesses=8)
        if args.predictor:
            offload.update(predictor=PREDICTORS[args.predictor], num_guesses=8)
        return load_with_expert_offload(args.folder, args.share, io=args.io, offload=offload, **common)
    if args.mode == "accelerate":
        with torch.device("meta"):
            common["device_map"] = expert_device_map(transformers.AutoModelForCausalLM.from_config(config("cpu")))
        common["offload_folder"] = offload_folder
    model = transformers.AutoModelForCausalLM.from_pretrained(args.folder, **common).eval()
    if args.mode == "resident":  # transformers maps the file: bring everything into memory
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return model


def quiet() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def spawn(args: argparse.Namespace, mode: str, **options) -> dict:
    """The numbers of a mode; its process prints them as its last line."""
    command = [sys.executable, __file__, "--mode", mode, "--folder", str(args.folder), "--threads", str(args.threads)]
    for name, value in {"tokens": args.tokens, "io": args.io, "io_threads": args.io_threads, **options}.items():
        command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{mode} failed")
    result = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"{mode} {options}: " + line(result), flush=True)
    return result


def line(r: dict) -> str:
    text = f"load {r['load_s']:.1f} s, {r['load_anonymous'] / MB:.0f} MB anonymous; " if "load_s" in r else ""
    text += f"{1 / r['token_s']:.2f} tokens/s, prefill {r['prefill_s']:.2f} s, CPU {1e3 * r['cpu_s']:.0f} ms a token"
    if "decode_anonymous" in r:
        text += f", {r['decode_anonymous'] / MB:.0f} MB anonymous, {r['disk_bytes'] / MB:.0f} MB of disk"
    if "hits" in r:
        text += f", hits {r['hits'] / (r['hits'] + r['misses']):.3f}, {r['bytes_read'] / MB:.0f} MB of experts"
        text += f", stall {1e3 * r['stall_s']:.0f} ms a token"
    if r.get("guesses"):
        text += f", {r['useful_guesses']} of {r['guesses']} guesses useful"
    return text


def run_cpu(args: argparse.Namespace) -> dict:
    """Results by mode, bars, and how the checkpoint was read."""
    if not (args.folder / "model.safetensors.index.json").exists():
        print("writing the checkpoint", flush=True)
        write_checkpoint(args.folder)
    resident, quarter = in_rounds(args.rounds, lambda: spawn(args, "resident"), lambda: spawn(args, "ours", share=0.25))
    rival = spawn(args, "accelerate", tokens=args.accelerate_tokens)
    ours = {share: quarter if share == 0.25 else spawn(args, "ours", share=share) for share in SHARES}
    results = dict(resident=resident, accelerate=rival, **{f"ours {share}": ours[share] for share in SHARES})
    dense = quarter["dense_bytes"]
    bars = [
        Bar("expert bytes read at load", max(r["load_expert_bytes"] for r in ours.values()), 0, "", at_most=True),
        Bar("anonymous MB at load", quarter["load_anonymous"] / MB, round(dense / MB) + 200, "", at_most=True),
        Bar("load against accelerate's disk map, times faster", rival["load_s"] / quarter["load_s"], 5),
    ]
    for share, r in ours.items():
        limit = round((dense + r["slot_bytes"]) / MB) + 200
        bars.append(Bar(f"anonymous MB in decode at {share:.0%}", r["decode_anonymous"] / MB, limit, "", at_most=True))
        surplus = abs(r["bytes_read"] - r["misses"] * r["expert_bytes"])
        bars.append(Bar(f"bytes read other than misses x expert at {share:.0%}", surplus, 0, "", at_most=True))
        if args.io == "direct":
            bars.append(Bar(f"disk bytes over bytes read at {share:.0%}", r["disk_bytes"] / r["bytes_read"], 1.1, at_most=True))
    bars += [
        Bar("cold decode at 25% against accelerate, times faster", rival["token_s"] / quarter["token_s"], 5),
        Bar("CPU time a token at 25% over resident", quarter["cpu_s"] / resident["cpu_s"], 1.4, at_most=True),
        different_texts([resident, *ours.values()]),
    ]
    results |= do_predictors_pay(args, quarter) if args.predictors else {}
    return dict(results=results, bars=bars, io=args.io, io_threads=args.io_threads)


def in_rounds(rounds: int, *sides: Callable[[], dict]) -> list[dict]:
    """Of every side the round with the median CPU time a token, which varies from process to process; all of them beside it."""
    measured = [[side() for side in sides] for _ in range(rounds)]
    median = []
    for of_side in zip(*measured, strict=True):
        ordered = sorted(of_side, key=lambda r: r["cpu_s"])
        median.append(ordered[len(ordered) // 2] | dict(cpu_rounds=[r["cpu_s"] for r in of_side]))
    return median


def different_texts(results: list[dict]) -> Bar:
    texts = len({r["tokens"] for r in results})
    return Bar("different texts of resident and offloaded, beyond one", texts - 1, 0, "", at_most=True)


def do_predictors_pay(args: argparse.Namespace, quarter: dict) -> dict:
    """Predictors that know the trace, to some part, say what guessing can bring here; the real ones follow the model's own
    routing, which in a model of random weights says little: pass ``--folder`` with a real checkpoint."""
    results = {}
    for recall in RECALLS:
        results[f"ours 0.25 recall {recall}"] = told = spawn(args, "ours", share=0.25, recall=recall)
        print(verdict(f"a predictor of recall {recall}", told, quarter))
    results["ours 0.25 own routing"] = plain = spawn(args, "ours", share=0.25, own_routing=True)
    for name in args.predictors:
        results[f"ours 0.25 {name}"] = guessed = spawn(args, "ours", share=0.25, own_routing=True, predictor=name)
        print(verdict(name, guessed, plain))
    return results


def verdict(name: str, guessed: dict, plain: dict) -> str:
    gain = plain["token_s"] / guessed["token_s"] - 1
    return f"{name} {'pays' if gain > 0.02 else 'does not pay'} on this machine: {gain:+.1%} speed"


def run_cuda(args: argparse.Namespace) -> dict:
    """Results by mode, bars, and the speed of the link."""
    quiet()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config("cuda", args.layers), attn_implementation="sdpa").eval()
    peak = link_peak()
    print(f"link: {peak / 1e9:.1f} GB/s from page-locked memory", flush=True)
    return in_turn(model, args.tokens, RECALLS if args.predictors else (), peak) | dict(link_peak=peak)


def in_turn(model: nn.Module, num_tokens: int, recalls: tuple[float, ...] = (), peak: float | None = None) -> dict:
    """Resident, then the same model with half and a quarter of its experts resident; every mode decodes the same text.

    Args:
        recalls: of predictors to measure as well.
        peak: bytes a second of the link that copies are held against, on CUDA.
    """
    trace = Trace(model, 2 * (PROMPT + num_tokens + 1))
    results, bars = {"resident": warm(model, num_tokens)}, []
    print("resident: " + line(results["resident"]), flush=True)
    for share, least in ((0.5, 0.5), (0.25, 0.33)):
        for recall in (None, *recalls):
            extra = dict(predictor=lambda model, recall=recall: Foreteller(recall), num_guesses=8) if recall else {}
            handle = offload_experts(model, share, **extra)
            if peak and recall is None:
                bars.append(Bar(f"copies at {share:.0%}, share of the link's peak", copy_rate(handle) / peak, 0.8, "%"))
            trace.restart()
            key = f"ours {share}" + (f" recall {recall}" if recall else "")
            results[key] = warm(model, num_tokens)
            print(f"{key}: " + line(results[key]), flush=True)
            if recall is None:
                speed = results["resident"]["token_s"] / results[key]["token_s"]
                bars.append(Bar(f"decode at {share:.0%} resident, share of resident speed", speed, least, "%"))
            else:
                print(verdict(f"a predictor of recall {recall}", results[key], results[f"ours {share}"]))
            handle.remove()
    return dict(results=results, bars=[*bars, different_texts(list(results.values()))])


def warm(model: nn.Module, num_tokens: int) -> dict:
    """The second of two decodes: the first fills slots and compiles kernels."""
    decode(model, num_tokens)
    return decode(model, num_tokens)


def link_peak(num_bytes: int = 1 << 28, rounds: int = 5) -> float:
    """Bytes a second of one large copy from page-locked memory, the best of several."""
    here = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        there.copy_(here, non_blocking=True)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return num_bytes / best


def copy_rate(handle, rounds: int = 4) -> float:
    """Bytes a second of bringing in experts that are all missing, eight a layer as a token would."""
    best = 0.0
    for start in range(rounds):
        for pool in set(handle.pools.values()):
            pool.clear()
        torch.cuda.synchronize()
        began, total = time.perf_counter(), 0
        for name, pool in handle.pools.items():
            pool.request(name, list(range(8 * start, 8 * start + 8))).wait()
            total += 8 * pool.spec.nbytes
        torch.cuda.synchronize()
        best = max(best, total / (time.perf_counter() - began))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--folder", type=pathlib.Path, help="of the checkpoint, on the disk to measure")
    parser.add_argument("--threads", type=int, default=1, help="that compute, on the CPU")
    parser.add_argument("--tokens", type=int, default=40, help="decoded in each mode")
    parser.add_argument("--accelerate-tokens", type=int, default=5)
    parser.add_argument("--rounds", type=timing.count, default=5, help="of the two sides whose CPU time is compared")
    parser.add_argument("--io", default="direct", choices=["direct", "pread", "mmap"])
    parser.add_argument("--io-threads", type=int, default=2)
    parser.add_argument("--layers", type=int, help="of the model on CUDA, default 48")
    parser.add_argument("--predictors", nargs="*", default=[], choices=list(PREDICTORS), help="to measure as well")
    parser.add_argument("--json", type=timing.result_file, help="file for all numbers")
    parser.add_argument("--mode", choices=["resident", "accelerate", "ours"], help=argparse.SUPPRESS)
    parser.add_argument("--share", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--recall", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--own-routing", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--predictor", choices=list(PREDICTORS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.mode:
        print(json.dumps(run_mode(args)))
        return
    torch.set_num_threads(args.threads)
    conditions = timing.conditions(args.device, "accelerate" if args.device == "cpu" else "triton")
    with tempfile.TemporaryDirectory() as scratch:
        args.folder = args.folder or pathlib.Path(scratch)
        numbers = (run_cpu if args.device == "cpu" else run_cuda)(args)
    bars, shape = numbers.pop("bars"), config(args.device, args.layers)
    shape = {name: getattr(shape, name) for name in ("num_hidden_layers", "num_experts", "num_experts_per_tok")}
    rows = [dataclasses.asdict(bar) for bar in bars]
    result = timing.result("experts", conditions, shape=shape, bars=rows, **numbers)
    timing.show(experts_tables.views(result))
    if args.json:
        timing.save(result, args.json)
    sys.exit(not all(bar.is_held for bar in bars))


if __name__ == "__main__":
    main()
