"""Centre and channel balance: padding, optimality, what they are worth on outlier channels."""

import pytest
import torch

from torch_kvq import layout, ops
from torch_kvq.codecs.isoquant import IsoQuantConfig
from torch_kvq.codecs.statistics import QueryMoments, channel_balance, masked_mean, second_moment

CPU = torch.device("cpu")
LENGTHS = (7, 20, 1, 13)


def padded_rows(side: str) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Rows ``[2, n, 8]``, the batch ``[4, 2, 20, 8]`` they make with large numbers as padding, and its valid tokens."""
    rows = [torch.randn(2, n, 8) + 1 for n in LENGTHS]
    x, valid = torch.full((4, 2, 20, 8), 1e3), torch.zeros(4, 20, dtype=torch.bool)
    for b, row in enumerate(rows):
        place = slice(0, row.shape[1]) if side == "right" else slice(20 - row.shape[1], 20)
        x[b, :, place], valid[b, place] = row, True
    return rows, x, valid


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_count(side):
    rows, x, valid = padded_rows(side)
    centre = torch.randn(4, 2, 8)
    mean, moment = masked_mean(x, valid), second_moment(x, centre, valid)
    for b, row in enumerate(rows):
        torch.testing.assert_close(mean[b], sum(row.unbind(1)) / row.shape[1])
        alone = second_moment(row[None], centre[b : b + 1], None)[0]
        torch.testing.assert_close(moment[b], alone)
        square = sum((token - centre[b]) ** 2 for token in row.unbind(1))
        prior = 4 * (square / row.shape[1]).mean(-1, keepdim=True)
        torch.testing.assert_close(alone, (square + prior) / (row.shape[1] + 4))


def test_nothing_valid_gives_zeros():
    x, valid = torch.randn(1, 2, 5, 8), torch.zeros(1, 5, dtype=torch.bool)
    assert not masked_mean(x, valid).any()
    assert torch.equal(channel_balance(second_moment(x, None, valid), None), torch.ones(1, 2, 8))


def score_error(balance, key_moment, query_moment) -> torch.Tensor:
    """``E|q . (k - k^)|^2`` for isotropic noise, up to a constant: ``E|k / lambda|^2 E|q lambda|^2``."""
    return (key_moment / balance**2).sum(-1) * (query_moment * balance**2).sum(-1)


def test_balance_minimises_the_score_error():
    key_moment, query_moment = torch.exp(2 * torch.randn(2, 3, 4, 64, dtype=torch.float64)).unbind(0)
    balance = channel_balance(key_moment, query_moment)
    best = score_error(balance, key_moment, query_moment)
    torch.testing.assert_close(best, (key_moment * query_moment).sqrt().sum(-1) ** 2)  # Cauchy-Schwarz
    assert balance.log().mean(-1).abs().max() < 1e-5
    for size in (1e-3, 0.03, 1.0):
        for _ in range(20):
            other = balance * torch.exp(size * torch.randn_like(balance))
            assert (score_error(other, key_moment, query_moment) >= best * (1 - 1e-9)).all()


def test_balance_is_the_fourth_root_of_the_ratio():
    key_moment, query_moment = torch.tensor([[[1.0, 16.0, 81.0, 1.0]]]), torch.tensor([[[1.0, 1.0, 1.0, 16.0]]])
    expected = torch.tensor([1.0, 2.0, 3.0, 0.5]) / 3**0.25
    torch.testing.assert_close(channel_balance(key_moment, query_moment)[0, 0], expected)


def test_keys_alone_count_queries_as_isotropic():
    key_moment = torch.rand(1, 2, 16) + 0.1
    torch.testing.assert_close(channel_balance(key_moment, None), channel_balance(key_moment, torch.full((1, 2, 16), 9.0)))
    torch.testing.assert_close(channel_balance(key_moment, None), channel_balance(key_moment, torch.zeros(1, 2, 16)))


@pytest.mark.parametrize("tokens", [1, 2, 64])
@pytest.mark.parametrize("zeros", ["keys", "queries", "both", "all"])
def test_zero_channels_and_few_tokens_stay_finite(tokens, zeros):
    k, q = torch.randn(2, 1, 2, tokens, 16).unbind(0)
    if zeros == "all":
        k, q = k * 0, q * 0
    k[..., :3] *= zeros == "queries"
    q[..., 3:5] *= zeros == "keys"
    centre = masked_mean(k, None)
    moments = QueryMoments()
    moments.add(q, 2, None)
    for balance in (
        channel_balance(second_moment(k, centre, None), moments.mean()),
        channel_balance(k.square().mean(-2), q.square().mean(-2)),
    ):
        assert balance.isfinite().all() and (balance > 0).all() and balance.max() / balance.min() < 1e6


def test_a_dead_channel_counts_as_a_millionth_of_the_mean():
    moment = torch.ones(1, 1, 64)
    moment[..., 0] = 0
    balance = channel_balance(moment, None)[0, 0]
    assert (balance[0] / balance[1]).item() == pytest.approx((1e-6 * 63 / 64) ** 0.25, rel=1e-5)


# ---- queries


def test_query_moments_by_loop():
    q = torch.randn(2, 6, 5, 4) * torch.arange(1, 7)[:, None, None]
    moments = QueryMoments()
    assert moments.mean() is None
    moments.add(q, 3, None)
    for b in range(2):
        for head in range(3):  # query heads 2h and 2h + 1 read kv head h
            tokens = [q[b, g, m] ** 2 for g in (2 * head, 2 * head + 1) for m in range(5)]
            torch.testing.assert_close(moments.mean()[b, head], sum(tokens) / len(tokens))


@pytest.mark.parametrize("masked", [False, True])
def test_query_moments_in_chunks(masked):
    q, valid = torch.randn(3, 4, 50, 8), torch.rand(3, 50) < 0.6 if masked else None
    whole, parts = QueryMoments(), QueryMoments()
    whole.add(q, 2, valid)
    for a, b in ((0, 1), (1, 20), (20, 50)):
        parts.add(q[:, :, a:b], 2, None if valid is None else valid[:, a:b])
    torch.testing.assert_close(parts.mean(), whole.mean())
    if masked:
        rows = [q[b, :, valid[b]].square().reshape(2, -1, 8).mean(1) for b in range(3)]
        torch.testing.assert_close(whole.mean(), torch.stack(rows))


def test_query_moments_mix_masked_and_unmasked_chunks():
    q, valid = torch.randn(2, 2, 30, 8), torch.ones(2, 30, dtype=torch.bool)
    valid[1, :10] = False
    moments = QueryMoments()
    moments.add(q[:, :, :20], 2, valid[:, :20])
    moments.add(q[:, :, 20:], 2, None)
    for b, first in ((0, 0), (1, 10)):
        torch.testing.assert_close(moments.mean()[b], q[b, :, first:].square().mean(1))


def test_query_moments_stop_when_they_have_enough():
    moments = QueryMoments()
    chunks = [torch.randn(1, 2, n, 8) for n in (1000, 100, 500)]
    for chunk in chunks:
        moments.add(chunk, 2, None)
    torch.testing.assert_close(moments.mean(), torch.cat(chunks[:2], 2).square().mean(2))
    assert moments.tokens == 1100 >= QueryMoments.enough_tokens


def test_padding_is_not_enough_queries():
    """A row of 1,500 tokens, 24 of them real, has seen 24: what follows counts until every row has seen enough."""
    q, valid = torch.randn(2, 2, 3500, 8), torch.ones(2, 3500, dtype=torch.bool)
    valid[1, :1476] = False
    moments = QueryMoments()
    moments.add(q[:, :, :1500], 2, valid[:, :1500])
    moments.add(q[:, :, 1500:2500], 2, None)
    moments.add(q[:, :, 2500:], 2, None)
    for b, first in ((0, 0), (1, 1476)):
        torch.testing.assert_close(moments.mean()[b], q[b, :, first:2500].square().mean(1))


def test_query_moments_follow_the_batch():
    q, valid = torch.randn(3, 2, 9, 8), torch.rand(3, 9) < 0.7
    moments, order = QueryMoments(), torch.tensor([2, 0, 0])
    moments.map_batch(lambda x: x[order])  # nothing seen yet
    moments.add(q, 2, valid)
    expected = moments.mean()[order]
    moments.map_batch(lambda x: x[order])
    torch.testing.assert_close(moments.mean(), expected)


# ---- what they are worth


def measured_score_error(q, k, centre, balance) -> float:
    config = IsoQuantConfig(3)
    shapes = layout.key_shapes(*k.shape, config.bits)
    sign, mag = (torch.empty(shapes[name], dtype=torch.int32) for name in ("sign", "mag"))
    scale = torch.empty(shapes["scale"], dtype=torch.float16)
    codec = [config.levels(k.shape[-1], CPU), centre, balance, *config.make_rotation(k.shape[-1], CPU).tensors()]
    ops.encode(k, *codec, config.rule, False, 0, sign, mag, scale)
    decoded = torch.empty_like(k)
    ops.decode([sign, mag, scale, *codec], False, 0, decoded)
    error = q @ (k - decoded).transpose(-1, -2)
    return (error - error.mean(-1, keepdim=True)).square().mean().item()  # a softmax ignores a common shift


def test_centre_and_balance_on_outlier_channels():
    dim = 64
    k, q = torch.randn(2, 1, 1, 2048, dim).unbind(0)
    k[..., :4] *= 20  # channels that queries hardly look at
    q[..., :4] *= 0.1
    k += 5 * torch.randn(dim)  # a bias, as Qwen2 has it
    centre = masked_mean(k, None)
    key_moment, query_moment = second_moment(k, centre, None), q.square().mean(-2)
    balance = channel_balance(key_moment, query_moment)
    none = torch.empty(0)
    plain, centred, keys_only, balanced = (
        measured_score_error(q, k, *parts)
        for parts in ((none, none), (centre, none), (centre, channel_balance(key_moment, None)), (centre, balance))
    )
    assert balanced < keys_only / 1.2 < centred / 4 and centred < plain / 1.5
    ones = torch.ones_like(balance)
    predicted = (score_error(ones, key_moment, query_moment) / score_error(balance, key_moment, query_moment)).item()
    assert centred / balanced == pytest.approx(predicted, rel=0.2)


def test_the_centre_of_queries_is_their_mean_over_heads_and_tokens():
    queries, valid = torch.randn(2, 6, 10, 8), torch.arange(10) >= torch.tensor([[0], [4]])
    moments = QueryMoments()
    assert moments.centre() is None
    moments.add(queries[:, :, :6], 2, valid[:, :6])
    moments.add(queries[:, :, 6:], 2, valid[:, 6:])
    theirs = torch.stack([queries[row, :, first:].unflatten(0, (2, 3)).mean((1, 2)) for row, first in ((0, 0), (1, 4))])
    torch.testing.assert_close(moments.centre(), theirs)
    moments.map_batch(lambda x: x[[1, 1]])
    torch.testing.assert_close(moments.centre(), theirs[[1, 1]])


def test_of_a_long_prompt_some_tokens_are_taken():
    """Every third of 10,000; padded ones are all taken, as few of them may be tokens."""
    queries, centre = torch.randn(1, 6, 10000, 8) + 1, torch.randn(1, 2, 8)
    queries[:, :, torch.arange(10000) % 3 != 0] = torch.nan
    keys = queries[:, :2]
    moments = QueryMoments()
    moments.add(queries, 2, None)
    part = queries[:, :, ::3].unflatten(1, (2, 3))
    torch.testing.assert_close(moments.mean(), part.square().mean((2, 3)))
    torch.testing.assert_close(moments.centre(), part.mean((2, 3)))
    assert moments.tokens == 3334
    torch.testing.assert_close(second_moment(keys, centre, None), second_moment(keys[:, :, ::3], centre, None))
    valid = torch.arange(10000)[None] >= 9990
    short, last = QueryMoments(), torch.randn(1, 6, 10, 8)
    queries[:, :, -10:] = last
    short.add(queries.nan_to_num(), 2, valid)
    torch.testing.assert_close(short.mean(), last.unflatten(1, (2, 3)).square().mean((2, 3)))
