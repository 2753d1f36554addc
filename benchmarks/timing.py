"""What the benchmarks share: sides measured in turn, their summary, and the conditions of a result."""

import argparse
import datetime
import importlib.metadata
import json
import pathlib
import platform
import random
import re
import statistics
import time
from collections.abc import Callable

import torch
import transformers

import torch_kvq
from torch_kvq.layout import MAX_BITS, MAX_HEAD_DIM, MIN_BITS

BITS = range(MIN_BITS, MAX_BITS + 1)
HOPELESS = 2.0  # a droppable side whose best of three rounds is this far behind is dropped, as it would set the pace
CPU_FEATURES = "avx2|f16c|avx512f|avx512_vnni|avx512vbmi|avx512_bf16|amx_tile|asimddp|i8mm|sve"
GRAPH_CALLS = 32  # at least, as many as a model has layers, so that the launch of the graph does not count


def in_turn(sides: dict[str, Callable], rounds: int, droppable: tuple[str, ...] = ()) -> dict[str, list[float]]:
    """Seconds of every side in every round, in random order, after one round that does not count.

    A side that returns a float measured itself. Hopeless droppable sides end early.
    """
    times = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in random.Random(number).sample(list(times), len(times)):
            began = time.perf_counter()
            seconds = sides[name]()
            times[name].append(seconds if isinstance(seconds, float) else time.perf_counter() - began)
        if number == 0:
            times = {name: [] for name in times}
        if number == 3 and droppable:
            best = min(min(times[name]) for name in droppable)
            times = {k: v for k, v in times.items() if k not in droppable or min(v) <= HOPELESS * best}
    return times


def summary(times: list[float]) -> dict[str, float]:
    """Median and extremes in ms; ``spread`` is (third - first quartile) / median."""
    low, median, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    extremes = dict(min_ms=1e3 * min(times), max_ms=1e3 * max(times))
    return dict(median_ms=1e3 * median, **extremes, spread=(high - low) / median, rounds=len(times))


def replayed(calls: list[Callable], least: int = GRAPH_CALLS) -> Callable[[], float]:
    """A side that replays one CUDA graph of ``calls``, ``least`` at least, and returns the device's seconds a call."""
    calls = (calls * least)[: max(len(calls), least)]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def side() -> float:
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3 / len(calls)

    return side


def queued(calls: list[Callable]) -> Callable[[], float]:
    """A side that launches ``calls`` on an MPS device, waits, and returns seconds a call."""
    calls = (calls * GRAPH_CALLS)[: max(len(calls), GRAPH_CALLS)]

    def side() -> float:
        torch.mps.synchronize()
        began = time.perf_counter()
        for call in calls:
            call()
        torch.mps.synchronize()
        return (time.perf_counter() - began) / len(calls)

    return side


def arguments(doc: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", type=_present, help="cpu (default), cuda or mps")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=result_file, help="file for all numbers")
    return parser


def count(text: str) -> int:
    """The type of an option that is a number of things, one at least."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {text!r}")
    return int(text)


def attention_shape(text: str) -> tuple[int, int, int, int, int]:
    """The type of an option that is a shape ``[B,]Hq,Hk,d,T``."""
    sizes = text.split(",")
    if len(sizes) not in (4, 5) or not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"must be [B,]Hq,Hk,d,T, whole numbers from 1 on, got {text!r}")
    query_heads, heads, dim = map(int, sizes[-4:-1])
    if query_heads % heads:
        raise argparse.ArgumentTypeError(f"must have Hq that is a multiple of Hk, got {text!r}")
    if dim % 4 or dim > MAX_HEAD_DIM:
        raise argparse.ArgumentTypeError(f"must have d that is a multiple of 4 up to {MAX_HEAD_DIM}, got {text!r}")
    return (1,) * (5 - len(sizes)) + tuple(map(int, sizes))


def result_file(text: str) -> pathlib.Path:
    """The type of an option that is a file to write, which is not found out only once all is measured."""
    path = pathlib.Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a folder that is there, got {text!r}")
    return path


def _present(name: str) -> str:
    found = dict(cpu=True, cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available())
    if not found.get(name):
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(k for k in found if found[k])} here, got {name!r}")
    return name


def conditions(device: str, *optional: str) -> dict:
    """Processor, instruction set, threads, date, and versions, those of ``optional`` packages too if they are installed."""
    found = dict(device=device, machine=platform.machine(), date=datetime.date.today().isoformat())
    if device == "cuda":
        card = torch.cuda.get_device_properties(0)
        found |= dict(processor=card.name, features=[f"sm_{card.major}{card.minor}"])
    else:
        kernels, threads = torch_kvq.backends.report()["attend"].served_by, torch.get_num_threads()
        found |= dict(processor=_cpu_name(), features=_cpu_features(), kernels=kernels, threads=threads)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "torch_kvq": torch_kvq.__version__}
    for package in optional:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | dict(versions=versions)


def _cpu_info(field: str) -> str:
    info = pathlib.Path("/proc/cpuinfo")
    match = re.search(rf"^(?:{field})\s*: (.*)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return match[1].strip() if match else ""


def _cpu_name() -> str:
    return _cpu_info("model name") or platform.processor() or platform.machine()


def _cpu_features() -> list[str]:
    return sorted(set(re.findall(rf"\b(?:{CPU_FEATURES})\b", _cpu_info("flags|Features"))))


def result(benchmark: str, conditions: dict, **numbers) -> dict:
    """What a JSON file of the benchmark holds."""
    return json.loads(json.dumps(dict(benchmark=benchmark, conditions=conditions, **numbers)))


def save(result: dict, path: pathlib.Path) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")


def show(views: dict[str, str]) -> None:
    """Prints tables under their names."""
    print("", *(f"{name}\n\n{text}\n" for name, text in views.items()), sep="\n")
