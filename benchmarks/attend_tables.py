"""Tables of the numbers of ``attend.py`` and ``attend_sparse.py``, by the name under which documents hold them."""

from dense import FEWER_BITS
from render import Bar, bars, conditions, table, three_digits

# Least speed-up by (Hq, Hk, d, T) on a CPU with AVX-512 and with AVX2, by (B, Hq, Hk, d, T) on an H200.
CPU_BARS = {
    (32, 8, 128, 32768): (5.0, 2.5),
    (9, 3, 64, 32768): (3.0, 1.5),
    (32, 8, 128, 4096): (2.5, 1.5),
    (9, 3, 64, 4096): (1.5, 1.0),
}
GPU_BARS = {
    (8, 32, 8, 128, 131072): 4.0,
    (8, 32, 8, 128, 32768): 3.6,
    (8, 32, 8, 128, 8192): 3.0,
    (32, 32, 8, 128, 8192): 3.5,
    (1, 32, 8, 128, 131072): 3.3,
    (1, 32, 8, 128, 32768): 2.5,
    (1, 32, 8, 128, 8192): 1.7,
    (1, 32, 8, 128, 2048): 1.5,
    (8, 16, 8, 128, 32768): 3.0,
    (8, 64, 8, 128, 32768): 3.0,
    (8, 32, 8, 64, 32768): 3.0,
    (8, 32, 8, 256, 32768): 3.0,
}
LONGEST, FP8_SHAPE = (8, 32, 8, 128, 131072), (8, 32, 8, 128, 32768)
ENCODE_LEN, ENCODE_SHARE = 4096, 0.15
TWIN_SHARE = 2.5  # times that the Triton twin may take as long
FLUSH_SHAPES, FLUSH_SHARE = ((8, 32, 8, 128, 32768), (1, 32, 8, 128, 32768)), 0.05
SCAN_PARTS = ("scan", "select", "scan and select")  # the first two of results from before there was one operator
# Of attend_sparse.py at SPARSE_SHARE: least speed-up by device and (B, Hq, Hk, d, T). SCAN_SHARE: scan, selection over dense.
# SCORES_SHAPE: of sign_scores, microseconds at most.
SPARSE_BARS = {
    ("cpu", 1, 32, 8, 128, 32768): 4.0,
    ("cuda", 8, 32, 8, 128, 32768): 4.0,
    ("cuda", 8, 32, 8, 128, 131072): 6.0,
}
SPARSE_SIDES, SPARSE_SHARE, SCAN_SHARE = ("sparse", "sparse packed", "packed"), 0.1, 0.1
SCORES_SHAPE, SCORES_US = (1, 8, 8, 128, 16384), 5.0
FAMILIES = ("avx512", "avx2")


def views(result: dict) -> dict[str, str]:
    """Markdown by name: speed, all, encode, bars, conditions."""
    return dict(
        speed=_speed(result), all=_all(result), encode=_encode(result), bars=bars(_bars(result)), conditions=_conditions(result)
    )


def _shape(row: dict) -> str:
    batch, *rest, tokens = row["shape"]
    return ", ".join([*([f"B {batch}"] if batch > 1 else []), *map(str, rest), f"{tokens:,}"])


def _ms(side: dict) -> str:
    return f"{three_digits(side['median_ms'])} ms ({side['spread']:.0%})"


def _speed(result: dict) -> str:
    isas = result["isas"]
    rows = []
    for row in result["attend"]:
        sides = row["results"]
        cells = [f"{sides[isa]['ratio']:.2f}x, {_ms(sides[isa])}" for isa in isas]
        rows.append([_shape(row), f"{_ms(sides[row['best_dense']])} {row['best_dense']}", *cells])
    return table(["Hq, Hk, d, tokens", "best dense", *isas], rows)


