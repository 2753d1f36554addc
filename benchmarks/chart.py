"""Pictures and tables of the committed results: ``python benchmarks/chart.py``.

``benchmarks/results/NAME.json`` is drawn as ``NAME.png`` where a document shows that picture. In the README and in
``benchmarks/results/*.md`` what stands between ``<!-- NAME VIEW: begin -->`` and ``<!-- NAME VIEW: end -->`` is replaced by
that view of its numbers: ``speed``, ``bytes``, ``all``, ``encode``, ``bars``, ``conditions`` (the ``*_tables.py`` of its
benchmark), or ``chart``, the picture. No figure there is typed by hand.
"""

import argparse
import json
import os
import pathlib
import re

import attend_tables
import experts_tables
import generate_tables
import largest_context_tables
import matplotlib
import recall_tables
import sparse_generate_tables

matplotlib.use("Agg")
from matplotlib import pyplot, ticker

ROOT = pathlib.Path(__file__).resolve().parents[1]
VIEWS = {
    "attend": attend_tables.views,
    "attend_sparse": attend_tables.sparse_views,
    "generate": generate_tables.views,
    "experts": experts_tables.views,
    "largest_context": largest_context_tables.views,
    "recall": recall_tables.views,
    "sparse_generate": sparse_generate_tables.views,
}
CAPTIONS = {"recall": "mass kept against budget"}  # else speed and bytes against context length
BLOCK = re.compile(r"(<!-- (\w+) (\w+): begin -->\n).*?(<!-- \2 \3: end -->)", re.DOTALL)
MISSING = "Not measured yet."
COLOURS = {"dynamic": "#777777", "quanto": "#4a7ba6", "hqq": "#8a6bb0", "isoquant": "#c8442e"}
LINES = {"hqq": "--"}  # its bytes are those of quanto
LEGEND_COLUMNS = 3


