"""Statistics of each head against the explicit matrix, written out as a textbook would.

Users met NaN entropies as soon as a weight is 0, entropies that count hidden keys, NaN in the
gradient of an entropy whose forward was mended, and the wrong KV head under grouped queries.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import multihead as mh
from close import assert_close
from multihead.heads.watching.queries import queries_of
from multihead.ops.problem import describe_logits
from serving import (
    BACKENDS,
    FLOATS,
    assert_call,
    assert_gradients,
    baseline,
    draw_qkv,
    exact,
    require_serving,
)

B, H, HKV, LQ, LK = 2, 4, 2, 7, 11
_SHOWN = torch.arange(LK) >= torch.tensor([[0], [4]])
_SOME = torch.rand(B, H, LQ, LK, generator=torch.Generator().manual_seed(4)) < 0.5
SINKS = torch.tensor([0.5, -2.0, 3.0, 0.0])
MASKS: dict[str, mh.Mask | None] = {
    "none": None,
    "causal": mh.Causal(),
    "window": mh.SlidingWindow(3),
    "padding": mh.Causal() & mh.KeyPadding(_SHOWN),
    "holes": mh.Dense(_SOME),
    "nothing": mh.Dense(torch.zeros(LQ, LK).bool()),
}


def explicit(
    query: Tensor, key: Tensor, mask: mh.Mask | None, sinks: Tensor | None, softcap: float | None
) -> dict[str, Tensor]:
    """Every statistic, row by row, from lists of Python numbers in float64."""
    qk = query.double() @ key.double().repeat_interleave(H // HKV, 1).mT / query.shape[-1] ** 0.5
    scores = qk if softcap is None else softcap * torch.tanh(qk / softcap)
    visible = torch.ones(LQ, LK).bool() if mask is None else mask.to_dense(LQ, LK)
    visible = visible.expand(B, H, LQ, LK)
    stats = {name: torch.zeros(B, H, LQ, dtype=torch.float64) for name in mh.STATISTICS}
    for b in range(B):
        first = 4 if mask is MASKS["padding"] and b == 1 else 0
        for h in range(H):
            for i in range(LQ):
                columns = visible[b, h, i].nonzero()[:, 0].tolist()
                row = [scores[b, h, i, j].item() for j in columns]
                sink = None if sinks is None else sinks[h].item()
                found = of_row(row, columns, i + LK - LQ, first, sink)
                found["max_qk"] = max((qk[b, h, i, j].item() for j in columns), default=-math.inf)
                for name, number in found.items():
                    stats[name][b, h, i] = number
    return stats


def of_row(
    row: list[float], columns: list[int], position: int, first: int, sink: float | None
) -> dict[str, float]:
    outcomes = [*row, *([] if sink is None else [sink])]
    if not outcomes:
        return {"lse": -math.inf, "max_logit": -math.inf, "argmax": -1}
    peak = max(outcomes)
    total = math.fsum(math.exp(s - peak) for s in outcomes)
    weights = [math.exp(s - peak) / total for s in outcomes]
    entropy = -math.fsum(w * math.log(w) for w in weights if w > 0)
    found = {"lse": peak + math.log(total), "entropy": entropy}
    if not row:
        return {**found, "max_logit": -math.inf, "argmax": -1}
    share = math.fsum(weights[: len(row)])
    keys = [w / share for w in weights[: len(row)]]
    places = dict(zip(columns, keys, strict=True))
    return found | {
        "max_logit": max(row),
        "max_weight": max(weights[: len(row)]),
        "argmax": columns[row.index(max(row))],
        "mean_distance": math.fsum(w * abs(position - j) for j, w in places.items()),
        "sink_mass": places.get(first, 0.0),
        "participation": 1 / math.fsum(w * w for w in keys),
    }


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "sinks", [None, torch.tensor([0.5, -2.0, 3.0, 0.0])], ids=["plain", "sinks"]
)
@pytest.mark.parametrize("softcap", [None, 1.5], ids=["uncapped", "capped"])
@pytest.mark.parametrize("mask", MASKS)
def test_every_statistic_of_the_explicit_matrix(
    mask: str, softcap: float | None, sinks: Tensor | None, backend: str, dtype: torch.dtype
) -> None:
    require_serving(backend, dtype)
    tensors = draw_qkv((B, H, LQ, 8), (B, HKV, LK, 8), dtype=dtype)
    options = {"mask": MASKS[mask], "sinks": sinks, "softcap": softcap}
    result = assert_call(tensors, backend, **options)
    near = baseline(tensors, options, exact(tensors, options))
    for name, expected in explicit(*tensors[:2], MASKS[mask], sinks, softcap).items():
        if name == "argmax":
            assert torch.equal(result.argmax.double(), expected)
        else:
            assert_close(result.stats[name], expected, near.stats[name], what=name)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_entropies_that_are_known(backend: str, dtype: torch.dtype) -> None:
    """0 with one key, 0 for one hot weight, log n for n equal keys, 0 for none."""
    require_serving(backend, dtype)
    zeros = torch.zeros(1, H, 9, 8, dtype=dtype)
    few = zeros[:, :HKV]

    def entropy(query: Tensor, key: Tensor, **options: object) -> Tensor:
        return mh.attention_with_stats(
            query, key, key, stats=("entropy",), backend=backend, **options
        ).entropy

    counts = torch.arange(1, 10).log().expand(1, H, 9)
    torch.testing.assert_close(entropy(zeros, few, mask=mh.Causal()), counts, rtol=0, atol=1e-6)
    assert bool((entropy(zeros, few, mask=mh.Causal())[..., 0] == 0).all())
    assert bool((entropy(zeros, few, mask=torch.zeros(9, 9).bool()) == 0).all())
    for size in (2, 5):
        known = counts.clamp(max=math.log(size))
        got = entropy(zeros, few, mask=mh.SlidingWindow(size))
        torch.testing.assert_close(got, known, rtol=0, atol=1e-6)
    sharp = (torch.eye(8)[:8] * 200)[None, None].to(dtype)
    for scale in (1.0, 100.0):
        one_hot = entropy(sharp.expand(1, H, 8, 8), sharp.expand(1, HKV, 8, 8), scale=scale)
        assert bool((one_hot == 0).all())


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_of_statistics(mask: str, dtype: torch.dtype) -> None:
    """Finite, and right, for one key, for hot rows and for rows that see nothing."""
    tensors = draw_qkv((B, H, LQ, 8), (B, HKV, LK, 8), dtype=dtype)
    query, key, value = (x.clone().requires_grad_() for x in tensors)
    for scale in (None, 30.0):  # at 30 weights underflow to 0
        for name in ("lse", "entropy", "max_logit"):
            assert_gradients(tensors, stats=(name,), mask=MASKS[mask], scale=scale)
            result = mh.attention_with_stats(
                query, key, value, stats=(name,), mask=MASKS[mask], scale=scale
            )
            statistic = result.stats[name]
            loss = statistic.masked_fill(statistic.isinf(), 0).sum()
            for grad in torch.autograd.grad(loss, (query, key)):
                assert bool(grad.isfinite().all()), name


def test_an_entropy_of_one_hot_rows_has_no_gradient() -> None:
    query = (torch.eye(8) * 100)[None, None].clone().requires_grad_()
    entropy = mh.attention_with_stats(query, query, query, scale=1.0).entropy
    (grad,) = torch.autograd.grad(entropy.sum(), query)
    assert not bool(grad.any())


def test_statistics_that_are_not_differentiable_are_detached() -> None:
    tensors = [x.requires_grad_() for x in draw_qkv((B, H, LQ, 8), (B, HKV, LK, 8))]
    stats = mh.attention_with_stats(*tensors, stats=mh.STATISTICS).stats
    recorded = {name for name, statistic in stats.items() if statistic.requires_grad}
    assert recorded == {"lse", "entropy", "max_logit"}


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_layer_tells_what_each_query_head_does(kv_heads: int) -> None:
    layer = mh.MultiHeadAttention(12, 4, num_kv_heads=kv_heads)
    x = torch.randn(2, 7, 12)
    out, heads = layer.forward_with_stats(x, mask=mh.Causal(), stats=mh.STATISTICS)
    weights = heads.weights(slice(None), slice(None))
    assert weights.shape == (2, 4, 7, 7)
    entropy = torch.special.entr(weights.double()).sum(-1)
    torch.testing.assert_close(heads.entropy.double(), entropy, rtol=0, atol=1e-5)
    assert bool((heads.entropy[..., 0] == 0).all())
    torch.testing.assert_close(heads.max_weight, weights.amax(-1), rtol=0, atol=1e-6)
    assert torch.equal(heads.argmax, weights.argmax(-1))
    assert torch.equal(layer(x, mask=mh.Causal()), out)
    (grad,) = torch.autograd.grad(heads.entropy.sum(), layer.qkv_proj.weight)
    assert bool(grad.isfinite().all())
    assert bool(grad.any())


def test_layers_of_one_mask_share_their_queries() -> None:
    def queries(rows: int, columns: int, mask: mh.Mask | None, dtype=torch.float32, **options):
        query, key = torch.randn(2, 6, rows, 4, dtype=dtype), torch.randn(2, 3, columns, 4)
        return queries_of(describe_logits(query, key.to(dtype), mask=mask), **options)

    with torch.inference_mode():
        first = queries(3, 7, mh.Causal())
    assert queries(3, 7, mh.Causal(), torch.float64) is first
    assert not first.real.is_inference()
    assert first.tokens == 3
    assert first.texts == 0
    assert first.by_head.tolist() == [3]
    for rows, columns, mask, options in (
        (2, 7, mh.Causal(), {}),
        (3, 8, mh.Causal(), {}),
        (3, 7, None, {}),
        (3, 7, mh.Causal() & mh.QueryStart(0), {}),
        (3, 7, mh.Causal(), dict(self_attention=False)),
    ):
        assert queries(rows, columns, mask, **options) is not first
    padding = mh.KeyPadding(torch.ones(1, 7, dtype=torch.bool))
    assert queries(3, 7, padding) is not queries(3, 7, padding)