def _all(result: dict) -> str:
    rows = []
    for row in result["attend"]:
        for name, side in row["results"].items():
            ours = name in result["isas"]
            last = (
                [f"{side['ratio']:.2f}x", f"{side['ratio_of_minima']:.2f}x", f"{side['memory_share']:.0%}"]
                if ours
                else [""] * 3
            )
            extremes = f"{three_digits(side['min_ms'])} - {three_digits(side['max_ms'])}"
            rows.append([_shape(row), name, three_digits(side["median_ms"]), extremes, str(side["rounds"]), *last])
    return table(["Hq, Hk, d, tokens", "side", "ms", "min - max", "rounds", "speed-up", "of minima", "memory"], rows)


def _encode(result: dict) -> str:
    rows, measured_alone = [], [isa for isa in result["isas"] if "alone" in result["encode"][0]["results"][isa]]
    for row in result["encode"]:
        sides = row["results"]
        cells = [f"{_ms(sides[isa])}, {sides[isa]['share']:.1%} of it" for isa in result["isas"]]
        alone = [_ms(sides[isa]["alone"]) for isa in measured_alone]
        rows.append([_shape(row), f"{_ms(sides[row['best_dense']])} {row['best_dense']}", *cells, *alone])
    titles = [*result["isas"], *(f"{isa}, alone" for isa in measured_alone)]
    return table(["Hq, Hk, d, tokens", "dense prefill attention", *titles], rows)


def _bars(result: dict) -> list[Bar]:
    gpu = result["conditions"]["device"] == "cuda"
    return _gpu_bars(result) if gpu else _cpu_bars(result)


def _cpu_bars(result: dict) -> list[Bar]:
    """Of the first, fastest, instruction set of each family."""
    found = []
    for family, name in enumerate(FAMILIES):
        isa = next((isa for isa in result["isas"] if isa.startswith(name)), None)
        if isa is None:
            continue
        for row in result["attend"]:
            least = CPU_BARS.get(tuple(row["shape"][1:]))
            if least:
                found.append(Bar(f"attend {_shape(row)}, {isa}", row["results"][isa]["ratio"], least[family]))
        for row in result["encode"]:
            if row["shape"][-1] == ENCODE_LEN:
                what = f"encode / prefill attention {_shape(row)}, {isa}"
                found.append(Bar(what, row["results"][isa]["share"], ENCODE_SHARE, "%", at_most=True))
    return found


def _gpu_bars(result: dict) -> list[Bar]:
    found = []
    for row in result["attend"]:
        shape, sides = tuple(row["shape"]), row["results"]
        ours = sides["packed"]
        if shape in GPU_BARS:
            found.append(Bar(f"attend {_shape(row)}", ours["ratio"], GPU_BARS[shape]))
        if shape == LONGEST:
            found.append(Bar(f"share of the copy rate {_shape(row)}", ours["memory_share"], 0.8, "%"))
        if shape in FLUSH_SHAPES and row.get("flush"):
            what = f"flush of a block, {three_digits(1e3 * row['flush']['median_ms'])} us / decode attention {_shape(row)}"
            found.append(Bar(what, row["flush"]["share"], FLUSH_SHARE, "%", at_most=True))
        if "triton" in sides:
            slower = sides["triton"]["median_ms"] / ours["median_ms"]
            found.append(Bar(f"Triton twin / packed, attend {_shape(row)}", slower, TWIN_SHARE, at_most=True))
        if shape == FP8_SHAPE:
            fp8 = sides.get(FEWER_BITS[0])
            found.append(Bar(f"{FEWER_BITS[0]} {_shape(row)}", fp8 and fp8["median_ms"] / ours["median_ms"], 2.5))
    for row in result["encode"]:
        sides = row["results"]
        found.append(Bar(f"share of the copy rate, encode {_shape(row)}", sides["packed"]["memory_share"], 0.5, "%"))
        if "triton" in sides:
            slower = sides["triton"]["median_ms"] / sides["packed"]["median_ms"]
            found.append(Bar(f"Triton twin / packed, encode {_shape(row)}", slower, TWIN_SHARE, at_most=True))
    return found


