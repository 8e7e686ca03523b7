"""A query that may see nothing gives zeros and zero gradients, however it came to see nothing.

Users of torch have met NaN there since 2020 (softmax of a row of -inf is 0/0): it spreads to every
parameter's gradient although the row is in no loss. The opposite failure is as bad: a NaN in
something visible must not become a tidy zero row.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from serving import (
    BACKENDS,
    DIFFERENTIABLE,
    FLOATS,
    Options,
    assert_call,
    assert_gradients,
    draw,
    draw_qkv,
    require_serving,
)

L = 6
_HIDDEN = torch.zeros(L, L).bool()
_ALL_BUT_ROW_2 = torch.ones(L, L).bool()
_ALL_BUT_ROW_2[2] = False
_ALL_BUT_ROW_2_OF_ONE = torch.stack((_ALL_BUT_ROW_2, torch.ones(L, L).bool()))[:, None]
_LEFT, _RIGHT = torch.arange(L) < 2, torch.arange(L) >= 3
_FIRST_SAMPLE = torch.tensor([[True], [False]])
_INNER_PADDED = torch.tensor([[1, 0, 1, 1, 1, 1], [0, 0, 1, 0, 0, 1]]).bool()

# Options, and which rows [B, L] of a batch of two see nothing.
ROW = torch.arange(L).expand(2, L)
ROW_2 = ROW == 2
EVERY, NONE = torch.ones(2, L).bool(), torch.zeros(2, L).bool()
EMPTY: dict[str, tuple[Options, Tensor]] = {
    "a row of bools": ({"mask": _ALL_BUT_ROW_2}, ROW_2),
    "a row of -inf": ({"bias": torch.zeros(L, L).masked_fill(~_ALL_BUT_ROW_2, -torch.inf)}, ROW_2),
    "a row of one sample": ({"mask": _ALL_BUT_ROW_2_OF_ONE}, ROW_2 & _FIRST_SAMPLE),
    "a mask over queries": ({"mask": _ALL_BUT_ROW_2[:, :1]}, ROW_2),
    "nothing at all": ({"mask": _HIDDEN}, EVERY),
    "-inf for every key": ({"bias": torch.full((1, L), -torch.inf)}, EVERY),
    "a sample of padding": (
        {"mask": mh.KeyPadding(torch.tensor([[True] * L, [False] * L]))},
        torch.tensor([[False], [True]]).expand(2, L),
    ),
    "left padding under a causal rule": (
        {"mask": mh.Causal() & mh.KeyPadding(torch.arange(L) >= torch.tensor([[0], [3]]))},
        torch.arange(L) < torch.tensor([[0], [3]]),
    ),
    "an empty cache": (
        {"mask": mh.KeyLengths(torch.tensor([0, L]))},
        torch.tensor([[True], [False]]).expand(2, L),
    ),
    "a ragged batch": (
        {"mask": mh.KeyLengths(torch.tensor([4, L]), query_lengths=torch.tensor([4, L]))},
        torch.arange(L) >= torch.tensor([[4], [L]]),
    ),
    "documents": (
        {"mask": mh.Documents(torch.tensor([[0, 0, -1, 1, 1, -1], [3] * L]))},
        torch.tensor([[False, False, True, False, False, True], [False] * L]),
    ),
    "a document without keys": (
        {"mask": mh.Documents(torch.tensor([0, 0, 7, 1, 1, 1]), torch.tensor([0, 0, 1, 1, 1, 1]))},
        ROW_2,
    ),
    "a start before the keys": ({"mask": mh.Causal() & mh.QueryStart(-3)}, ROW < 3),
    "a window beyond the keys": ({"mask": mh.Window(1, 0) & mh.QueryStart(4)}, ROW > 2),
    "positions apart": (
        {"mask": mh.Causal() & mh.Positions(torch.tensor([0, 3, -5, 5, 2, 1]), torch.arange(L))},
        ROW_2,
    ),
    "two rules together": ({"mask": mh.Dense(_LEFT[None]) & mh.Dense(_RIGHT[None])}, EVERY),
    "a rule and a bias": (
        {"mask": _LEFT[None], "bias": torch.zeros(1, L).masked_fill(~_RIGHT, -torch.inf)},
        EVERY,
    ),
    "a window and padding": (
        {"mask": mh.SlidingWindow(2) & mh.KeyPadding(_INNER_PADDED)},
        torch.tensor([[False] * L, [True, True, False, False, True, False]]),
    ),
    "rows that all see something": ({"mask": mh.Causal()}, NONE),
}  # fmt: skip


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return draw_qkv((2, 4, L, 8), (2, 2, L, 8), 5, dtype=dtype)


@pytest.mark.parametrize(
    "sinks", [None, torch.tensor([0.5, -2.0, 3.0, 0.0])], ids=["plain", "sinks"]
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_row_is_zero_and_touches_no_other(
    name: str, backend: str, dtype: torch.dtype, sinks: Tensor | None
) -> None:
    require_serving(backend, dtype)
    options, empty = EMPTY[name]
    result = assert_call(tensors(dtype), backend, sinks=sinks, **options)
    rows = empty[:, None].expand(2, 4, L)
    assert torch.equal((result.out == 0).all(-1), rows)
    assert torch.equal(result.argmax == -1, rows)
    for statistic in ("max_weight", "mean_distance", "sink_mass", "participation", "entropy"):
        assert bool((result.stats[statistic][rows] == 0).all()), statistic
    for statistic in ("max_logit", "max_qk"):
        assert bool((result.stats[statistic][rows] == -torch.inf).all()), statistic
    wanted = torch.full((4,), -torch.inf) if sinks is None else sinks
    assert torch.equal(result.lse[rows], wanted[None, :, None].expand(2, 4, L)[rows])
    weights = result.weights(slice(None), slice(None))
    assert torch.equal((weights == 0).all(-1), rows)


@pytest.mark.parametrize(
    "sinks", [None, torch.tensor([0.5, -2.0, 3.0, 0.0])], ids=["plain", "sinks"]
)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
@pytest.mark.parametrize("name", EMPTY)
def test_gradients_through_an_empty_row_are_zero(
    name: str, dtype: torch.dtype, sinks: Tensor | None
) -> None:
    options, empty = EMPTY[name]
    options = {**options, "sinks": sinks}
    assert_gradients(tensors(dtype), **options)
    weight = draw(2, 4, L, 5, seed=1, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in tensors(dtype)]
    result = mh.attention_with_stats(*leaves, stats=DIFFERENTIABLE, **options)
    rows = empty[:, None].expand(2, 4, L)
    of_empty = torch.autograd.grad(
        (result.out * weight)[rows].sum()
        + sum(result.stats[statistic][rows].sum() for statistic in DIFFERENTIABLE),
        leaves,
        retain_graph=True,
    )
    assert not any(bool(grad.any()) for grad in of_empty)
    masked = (result.out * weight).masked_fill(rows[..., None], 0).sum()
    everything = (result.out * weight).sum()
    for got, want in zip(
        torch.autograd.grad(everything, leaves, retain_graph=True),
        torch.autograd.grad(masked, leaves),
        strict=True,
    ):
        assert torch.equal(got, want)


def test_gradients_of_a_bias_and_of_sinks_are_finite() -> None:
    bias = torch.zeros(2, 4, L, L).masked_fill(~_ALL_BUT_ROW_2, -torch.inf).requires_grad_()
    sinks = torch.tensor([0.0, -torch.inf, 1.0, 2.0], requires_grad=True)
    slopes = torch.rand(4, requires_grad=True)
    weight = draw(2, 4, L, 5, seed=1)
    (mh.attention(*tensors(), bias=bias, sinks=sinks) * weight).sum().backward()
    assert bool(bias.grad.isfinite().all())
    assert not bool(bias.grad[:, :, 2].any())
    assert bool(sinks.grad.isfinite().all())
    alibi = mh.attention(*tensors(), bias=mh.ALiBi(slopes), mask=_ALL_BUT_ROW_2)
    (alibi * weight).sum().backward()
    assert bool(slopes.grad.isfinite().all())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_something_visible_is_no_zero_row(backend: str, dtype: torch.dtype) -> None:
    """Masks of any kind, or none: the row of a NaN query is NaN, and no other row is."""
    require_serving(backend, dtype)
    for name in ("rows that all see something", "a row of bools", "a row of -inf", "documents"):
        options, empty = EMPTY[name]
        for arguments in ({}, options):
            query, key, value = tensors(dtype)
            query[0, 0, 1, 3] = torch.nan
            out = mh.attention(query, key, value, backend=backend, **arguments)
            reached = torch.zeros(2, 4, L).bool()
            reached[0, 0, 1] = True
            assert torch.equal(out.isnan().all(-1), reached)
            assert torch.equal(out.isnan().any(-1), reached)
            if arguments:
                assert bool((out[empty[:, None].expand(2, 4, L)] == 0).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_query_that_sees_nothing_is_zero(backend: str) -> None:
    """What no rule lets in does not exist, whichever side of the product is NaN."""
    require_serving(backend, torch.float32)
    query, key, value = tensors()
    query[:, :, 2] = torch.nan
    for name in ("a row of bools", "a row of -inf", "a mask over queries"):
        out = mh.attention(query, key, value, backend=backend, **EMPTY[name][0])
        assert bool((out[:, :, 2] == 0).all()), name
        assert bool(out.isfinite().all())


def parameter_gradients(layer: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    named = dict(layer.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("weights", [False, True], ids=["plain", "weights"])
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_a_layer_trains_beside_a_sample_of_padding(
    cross: bool, weights: bool, training: bool
) -> None:
    """The batch's gradients are those of the sample that has a loss, alone."""
    layer = mh.MultiHeadAttention(
        12, 4, num_kv_heads=2, context_dim=9 if cross else None, qkv_bias=True, out_bias=True
    ).train(training)
    x = draw(2, L, 12, seed=1)
    context = draw(2, L, 9, seed=2) if cross else None
    padding = mh.KeyPadding(torch.tensor([[True] * L, [False] * L]))

    def run(x: Tensor, context: Tensor | None, mask: mh.Mask | None) -> Tensor:
        if weights:
            out, heads = layer.forward_with_stats(x, context, mask=mask, stats=mh.STATISTICS)
            assert bool(heads.weights(slice(None), slice(None)).isfinite().all())
            return out
        return layer(x, context, mask=mask)

    out = run(x, context, padding)
    assert torch.equal(out[1], layer.out_proj.bias.expand(L, 12))
    alone = run(x[:1], None if context is None else context[:1], None)
    torch.testing.assert_close(out[:1], alone, rtol=0, atol=1e-6)
    together = parameter_gradients(layer, out[0].square().sum())
    for name, grad in parameter_gradients(layer, alone[0].square().sum()).items():
        torch.testing.assert_close(together[name], grad, rtol=1e-5, atol=1e-5, msg=name)
