"""``torch-kvq doctor``: what this installation runs on, and whether it computes what it should."""

import argparse
import platform
import time
import warnings

import torch
import transformers

from . import backends
from .caches.isoquant import IsoQuantCache
from .codecs.isoquant import IsoQuantConfig
from .ops import reference
from .store import PackedStore

SELFTEST_TOLERANCE = 1e-2


def selftest_rows(device: str) -> list[tuple[str, float]]:
    """Relative errors of the operators of ``device`` against the reference, on small cases of attend and encode."""
    generator = torch.Generator().manual_seed(0)
    keys, values, query = (torch.randn(shape, generator=generator).to(device) for shape in _SHAPES)
    stores = [PackedStore(IsoQuantConfig(), along, 2, 2, 128, keys.device) for along in (False, True)]
    for store, x in zip(stores, (keys, values)):
        store.append(x)
    rows = []
    for store, x in zip(stores, (keys, values)):
        rebuilt = store.decode(0, store.length, torch.float32)
        rows.append((f"encode and decode, {'values' if store.along_tokens else 'keys'}", _error(rebuilt, x)))
    exact, packed = keys[:, :, :20].contiguous(), [store.tensors() for store in stores]
    for dtype in (torch.float32, torch.bfloat16):
        outs = []
        for attend in (torch.ops.torch_kvq.attend, reference.attend):
            out, lse = torch.full_like(query, torch.nan), query.new_full(query.shape[:3], torch.nan)
            attend(query.to(dtype), *packed, exact, exact, None, None, 0, stores[0].length, 4, 128**-0.5, 0.0, out, lse)
            outs.append(out)
        rows.append((f"attend, {str(dtype)[6:]} query", _error(*outs)))
    return rows


_SHAPES = ((2, 2, 333, 128), (2, 2, 333, 128), (2, 8, 1, 128))
_EXPECTED = {"encode and decode, keys": 0.25, "encode and decode, values": 0.25}  # 3 bits lose 19 % of the norm


def _error(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((ours - wanted).norm() / wanted.norm()).item()


def doctor(selftest: bool, device: str) -> int:
    """Prints versions, the backend of every operator and, if asked, the self-test; returns the exit status."""
    print(f"torch_kvq on {platform.system()} {platform.machine()}, Python {platform.python_version()}")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads")
    print(f"CPU kernels: {backends.cpu_isa()}\n")
    print(backends.report())
    if not selftest:
        return 0
    failed = 0
    print(f"\n{'self-test on ' + device:32} {'error':>9}")
    for name, error in selftest_rows(device):
        good = error <= _EXPECTED.get(name, SELFTEST_TOLERANCE)
        failed += not good
        print(f"{name:32} {error:9.2e}  {'ok' if good else 'WRONG'}")
    began = time.perf_counter()
    cache = IsoQuantCache()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no model here to find a config of
        for tokens in (4096, 1):
            shape = (1, 2, tokens, 128)
            cache.update(*(torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2)), 0)
    took = time.perf_counter() - began
    print(f"a cache of 4,097 tokens, 2 heads of 128: {cache.nbytes:,} bytes for {4097 * 2 * 128 * 4:,} in bf16, {took:.2f} s")
    return 1 if failed else 0


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
    check.add_argument("--device", default="cpu", type=_usable_device, help="where the self-test runs")
    options = parser.parse_args(arguments)
    return doctor(options.selftest, options.device)


if __name__ == "__main__":
    raise SystemExit(main())