def _conditions(result: dict) -> str:
    kind = "copy" if result["conditions"]["device"] == "cuda" else "plain read"
    exact = f"{result['exact']} tokens exact" if result["exact"] else "every token packed"
    rate = f"{result['memory_rate'] / 1e9:,.1f} GB/s"
    return f"K{result['bits']} V{result['bits']}, {exact}; a {kind} ran at {rate}. {conditions(result)}."


def sparse_views(result: dict) -> dict[str, str]:
    """Of ``attend_sparse.py``, Markdown by name: speed, parts, all, bars, conditions."""
    found = _sparse_bars(result) if result["share"] == SPARSE_SHARE else []
    return dict(
        speed=_sparse_speed(result),
        parts=_sparse_parts(result),
        all=_sparse_all(result),
        bars=bars(found),
        conditions=f"{result['share']:.0%} of the tokens selected, {result['exact']} exact, packed stores K{result['bits']} "
        f"V{result['bits']}. {conditions(result)}.",
    )


def _sparse_speed(result: dict) -> str:
    rows = []
    for row in result["attend"]:
        sides = row["results"]
        cells = [f"{sides[name]['ratio']:.2f}x, {_ms(sides[name])}" for name in SPARSE_SIDES]
        rows.append([_shape(row), f"{_ms(sides[row['best_dense']])} {row['best_dense']}", *cells])
    return table(["Hq, Hk, d, tokens", "best dense", *SPARSE_SIDES], rows)


def _parts_of(row: dict, side: str) -> dict[str, dict]:
    return {name.split(": ")[1]: times for name, times in row["results"].items() if name.startswith(f"{side}: ")}


def _sparse_parts(result: dict) -> str:
    rows = []
    for row in result["attend"]:
        for side, selected in row["selected"].items():
            cells = [_ms(times) for times in _parts_of(row, side).values()]
            rows.append([_shape(row), side, f"{selected['share']:.1%}", *cells, _ms(row["results"][side])])
    return table(["Hq, Hk, d, tokens", "side", "selected", *_parts_of(result["attend"][0], "sparse"), "whole step"], rows)


def _sparse_all(result: dict) -> str:
    rows = []
    for row in result["attend"]:
        for name, side in row["results"].items():
            extremes = f"{three_digits(side['min_ms'])} - {three_digits(side['max_ms'])}"
            ratios = [f"{side[kind]:.2f}x" if kind in side else "" for kind in ("ratio", "ratio_of_minima", "to_packed")]
            rows.append([_shape(row), name, three_digits(side["median_ms"]), extremes, str(side["rounds"]), *ratios])
    for row in result.get("scores", []):
        side = row["results"]["scores"]
        extremes = f"{three_digits(side['min_ms'])} - {three_digits(side['max_ms'])}"
        rows.append([_shape(row), "sign_scores", three_digits(side["median_ms"]), extremes, str(side["rounds"]), "", "", ""])
    return table(
        ["Hq, Hk, d, tokens", "side", "ms", "min - max", "rounds", "speed-up", "of minima", "against packed attention"], rows
    )


def _sparse_bars(result: dict) -> list[Bar]:
    device, found = result["conditions"]["device"], []
    for row in result["attend"]:
        limit, parts = SPARSE_BARS.get((device, *row["shape"])), _parts_of(row, "sparse")
        if limit is None:
            continue
        for side in SPARSE_SIDES[: 1 + (device == "cuda")]:
            found.append(Bar(f"{side} {_shape(row)}", row["results"][side]["ratio"], limit))
        if device == "cuda":
            dense_ms = row["results"][row["best_dense"]]["median_ms"]
            share = sum(parts[name]["median_ms"] for name in SCAN_PARTS if name in parts) / dense_ms
            found.append(Bar(f"scan and selection / dense {_shape(row)}", share, SCAN_SHARE, "%", at_most=True))
    for row in result.get("scores", []):
        if tuple(row["shape"]) == SCORES_SHAPE:
            microseconds = 1e3 * row["results"]["scores"]["median_ms"]
            found.append(Bar(f"sign_scores {_shape(row)}", microseconds, SCORES_US, "us", at_most=True))
    return found
