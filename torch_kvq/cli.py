"""``torch-kvq doctor``: what this installation runs on, and whether it computes what it should."""

import argparse
import functools
import os
import platform
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator

import torch
import transformers

from . import backends
from .caches.isoquant import IsoQuantCache
from .codecs.isoquant import IsoQuantConfig
from .layout import BLOCK_LEN, num_words
from .ops import fused, reference, sparse_reference
from .store import PackedStore, no_tokens

SELFTEST_TOLERANCE = 1e-2
_SHAPES = ((2, 2, 700, 128), (2, 2, 700, 128), (2, 8, 1, 128))  # keys, values, query
_SHORT = 333  # tokens of a body that shaders sum by another strategy


def _on_cpu(value):
    """Tensors, also in lists, on the CPU, where the reference needs no operator that a device may lack."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    return [_on_cpu(each) for each in value] if isinstance(value, list | tuple) else value


def _codec_rows(stores: list[PackedStore], vectors: list[torch.Tensor]) -> Iterator[tuple[str, float]]:
    for store, x in zip(stores, vectors):
        what, tensors = "values" if store.along_tokens else "keys", _on_cpu(store.tensors())
        decoded = reference.decoded(tensors, store.along_tokens, 0, store.length, x.shape[-1])
        wanted = [part.clone() for part in tensors[:3]]
        reference.encode(x.cpu(), *tensors[3:], store.config.rule, store.along_tokens, 0, *wanted)
        expected = reference.decoded([*wanted, *tensors[3:]], store.along_tokens, 0, store.length, x.shape[-1])
        yield f"encode, {what}", _error(decoded, expected)
        yield f"decode, {what}", _error(store.decode(0, store.length, torch.float32).cpu(), decoded)


def _joint_codec_row(stores: list[PackedStore], vectors: list[torch.Tensor]) -> tuple[str, float]:
    whole, packed = stores[0].length // BLOCK_LEN * BLOCK_LEN, [store.tensors() for store in stores]  # blocks that are full
    x, rules = (each[:, :, :whole] for each in vectors), (store.config.rule for store in stores)
    outs = []
    for tensors in packed:
        capacity = tensors[2].shape[2]
        outs += [part[:, :, : part.shape[2] * whole // capacity].clone() for part in tensors[:3]]
    return "encode_kv", max(_errors("encode_kv", (*x, *(tensors[3:] for tensors in packed), *rules, 0), outs))


def _against_reference(name: str, arguments: tuple, *shapes: tuple[int, ...]) -> float:
    """Error of the first output of operator ``name``; its outputs have ``shapes``."""
    device = next(x for x in arguments if isinstance(x, torch.Tensor)).device
    return _errors(name, arguments, [torch.empty(shape, device=device) for shape in shapes])[0]


def _reference(name: str) -> Callable[..., None]:
    if name in fused.PARTS:
        parts = types.SimpleNamespace(**{part: _reference(part) for part in fused.PARTS[name]})
        return functools.partial(getattr(fused, name), parts=parts)
    return getattr(reference if hasattr(reference, name) else sparse_reference, name)


def _errors(name: str, arguments: tuple, outs: list[torch.Tensor]) -> list[float]:
    """Error of every output of operator ``name``; what the reference gives is left in ``outs``."""
    for out in outs:
        out.fill_(torch.nan if out.is_floating_point() else -1)
    ours, wanted = [out.clone() for out in outs], [out.cpu().clone() for out in outs]
    getattr(torch.ops.torch_kvq, name)(*arguments, *ours)
    _reference(name)(*_on_cpu(arguments), *wanted)
    for out, right in zip(outs, wanted):
        out.copy_(right)
    return [_error(mine.cpu(), right) for mine, right in zip(ours, wanted)]


def _sparse_rows(query: torch.Tensor, keys: torch.Tensor, tensors: list[torch.Tensor]) -> Iterator[tuple[str, float]]:
    """Of the operators of sparse attention; ``tensors`` are those of a packed store of ``keys``."""
    (batch, heads, tokens, dim), rows, scale = keys.shape, query.shape[:3], query.shape[-1] ** -0.5
    transform = (keys[:, :, 0].contiguous(), *tensors[4:])

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=query.device)

    def row(name: str, arguments: tuple, *outs: torch.Tensor, but: int | None = None) -> tuple[str, float]:
        """But for what output ``but`` holds, which is not defined."""
        errors = enumerate(_errors(name, arguments, list(outs)))
        return name, max((error for place, error in errors if place != but), key=lambda error: (error != error, error))

    planes, terms = new(*rows, 4, num_words(dim), dtype=torch.int32), new(*rows, 4)
    yield row("quantise_query", (query, *transform, scale), planes, terms)
    index = [new(batch, heads, tokens, num_words(dim), dtype=torch.int32)]
    index += [new(batch, heads, tokens, dtype=torch.float16) for _ in range(2)]
    yield row("index_keys", (keys, *transform, 0), *index)
    scores, lse = new(*rows, tokens), new(*rows)
    yield row("sign_scores", (planes, terms, *index, dim, scale, 0), scores)
    indices, count = new(batch, heads, tokens, dtype=torch.int32), new(batch, heads, dtype=torch.int32)
    yield row("sign_top_p_select", (planes, terms, *index, dim, scale, 0, lse.fill_(1.0), 0.5), scores, indices, count)
    half, exact = query.bfloat16(), keys[:, :, :20].bfloat16()
    nothing = [no_tokens(batch, heads, dim, along, query.device) for along in (False, True)]
    room = half.clone(), lse.clone(), planes.clone(), terms.clone(), scores.half(), indices.clone(), count.clone()
    step = (half, *nothing, exact, exact, None, *transform, *index, scale, 1.0)  # all, whatever the last bit of a code is
    yield row("attend_top_p_select", step, *room, but=4)
    yield row("top_p_select", (scores, lse, None, None, 0.5), indices, count)
    count.fill_(int(count.min()))
    selected = indices[..., : int(count[0, 0])].contiguous(), count
    yield row("qk_selected", (query, tensors, *selected, scale), new(*rows, selected[0].shape[-1]))
    yield row("attend_selected", (query, [keys], tensors, *selected, None, scale, 0.0), new(*rows, dim), lse)
    near = torch.stack([query, query]), torch.stack([lse, lse])
    rest = (None, scale, 0.0, *near)
    yield row("merge_selected", (query, [keys], tensors, *selected, *rest), new(*rows, dim), torch.empty_like(lse))
    yield row("gather_selected", (keys, *selected), new(*selected[0].shape, dim))


def selftest_rows(device: str) -> Iterator[tuple[str, float]]:
    """Relative errors of every operator of ``device`` against the reference, on small problems."""
    generator = torch.Generator().manual_seed(0)
    keys, values, query = (torch.randn(shape, generator=generator).to(device) for shape in _SHAPES)
    stores = [PackedStore(IsoQuantConfig(), along, 2, 2, 128, keys.device) for along in (False, True)]
    for store, x in zip(stores, (keys, values)):
        store.append(x)
    yield "rotate", _against_reference("rotate", (query, *stores[0].tensors()[6:], False), query.shape)
    yield from _codec_rows(stores, [keys, values])
    yield _joint_codec_row(stores, [keys, values])
    exact, (packed_keys, packed_values) = keys[:, :, :20].contiguous(), (store.tensors() for store in stores)
    length, lse = stores[0].length, query.shape[:3]
    for dtype, tokens in ((torch.float32, length), (torch.float32, _SHORT), (torch.bfloat16, length)):
        rest = (exact, exact, None, None, 0, tokens, 4, 128**-0.5, 0.0)
        error = _against_reference("attend", (query.to(dtype), packed_keys, packed_values, *rest), query.shape, lse)
        yield f"attend, {str(dtype)[6:]} query, {tokens} tokens", error
    scores = torch.rand(*lse, length + 20, generator=generator).to(device)
    yield "qk", _against_reference("qk", (query, packed_keys, exact, length, 4), scores.shape)
    yield "pv", _against_reference("pv", (scores, packed_values, exact, length, 4), query.shape)
    pieces = torch.stack([query, -query]), torch.stack([scores[..., 0], scores[..., 1]])
    yield "merge", _against_reference("merge", pieces, query.shape, lse)
    yield from _sparse_rows(query, keys, packed_keys)


def _error(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, or of integers the share that differs."""
    if not wanted.is_floating_point():
        return (ours != wanted).float().mean().item()
    return ((ours.float() - wanted.float()).norm() / wanted.float().norm()).item()


