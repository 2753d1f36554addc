"""Tables of ``largest_context.py``'s numbers, by the name under which documents hold them."""

from render import Bar, bars, conditions, table

TITLES = {"isoquant": "IsoQuantCache", "dynamic": "DynamicCache"}
LEAST = 4.0


def views(result: dict) -> dict[str, str]:
    """Markdown by name: all, bars, conditions."""
    return dict(all=_all(result), bars=bars([_bar(result)]), conditions=_conditions(result))


def _all(result: dict) -> str:
    lines = []
    for row in result["rows"]:
        sizes = (f"{row[name] / 1e9:.1f}" for name in ("kv_bytes", "peak_bytes"))
        each = row["kv_bytes"] / (row["tokens"] * result["batch"])
        lines.append([TITLES[row["cache"]], f"{row['tokens']:,}", *sizes, f"{each:,.0f}", str(row["tried"])])
    return table(["cache", "tokens", "GB of keys and values", "GB at the peak", "bytes a token", "contexts tried"], lines)


def _bar(result: dict) -> Bar:
    tokens = {row["cache"]: row["tokens"] for row in result["rows"]}
    return Bar("largest context, IsoQuantCache over DynamicCache", tokens["isoquant"] / tokens["dynamic"], LEAST)


def _conditions(result: dict) -> str:
    shape = f"{result['shape']} (random weights, {result['layers']} layers, {result['dtype']}), batch {result['batch']}"
    return f"{shape}, {result['memory'] / 1e9:.1f} GB for all, random keys and values. {conditions(result)}."
