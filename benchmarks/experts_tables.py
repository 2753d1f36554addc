"""Tables of ``experts.py``'s numbers, by the name under which documents hold them."""

import re

from render import Bar, bars, conditions, table, three_digits


def views(result: dict) -> dict[str, str]:
    """Markdown by name: speed, bars, conditions."""
    return dict(speed=_speed(result), bars=bars([Bar(**row) for row in result["bars"]]), conditions=_conditions(result))


def _title(mode: str) -> str:
    ours = re.fullmatch(r"ours (\S+)(.*)", mode)
    if ours:
        return f"{float(ours[1]):.0%} of experts in memory{ours[2]}"
    return dict(resident="all in memory", accelerate="accelerate, on disk")[mode]


def _speed(result: dict) -> str:
    """One row a mode; a column that no mode has numbers for is left out."""
    resident = result["results"]["resident"]["token_s"]
    columns = {  # the numbers a cell needs, and the cell
        "tokens/s": (("token_s",), lambda row: three_digits(1 / row["token_s"])),
        "of resident": (("token_s",), lambda row: f"{resident / row['token_s']:.0%}"),
        "prefill s": (("prefill_s",), lambda row: three_digits(row["prefill_s"])),
        "load s": (("load_s",), lambda row: three_digits(row["load_s"])),
        "hits": (("hits", "misses"), lambda row: f"{row['hits'] / (row['hits'] + row['misses']):.1%}"),
        "experts, MB a token": (("bytes_read",), lambda row: _a_token(row, "bytes_read")),
        "disk, MB a token": (("load_s", "disk_bytes"), lambda row: _a_token(row, "disk_bytes")),
        "stall, ms a token": (("stall_s",), lambda row: three_digits(1e3 * row["stall_s"])),
        "CPU, ms a token": (("cpu_s",), _cpu_time),
        "slots, GB": (("slot_bytes",), lambda row: three_digits(row["slot_bytes"] / 1e9)),
        "memory, GB": (("decode_anonymous",), lambda row: three_digits(row["decode_anonymous"] / 1e9)),
    }
    rows = result["results"]
    had = {title: cell for title, cell in columns.items() if any(set(cell[0]) <= set(row) for row in rows.values())}
    lines = []
    for mode, row in rows.items():
        lines.append([_title(mode), *(cell(row) if set(needs) <= set(row) else "" for needs, cell in had.values())])
    return table(["", *had], lines)


def _cpu_time(row: dict) -> str:
    """Of the median round, with the lowest and the highest of several."""
    text, rounds = three_digits(1e3 * row["cpu_s"]), row.get("cpu_rounds", [])
    return text + (f" ({three_digits(1e3 * min(rounds))} - {three_digits(1e3 * max(rounds))})" if len(rounds) > 1 else "")


def _a_token(row: dict, field: str) -> str:
    num_bytes = row[field] / row["num_tokens"] / 1e6
    return three_digits(num_bytes) if num_bytes else "0"


def _conditions(result: dict) -> str:
    shape, rows = result["shape"], result["results"].values()
    each = next(row["expert_bytes"] for row in rows if "expert_bytes" in row) / 1e6
    model = "{num_hidden_layers} layers of {num_experts} experts, {num_experts_per_tok} a token".format(**shape)
    source = "read from disk (io={io}) by {io_threads} threads".format(**result) if "io" in result else "in page-locked memory"
    peak = f", from which one copy ran at {result['link_peak'] / 1e9:.1f} GB/s" if "link_peak" in result else ""
    new_tokens = max(row["num_tokens"] for row in rows)
    return f"{model}, {each:.1f} MB each, random weights, {source}{peak}; {new_tokens} new tokens. {conditions(result)}."
