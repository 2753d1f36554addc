"""Tables of ``recall.py``'s numbers, by the name under which documents hold them."""

from render import Bar, bars, conditions, table

OURS, REFINED, ORACLE = "RaBitQ", "RaBitQ refined", "oracle"
RIVALS = ("Quest", "SparQ r=0.125D", "SparQ r=0.25D")
BAR_BUDGETS = (0.05, 0.1, 0.2)
SHORT = (0.05, 0.2)


def views(result: dict) -> dict[str, str]:
    """Markdown by name: recall, short, worst, bars, conditions."""
    return dict(
        recall=_grid(result, "recall", result["budgets"]),
        short=_grid(result, "recall", [budget for budget in SHORT if budget in result["budgets"]]),
        worst=_grid(result, "worst", result["budgets"]),
        bars=bars(_bars(result)),
        conditions=_conditions(result),
    )


def selectors_of(model: dict) -> list[str]:
    """In order of appearance."""
    return list(dict.fromkeys(row["selector"] for row in model["rows"]))


def _row(model: dict, selector: str, asked: float) -> dict | None:
    return next((row for row in model["rows"] if (row["selector"], row["asked"]) == (selector, asked)), None)


def _grid(result: dict, field: str, budgets: list[float]) -> str:
    """One line a selector, one column a model and budget."""
    found = result["models"]
    header = ["", "bytes scanned", *(f"{name}, {100 * budget:g}%" for name in found for budget in budgets)]
    lines = []
    for selector in dict.fromkeys(name for model in found.values() for name in selectors_of(model)):
        rows = [_row(model, selector, budget) for model in found.values() for budget in budgets]
        scanned = next(row["scan_bytes"] for row in rows if row)
        lines.append([selector, f"{scanned:.3g}", *(f"{row[field]:.1%}" if row else "" for row in rows)])
    return table(header, lines)


def _bars(result: dict) -> list[Bar]:
    """Differences in points, the worst of ``BAR_BUDGETS``."""
    found = []
    for name, model in result["models"].items():
        pairs = [(OURS, rival) for rival in RIVALS] + [(REFINED, RIVALS[-1])]
        for ours, theirs in pairs:
            found.append(
                Bar(f"{name}, {ours} over {theirs}, points", min(_differences(model, ours, theirs), default=None), 0, "%")
            )
        for ours in (OURS, REFINED):
            behind = max(_differences(model, ORACLE, ours), default=None)
            found.append(Bar(f"{name}, {ours} behind the oracle, points", behind, 0.03, "%", at_most=True))
    return found


def _differences(model: dict, ours: str, theirs: str) -> list[float]:
    pairs = [(_row(model, ours, budget), _row(model, theirs, budget)) for budget in BAR_BUDGETS]
    return [first["recall"] - second["recall"] for first, second in pairs if first and second]


def _conditions(result: dict) -> str:
    queries = {str(model["num_queries"]) for model in result["models"].values()}
    alone = ", ".join(f"{name} {model['exact_mass']:.1%}" for name, model in result["models"].items())
    tokens = f"{result['prefix']:,} tokens and {' or '.join(queries)} queries among the next {result['scored']}"
    return f"{tokens}, all layers and heads, float32; sinks and window alone keep {alone}. {conditions(result)}."