def _run_selftest(device: str) -> int:
    """Prints the self-test of a device; returns how many operators are wrong."""
    failed = 0
    print(f"\n{'self-test on ' + device:36} {'error':>9}")
    for name, error in selftest_rows(device):
        good = error <= SELFTEST_TOLERANCE
        failed += not good
        print(f"{name:36} {error:9.2e}  {'ok' if good else 'WRONG'}")
    began = time.perf_counter()
    cache = IsoQuantCache()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no model here to find a config of
        for tokens in (4096, 1):
            shape = (1, 2, tokens, 128)
            cache.update(*(torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2)), 0)
    took = time.perf_counter() - began
    for name, reasons in backends.metal.fallbacks().items() if device.startswith("mps") else ():
        print(f"{name}: answered by the reference, {reasons}")
    print(f"a cache of 4,097 tokens, 2 heads of 128: {cache.nbytes:,} bytes for {4097 * 2 * 128 * 4:,} in bf16, {took:.2f} s")
    return failed


def doctor(selftest: bool, devices: list[str]) -> int:
    """Prints versions, the backend of every operator and, if asked, the self-test; returns the exit status."""
    print(f"torch_kvq on {platform.system()} {platform.machine()}, Python {platform.python_version()}")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads")
    print(f"CPU kernels: {backends.cpu_isa()}")
    missing = backends.cuda.no_device()
    used = f"none in use, {missing}" if missing else f"{backends.cuda.served_by()}, for {torch.cuda.get_device_name()}"
    print(f"CUDA kernels: {used}; {backends.cuda.build()}")
    if torch.backends.mps.is_available():
        print(f"MPS kernels: {backends.metal.served_by()}, macOS {platform.mac_ver()[0]}")
    for error in backends.refused:
        print(f"REFUSED: {error}")
    print()
    print(backends.report())
    failed = sum(_run_selftest(device) for device in devices) if selftest else 0
    return 1 if failed or backends.refused else 0


def _usable_device(name: str) -> str:
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(f"must be a device of this machine, got {name!r}: {reason}") from None
    return name


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="torch-kvq", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("doctor", help="versions, backends and why others are not used")
    check.add_argument("--selftest", action="store_true", help="run the operators against the reference")
    check.add_argument("--device", type=_usable_device, help="where the self-test runs, default: everywhere")
    options = parser.parse_args(arguments)
    there = dict(cpu=True, cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available())
    everywhere = [name for name, available in there.items() if available]
    try:
        status = doctor(options.selftest, [options.device] if options.device else everywhere)
        if sys.stdout is not None:  # as it is where the caller closed it
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, as head, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered goes nowhere
        return 1 if options.selftest or backends.refused else 0  # not all was tested


if __name__ == "__main__":
    raise SystemExit(main())
