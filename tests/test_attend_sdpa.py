"""``attend`` on packed data against rebuilding the tokens and calling ``F.scaled_dot_product_attention``."""

import pytest
import torch
import torch.nn.functional as F
from oracle import relative_error

from torch_kvq import backends
from torch_kvq.attention.compose import attend_packed
from torch_kvq.codecs.isoquant import IsoQuantConfig
from torch_kvq.store import PackedStore

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-3, torch.float16: 2e-3}
HEADS = 2

# head dim, group, tokens, batch, mask
CASES = [
    *((64, group, tokens, 2, None) for group in (1, 3, 4, 8, 16) for tokens in (1, 31, 127, 128, 4097)),
    *((dim, 4, tokens, 1, None) for dim in (80, 96, 128, 192, 256) for tokens in (1, 31, 127, 128, 4097)),
    *((dim, 4, 257, 3, mask) for dim in (64, 128) for mask in ("bool", "float")),
    *((dim, 4, 32768, 1, mask) for dim in (64, 128) for mask in (None, "bool")),
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("dim, group, tokens, batch, masked", CASES)
def test_equals_sdpa_on_rebuilt_tokens(dim, group, tokens, batch, masked, dtype):
    stores = []
    for along_tokens in (False, True):
        store = PackedStore(IsoQuantConfig(), along_tokens, batch, HEADS, dim, torch.device("cpu"))
        store.append(torch.randn(batch, HEADS, tokens, dim))
        stores.append(store)
    query = torch.randn(batch, HEADS * group, 1, dim).to(dtype)
    mask = None
    if masked:
        mask = torch.rand(batch, 1, 1, tokens) > 0.2
    if masked == "float":
        mask = torch.where(mask, torch.randn(mask.shape), -torch.inf)
    keys, values = (store.decode(0, tokens, torch.float32).repeat_interleave(group, 1) for store in stores)
    wanted = F.scaled_dot_product_attention(query.float(), keys, values, mask)
    got, _ = attend_packed(query, *stores, mask=mask)
    assert got.dtype == dtype
    integer = backends.cpu_isa() == backends.native.INTEGER
    assert relative_error(got, wanted) <= (2e-3 if integer else TOLERANCE[dtype])
