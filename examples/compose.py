"""Attention composed by hand from public parts: a packed prefix that two sequences share, and each one's own tokens.

The prefix is packed once and answers both; what each sequence adds is exact; ``merge`` joins the answers without error.
"""

import torch

from torch_kvq.attention.compose import attend_exact, attend_packed, merge
from torch_kvq.codecs.isoquant import IsoQuantConfig
from torch_kvq.codecs.statistics import QueryMoments, channel_balance, masked_mean, second_moment
from torch_kvq.store import PackedStore

HEADS, GROUP, DIM, PREFIX, OWN = 2, 4, 128, 4096, 100


def main() -> None:
    torch.manual_seed(0)
    uneven = torch.rand(HEADS, 1, DIM) * 3 + 0.2  # channels of very different size, as in real keys
    keys = torch.randn(1, HEADS, PREFIX, DIM) * uneven + uneven.square()
    values = torch.randn(1, HEADS, PREFIX, DIM)
    queries = torch.randn(1, HEADS * GROUP, 64, DIM) / uneven.repeat_interleave(GROUP, 0)

    moments = QueryMoments()
    moments.add(queries, HEADS, None)
    centre = masked_mean(keys, None)
    balance = channel_balance(second_moment(keys, centre, None), moments.mean())
    shape = (1, HEADS, DIM, keys.device)
    packed_keys = PackedStore(IsoQuantConfig(bits=3), False, *shape, centre, balance)
    packed_values = PackedStore(IsoQuantConfig(bits=3, scale="mse"), True, *shape)
    packed_keys.append(keys)
    packed_values.append(values)
    packed_bytes = sum(t.nbytes for store in (packed_keys, packed_values) for t in (store.sign, store.mag, store.scale))
    print(f"prefix: {keys.numel() * 4 / packed_bytes:.2f}x smaller than bf16, read by both sequences")

    for name in ("first", "second"):
        own_keys, own_values = torch.randn(1, HEADS, OWN, DIM) * uneven, torch.randn(1, HEADS, OWN, DIM)
        query = queries[:, :, :1]
        shared = attend_packed(query, packed_keys, packed_values)
        own = attend_exact(query, own_keys, own_values)
        out, _ = merge([shared, own])
        exact, _ = attend_exact(query, torch.cat([keys, own_keys], 2), torch.cat([values, own_values], 2))
        error = ((out - exact).norm() / exact.norm()).item()
        share = torch.sigmoid(own[1] - shared[1]).mean().item()
        print(f"{name} sequence: own tokens hold {share:.0%} of the attention, relative error of the output {error:.3f}")


if __name__ == "__main__":
    main()
