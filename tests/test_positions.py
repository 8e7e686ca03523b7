"""Positions that are added: sinusoidal, learned, and the slopes of ALiBi."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import multihead as mh


def test_sinusoidal_by_the_formula() -> None:
    vectors = mh.SinusoidalPositions(6)(torch.tensor([0, 1, 1000]))
    assert vectors.shape == (1, 3, 6)
    assert vectors[0, 0].tolist() == [0, 1, 0, 1, 0, 1]
    for row, position in enumerate((0, 1, 1000)):
        for i in range(3):
            angle = position / 10000 ** (2 * i / 6)
            want = [math.sin(angle), math.cos(angle)]
            assert vectors[0, row, 2 * i : 2 * i + 2].tolist() == pytest.approx(want, abs=1e-4)


def test_sinusoidal_with_sines_first_holds_the_same_numbers() -> None:
    positions = torch.arange(7)
    paired = mh.SinusoidalPositions(10)(positions)
    apart = mh.SinusoidalPositions(10, interleaved=False)(positions)
    assert torch.equal(apart, torch.cat((paired[..., ::2], paired[..., 1::2]), -1))


def test_sinusoidal_follows_the_dtype_and_is_rounded_once() -> None:
    module = mh.SinusoidalPositions(8)
    positions = torch.arange(300) + 5000
    exact = module(positions)
    assert torch.equal(module.to(torch.bfloat16)(positions), exact.bfloat16())
    assert torch.equal(mh.SinusoidalPositions(8).double()(positions).float(), exact)
    assert not module.state_dict()
    assert not list(module.parameters())


def test_learned() -> None:
    module = mh.LearnedPositions(11, 5)
    assert module.weight.shape == (11, 5)
    assert torch.equal(module(torch.tensor([2, 0])), module.weight[None, [2, 0]])
    rows = torch.tensor([[0, 0, 1], [8, 9, 10]])
    assert torch.equal(module(rows), module.weight[rows])
    module(rows).sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad[:, 0].tolist() == [2, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1]


def test_learned_starts_as_documented() -> None:
    assert float(mh.LearnedPositions(512, 64).weight.detach().std()) == pytest.approx(
        0.02, rel=0.05
    )


@pytest.mark.parametrize(
    "make", [lambda: mh.LearnedPositions(64, 6), lambda: mh.SinusoidalPositions(6)]
)
def test_compile_in_one_graph(make: Callable[[], torch.nn.Module]) -> None:
    torch._dynamo.reset()
    module = make()
    run = torch.compile(module, fullgraph=True, dynamic=True, backend="eager")
    for length in (5, 7, 29):
        torch.testing.assert_close(run(torch.arange(length)), module(torch.arange(length)))


def test_alibi_slopes_of_any_number_of_heads() -> None:
    assert mh.alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert mh.alibi_slopes(1).tolist() == [2.0**-8]
    assert mh.alibi_slopes(6).tolist() == [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]
    twelve = [2.0**-i for i in range(1, 9)] + [2.0 ** -(i + 0.5) for i in range(4)]
    torch.testing.assert_close(mh.alibi_slopes(12), torch.tensor(twelve), rtol=1e-7, atol=0)
    for heads in range(1, 70):
        slopes = mh.alibi_slopes(heads)
        assert slopes.shape == (heads,)
        assert slopes.dtype == torch.float32
        assert bool(((slopes > 0) & (slopes < 1)).all())
        assert len(set(slopes.tolist())) == heads


@pytest.mark.parametrize("heads", [1, 6, 8, 12, 17])
def test_alibi_slopes_are_blooms(heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 3), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(mh.alibi_slopes(heads), theirs, rtol=1e-6, atol=0)


def test_alibi_bias_is_negative_and_falls_with_distance() -> None:
    query = key = torch.zeros(1, 6, 5, 4)
    bias = mh.ALiBi(mh.alibi_slopes(6))
    result = mh.attention_with_stats(query, key, key, mask=mh.Causal(), bias=bias)
    weights = result.weights([4], slice(None))[0, :, 0]
    assert bool((weights.diff(dim=-1) > 0).all())


WRONG: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: mh.SinusoidalPositions(7), ValueError, "embed_dim must be even"),
    (lambda: mh.SinusoidalPositions(8, base=-1), ValueError, "base must be a number above 1"),
    (lambda: mh.SinusoidalPositions(8)(torch.arange(3.0)), TypeError, "integer tensor"),
    (lambda: mh.LearnedPositions(4, 0), ValueError, "embed_dim must be at least 1"),
    (lambda: mh.LearnedPositions(4, 2)(torch.tensor([4])), ValueError, "between 0 and 3"),
    (lambda: mh.LearnedPositions(4, 2)(torch.tensor([-1])), ValueError, "got -1 to -1"),
    (lambda: mh.LearnedPositions(4, 2)(torch.tensor(3)), ValueError, "must be"),
    (lambda: mh.alibi_slopes(0), ValueError, "num_heads must be at least 1"),
    (lambda: mh.alibi_slopes(8.0), TypeError, "num_heads must be an integer"),
]


@pytest.mark.parametrize(("call", "kind", "words"), WRONG, ids=range(len(WRONG)))
def test_refused(call: Callable[[], Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        call()
    assert isinstance(caught.value, mh.MultiheadError)