def read(root: pathlib.Path) -> dict[str, dict]:
    """Every result by the stem of its file."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(results_dir(root).glob("*.json"))}


def results_dir(root: pathlib.Path) -> pathlib.Path:
    return root / "benchmarks" / "results"


def documents(root: pathlib.Path) -> list[pathlib.Path]:
    return [root / "README.md", *sorted(results_dir(root).glob("*.md"))]


def shown(root: pathlib.Path) -> set[str]:
    """Results whose pictures are in a document."""
    blocks = (match for document in documents(root) for match in BLOCK.finditer(document.read_text()))
    return {match[2] for match in blocks if match[3] == "chart"}


def filled(document: pathlib.Path, results: dict[str, dict], root: pathlib.Path) -> str:
    """The text of ``document`` with every block rewritten.

    Raises:
        KeyError: a block names a view that its benchmark does not have.
    """

    def block(match: re.Match) -> str:
        begin, name, view, end = match.groups()
        if name not in results:
            text = MISSING
        elif view == "chart":
            picture = os.path.relpath(results_dir(root) / f"{name}.png", document.parent)
            caption = CAPTIONS.get(results[name]["benchmark"], "speed and bytes against context length")
            text = f"![{name.replace('_', ', ')}: {caption}]({picture})"
        else:
            text = VIEWS[results[name]["benchmark"]](results[name])[view]
        return f"{begin}{text}\n{end}"

    return BLOCK.sub(block, document.read_text())


def draw(result: dict, picture: pathlib.Path) -> None:
    """Two panels with the drawing of the benchmark, the legend of both below them."""
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
    DRAWINGS[result["benchmark"]](result, *panels)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    lines = panels[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=LEGEND_COLUMNS, frameon=False, fontsize=8)
    figure.savefig(picture, dpi=150)
    pyplot.close(figure)


def against_context(result: dict, *panels) -> None:
    for axes in panels:
        axes.set(xlabel="context length, tokens", xscale="log")
        axes.set_xticks(*zip(*[(tokens, f"{tokens:,}") for tokens in contexts(result)]))
        axes.minorticks_off()


def in_megabytes(axes) -> None:
    """Bytes grow as the context does: both in logarithms, so that the line is straight."""
    axes.set(yscale="log")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,g}")


def contexts(result: dict) -> list[int]:
    if result["benchmark"] == "attend":
        return sorted({row["shape"][-1] for row in result["attend"]})
    return sorted(generate_tables.distinct(result, "context"))


def draw_generate(result: dict, speed, size) -> None:
    """Every cache in its fastest dtype, and the bytes of the smallest."""
    for cache in generate_tables.caches_of(result):
        rows = [row for tokens in contexts(result) if (row := generate_tables.fastest(result, tokens, (cache,)))]
        places, rates = [row["context"] for row in rows], [row["rate"] for row in rows]
        extremes = [[row["rate"] - row["rate_min"] for row in rows], [row["rate_max"] - row["rate"] for row in rows]]
        style = dict(marker="o", linestyle=LINES.get(cache, "-"), color=COLOURS[cache], label=generate_tables.TITLES[cache])
        speed.errorbar(places, rates, extremes, capsize=3, **style)
        least = [min(row["kv_bytes"] for row in generate_tables.measured(result, tokens, (cache,))) for tokens in places]
        size.plot(places, [num_bytes / 1e6 for num_bytes in least], **style)
    speed.set_title("tokens a second, each cache in its faster dtype", loc="left", fontsize=10)
    size.set_title("resident keys and values, MB, smaller dtype", loc="left", fontsize=10)
    speed.set(ylim=(0, None))
    in_megabytes(size)
    against_context(result, speed, size)


def draw_attend(result: dict, speed, size) -> None:
    """Speed-up over the best dense call, and bytes packed and in bfloat16."""
    models = list(dict.fromkeys(tuple(row["shape"][:-1]) for row in result["attend"]))
    for index, model in enumerate(models):
        rows = sorted((row for row in result["attend"] if tuple(row["shape"][:-1]) == model), key=lambda row: row["shape"])
        places, name = [row["shape"][-1] for row in rows], "B {}, Hq {}, Hk {}, d {}".format(*model)
        for isa, line in zip(result["isas"], ("-", "--", ":", "-.")):
            ratios = [row["results"][isa]["ratio"] for row in rows]
            speed.plot(places, ratios, line, marker="o", color=f"C{index}", label=f"{name}, {isa}")
        for kinds, line in ((("packed_bytes", "exact_bytes"), "-"), (("dense_bytes",), ":")):
            sizes = [sum(row[kind] for kind in kinds) / 1e6 for row in rows]
            size.plot(places, sizes, line, marker="o", color=f"C{index}")
    speed.axhline(1, color="#777777", linewidth=0.8)
    speed.set_title("speed-up over the best dense attention", loc="left", fontsize=10)
    size.set_title("keys and values of one layer, MB (dotted: bfloat16)", loc="left", fontsize=10)
    speed.set(ylim=(0, None))
    in_megabytes(size)
    against_context(result, speed, size)


def draw_recall(result: dict, *panels) -> None:
    """One model a panel, one line a selector."""
    for axes, (name, model) in zip(panels, result["models"].items()):
        for number, selector in enumerate(recall_tables.selectors_of(model)):
            rows = [row for row in model["rows"] if row["selector"] == selector]
            line = "--" if rows[0]["top_p"] is not None else "-"
            axes.plot(
                *zip(*((row["budget"], row["recall"]) for row in rows)), line, marker="o", color=f"C{number}", label=selector
            )
        axes.set(xlabel="tokens read, share of those beyond sinks and window", xscale="log")
        axes.set_xticks(*zip(*[(budget, f"{100 * budget:g}%") for budget in result["budgets"]]))
        axes.minorticks_off()
        axes.set_title(f"{name}: share of attention kept", loc="left", fontsize=10)


DRAWINGS = {"generate": draw_generate, "attend": draw_attend, "recall": draw_recall}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=pathlib.Path, default=ROOT, help="of the repository")
    root = parser.parse_args(arguments).root
    results = read(root)
    for name in sorted(shown(root) & results.keys()):
        draw(results[name], results_dir(root) / f"{name}.png")
    for document in documents(root):
        document.write_text(filled(document, results, root))


if __name__ == "__main__":
    main()
