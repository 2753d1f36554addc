"""What selections of tokens keep of a real model's attention: ``python benchmarks/recall.py --json recall.json``.

``torch_kvq.evaluate.attention_recall`` on the first tokens of real texts, one forward a model in float32. All selectors read
the same number of tokens at a budget; sinks and window are read in any case and are not counted.
"""

import argparse

import models
import real_models
import recall_tables
import timing
import torch
import transformers
from fidelity import token_batch

from torch_kvq.evaluate import RecallReport, attention_recall


def figures(report: RecallReport) -> dict:
    """Means and extremes of every row, and the mean of each layer."""
    rows = []
    for row in report.rows:
        numbers = dict(budget=row.mean_budget, recall=row.mean_recall, worst=row.worst_recall, top_p=row.top_p)
        layers = [round(layer.mean().item(), 4) for layer in row.recall]
        rows.append(dict(selector=row.selector, asked=row.asked, scan_bytes=row.scan_bytes, **numbers, layers=layers))
    return dict(layers=report.layers, num_queries=report.num_queries, exact_mass=report.exact_mass, rows=rows)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = timing.arguments(__doc__)
    parser.add_argument("--models", default="smollm2-135m,qwen2.5-coder-0.5b", help="of examples/real_models.py, or a shape")
    parser.add_argument("--prefix", type=int, default=1536)
    parser.add_argument("--scored", type=int, default=512, help="tokens behind the prefix")
    parser.add_argument("--queries", type=int, default=32, help="of them, evenly spaced, are scored")
    parser.add_argument("--budgets", default="0.025,0.05,0.1,0.2,0.4", help="shares of the tokens, comma-separated")
    args = parser.parse_args(arguments)
    args.models = args.models.split(",")
    args.budgets = [float(budget) for budget in args.budgets.split(",")]
    return args


def load(name: str, num_tokens: int, device: str) -> tuple[transformers.PreTrainedModel, torch.Tensor]:
    """A model and the beginnings of all real texts, ``[texts, num_tokens]``; for a shape random ones."""
    if name in models.SHAPES:
        return models.load(name, torch.float32, device), models.prompt(name, 2, num_tokens).to(device)
    model, tokenizer = real_models.load(name)
    return model.to(device), token_batch(tokenizer, num_tokens)[1].to(device)


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    conditions, found = timing.conditions(args.device), {}
    for name in args.models:
        if name not in models.SHAPES and not real_models.available(name):
            print(f"{name}: its packages are not installed, see examples/real_models.py", flush=True)
            continue
        model, ids = load(name, args.prefix + args.scored, args.device)
        report = attention_recall(model, ids, prefix_len=args.prefix, budgets=args.budgets, num_queries=args.queries)
        print(f"{name}: {report}\n", flush=True)
        found[name] = figures(report)
        settings = dict(prefix=args.prefix, scored=args.scored, budgets=args.budgets)
        result = timing.result("recall", conditions, **settings, models=found)
        if args.json:  # after each model, so that a long run that is stopped keeps what it has
            timing.save(result, args.json)
    if found:
        timing.show(recall_tables.views(result))


if __name__ == "__main__":
    main()
