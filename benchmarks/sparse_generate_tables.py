"""Tables of ``sparse_generate.py``'s numbers, by the name under which documents hold them."""

from render import Bar, bars, conditions, table, three_digits

TITLES = {
    "dynamic": "DynamicCache",
    "exact": "RaBitQSparseCache, exact",
    "isoquant": "RaBitQSparseCache, isoquant",
    "host": "RaBitQSparseCache, host",
}
BAR_CONTEXT = 32768


def views(result: dict) -> dict[str, str]:
    """Markdown by name: all, bars, conditions."""
    return dict(all=_all(result), bars=bars(_bars(result)), conditions=_conditions(result))


def _row(result: dict, cache: str, context: int) -> dict | None:
    return next((row for row in result["rows"] if (row["cache"], row["context"]) == (cache, context)), None)


def _time(summary: dict) -> str:
    median, least, most = (three_digits(summary[f"{name}_ms"]) for name in ("median", "min", "max"))
    return f"{median} ({least} - {most})"


def _all(result: dict) -> str:
    lines = []
    for row in result["rows"]:
        dense = _row(result, "dynamic", row["context"])
        more = row["prefill"]["median_ms"] / dense["prefill"]["median_ms"] - 1
        read = [f"{row[name] / 1e6:,.2f}" if row["cache"] != "dynamic" else "" for name in ("index_bytes", "selected_bytes")]
        held = f"{row['bytes'] / 1e6:,.1f} ({row['bytes'] / dense['bytes']:.1%})"
        first = [f"{row['context']:,}", TITLES[row["cache"]], _time(row["prefill"]), f"{more:+.1%}", _time(row["decode"])]
        lines.append([*first, held, f"{row['host_bytes'] / 1e6:,.1f}", *read])
    header = ["tokens", "cache", "first token, ms", "over dense", "decode, ms a token", "MB on the device", "MB in host memory"]
    return table([*header, "MB of index a token", "MB of keys and values a token"], lines)


def _bars(result: dict) -> list[Bar]:
    dense, exact, host = (_row(result, cache, BAR_CONTEXT) for cache in ("dynamic", "exact", "host"))
    if not dense or result["conditions"]["device"] == "cpu":
        return []
    found = []
    if exact:
        more = exact["prefill"]["median_ms"] / dense["prefill"]["median_ms"] - 1
        found.append(Bar("time to the first token over DynamicCache, exact", more, 0.05, "%", at_most=True))
    if host:
        share = host["bytes"] / dense["bytes"]
        found.append(Bar("bytes on the device of DynamicCache's, host", share, 0.12, "%", at_most=True))
    if host and exact:
        slower = host["decode"]["median_ms"] / exact["decode"]["median_ms"]
        found.append(Bar("decode step, host over exact", slower, 2.0, "x", at_most=True))
    return found


def _conditions(result: dict) -> str:
    shape = f"{result['shape']} (random weights, {result['layers']} layers, {result['dtype']}), batch {result['batch']}"
    share = f"{100 * result['share']:g} % of the tokens selected in each kv head"
    rounds = f"{result['rounds']} rounds of a prompt and {result['new_tokens']} new tokens, all caches in turn"
    return f"{shape}; {share}; {rounds}; sdpa attention. {conditions(result)}."
