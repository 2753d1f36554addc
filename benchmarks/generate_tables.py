"""Tables of ``generate.py``'s numbers, by the name under which documents hold them."""

from render import Bar, bars, conditions, table, three_digits

TITLES = {
    "dynamic": "DynamicCache",
    "quanto": "QuantizedCache, quanto",
    "hqq": "QuantizedCache, hqq",
    "isoquant": "IsoQuantCache",
}
OURS, DENSE, QUANTIZED = "isoquant", ("dynamic",), ("quanto", "hqq")
# By model and device: least speed-up over the fastest of some caches at a context.
BARS = {
    ("smollm2-135m", "cpu"): ((8000, DENSE, 1.3), (512, DENSE, 0.95), (2000, QUANTIZED, 3.0)),
    ("llama-3.1-8b", "cuda"): ((4096, DENSE, 1.0), (32768, DENSE, 1.5), (131072, DENSE, 2.5)),
}


def views(result: dict) -> dict[str, str]:
    """Markdown by name: speed, bytes, all, bars, conditions."""
    return dict(
        speed=_speed(result),
        bytes=_bytes(result),
        all=_all(result),
        bars=bars(_bars(result)),
        conditions=_conditions(result),
    )


def measured(result: dict, context: int, caches: tuple[str, ...], dtype: str | None = None) -> list[dict]:
    """Rows with figures of ``caches`` at ``context``, of one dtype or of all."""
    rows = (row for row in result["rows"] if row["context"] == context and row["cache"] in caches and "missing" not in row)
    return [row for row in rows if dtype in (None, row["dtype"])]


def fastest(result: dict, context: int, caches: tuple[str, ...], dtype: str | None = None) -> dict | None:
    """The row of most tokens a second, ``None`` where nothing was measured."""
    return max(measured(result, context, caches, dtype), key=lambda row: row["rate"], default=None)


def _ratio(result: dict, context: int, against: tuple[str, ...], dtype: str | None = None) -> float | None:
    ours, theirs = fastest(result, context, (OURS,), dtype), fastest(result, context, against, dtype)
    return ours["rate"] / theirs["rate"] if ours and theirs else None


def distinct(result: dict, field: str) -> list:
    """The values of a field of the rows, in order of appearance."""
    return list(dict.fromkeys(row[field] for row in result["rows"]))


def caches_of(result: dict) -> list[str]:
    """The caches that have rows, in the order of ``TITLES``."""
    return [cache for cache in TITLES if cache in distinct(result, "cache")]


def _grid(result: dict, cell) -> list[list[str]]:
    """One line a context and dtype, one cell a cache."""
    lines = []
    for context in distinct(result, "context"):
        for dtype in distinct(result, "dtype"):
            rows = {row["cache"]: row for row in result["rows"] if (row["context"], row["dtype"]) == (context, dtype)}
            cells = [rows[cache].get("missing") or cell(rows[cache]) for cache in caches_of(result)]
            lines.append([f"{context:,}", dtype, *cells])
    return lines


def _speed(result: dict) -> str:
    def cell(row: dict) -> str:
        return f"{three_digits(row['rate'])} ({three_digits(row['rate_min'])} - {three_digits(row['rate_max'])})"

    lines = _grid(result, cell)
    pairs = [(context, dtype) for context in distinct(result, "context") for dtype in distinct(result, "dtype")]
    for line, (context, dtype) in zip(lines, pairs):
        ratios = (_ratio(result, context, against, dtype) for against in (DENSE, QUANTIZED))
        line += [f"{ratio:.2f}x" if ratio else "" for ratio in ratios]
    titles = [TITLES[cache] for cache in caches_of(result)]
    return table(["tokens", "dtype", *titles, "speed-up over dense", "over quantised"], lines)


def _bytes(result: dict) -> str:
    titles = [TITLES[cache] for cache in caches_of(result)]
    return table(["tokens", "dtype", *titles], _grid(result, lambda row: f"{row['kv_bytes'] / 1e6:,.1f} MB"))


def _all(result: dict) -> str:
    lines = []
    for row in result["rows"]:
        line = [f"{row['context']:,}", row["dtype"], TITLES[row["cache"]]]
        if "missing" in row:
            lines.append([*line, row["missing"], *[""] * 5])
            continue
        step = row["step"]
        prefill = three_digits(row["prefill_rate"]) if "prefill_rate" in row else ""
        counters = f"{row['decompress_calls']}, {row['fallback_calls']}" if row["cache"] == OURS else ""
        times = [three_digits(step["median_ms"]), f"{three_digits(step['min_ms'])} - {three_digits(step['max_ms'])}"]
        size = f"{row['kv_bytes'] / 1e6:,.1f} at {row['kv_tokens']:,}"
        lines.append([*line, three_digits(row["rate"]), *times, prefill, size, counters])
    header = ["tokens", "dtype", "cache", "tokens/s", "ms a step", "min - max", "prefill tokens/s", "MB at tokens", "rebuilt"]
    return table(header, lines)


def _bars(result: dict) -> list[Bar]:
    found = []
    for context, against, least in BARS.get((result["model"], result["conditions"]["device"]), ()):
        if context in distinct(result, "context"):
            sides = " over ".join(_side(result, context, caches) for caches in ((OURS,), against))
            found.append(Bar(f"{context:,} tokens, {sides}", _ratio(result, context, against), least))
    ours = [row for row in result["rows"] if row["cache"] == OURS and "missing" not in row]
    for name in ("decompress_calls", "fallback_calls"):
        found.append(Bar(f"{name} of IsoQuantCache", sum(row[name] for row in ours), 0, "", at_most=True))
    return found


def _side(result: dict, context: int, caches: tuple[str, ...]) -> str:
    row = fastest(result, context, caches)
    return f"{TITLES[row['cache']]} ({row['dtype']})" if row else TITLES[caches[0]]


def _conditions(result: dict) -> str:
    layers = f", {result['layers']} layers" if result.get("layers") else ""
    weights = result["model"] + (f" (random weights{layers})" if result["random_weights"] else "")
    batch = f"batch {result['batch']}"
    prompt = "random keys and values" if result["filled"] else "a prompt"
    rounds = f"{result['rounds']} x {result['new_tokens']} new tokens, all caches in turn"
    quantized = "QuantizedCache at 4 bits, " if set(QUANTIZED) & set(caches_of(result)) else ""
    return f"{weights}, {batch}, {prompt} and {rounds}; {quantized}sdpa attention. {conditions(result)}."
