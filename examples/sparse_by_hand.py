"""Sparse attention composed by hand: index the keys, score, select, attend, merge. Every step is one call.

The table says what each share asked for costs and keeps, cut by the 1-bit scores or, of more candidates, by those of the keys.
"""

import torch

from torch_kvq.attention.compose import attend_exact, merge
from torch_kvq.attention.select import attend_selected, score_selected, select_tokens
from torch_kvq.codecs.rabitq import RaBitQIndex

HEADS, GROUP, DIM, TOKENS, SINKS, WINDOW = 2, 4, 128, 8192, 4, 128
SCALE = DIM**-0.5


def kept_mass(query, keys, selection, near_lse) -> float:
    """The true share of attention that window, sinks and the selection hold, mean of the query heads."""
    scores = SCALE * query @ keys.repeat_interleave(GROUP, 1).transpose(-1, -2)
    chosen = score_selected(query, [keys], selection, SCALE).logsumexp(-1)
    total = torch.logaddexp(scores.logsumexp(-1), near_lse)
    return torch.exp(torch.logaddexp(chosen, near_lse) - total).mean().item()


def main() -> None:
    torch.manual_seed(0)
    topics = torch.randn(HEADS, 24, DIM)
    spoken = torch.randint(24, (HEADS, TOKENS))
    keys = (topics.gather(1, spoken[..., None].expand(-1, -1, DIM)) + torch.randn(HEADS, TOKENS, DIM))[None]
    values = torch.randn(1, HEADS, TOKENS, DIM)
    queries = 0.75 * topics[:, :GROUP].reshape(1, HEADS * GROUP, 1, DIM)

    near = torch.cat([torch.arange(SINKS), torch.arange(TOKENS - WINDOW, TOKENS)])
    far_keys, far_values = (x[:, :, SINKS : TOKENS - WINDOW].contiguous() for x in (keys, values))
    index = RaBitQIndex.of(far_keys, centre=far_keys.mean(2))  # 16 bytes of signs and 2 of scale a token
    exact, _ = attend_exact(queries, keys, values)

    sinks_and_window = attend_exact(queries, keys[:, :, near], values[:, :, near])
    scores = index.scores(index.code(queries, SCALE), 0, far_keys.shape[2])
    print("top_p  cut by    read   mass kept   error of the output")
    for top_p in (0.8, 0.9, 0.95, 0.98):
        by_signs = select_tokens(scores, sinks_and_window[1], top_p, HEADS)
        wide = select_tokens(scores, sinks_and_window[1], 1 - (1 - top_p) / 4, HEADS)
        true_scores = score_selected(queries, [far_keys], wide, SCALE)
        refined = select_tokens(true_scores, sinks_and_window[1], top_p, HEADS, candidates=wide)
        for name, selection in (("signs", by_signs), ("keys", refined)):
            chosen = attend_selected(queries, [far_keys], [far_values], selection, SCALE)
            out, _ = merge([sinks_and_window, chosen])
            read = selection.count.float().mean().item() / far_keys.shape[2]
            mass = kept_mass(queries, far_keys, selection, sinks_and_window[1])
            print(f"{top_p:5.2f}  {name:6}  {read:6.1%}   {mass:9.3f}   {((out - exact).norm() / exact.norm()).item():.3f}")


if __name__ == "__main__":
    main()
