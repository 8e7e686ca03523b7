"""What layers do otherwise at inference: the same results, and only where nobody looks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import multihead as mh
from close import assert_close
from multihead.nn.norm import RMSNorm

WIDTH, HIDDEN = 43, 29
HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALVES)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)


def norms(dtype: torch.dtype, **options: Any) -> tuple[RMSNorm, nn.RMSNorm]:
    """Ours and torch's, with the same weights."""
    theirs = nn.RMSNorm(WIDTH, **{"eps": 1e-5} | options)
    if theirs.weight is not None:
        nn.init.uniform_(theirs.weight, 0.5, 2.0)
    ours = RMSNorm(WIDTH, **{"eps": 1e-5} | options)
    ours.load_state_dict(theirs.state_dict())
    return ours.to(dtype), theirs.to(dtype)


class Passes:
    """Counts norms that were computed by our own passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        original = torch.linalg.vector_norm

        def count(*args: Any, **kwargs: Any) -> Tensor:
            self.count += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(torch.linalg, "vector_norm", count)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    return Passes(monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_a_norm_is_as_exact_as_torchs(dtype: torch.dtype, affine: bool, passes: Passes) -> None:
    ours, theirs = norms(dtype, elementwise_affine=affine)
    x = numbers(2, 31, WIDTH, dtype=dtype) * numbers(31, 1).exp().to(dtype)
    x[0, 3] = 0
    with torch.no_grad():
        baseline, found = theirs(x), ours(x)
        expected = copy.deepcopy(theirs).double()(x.double())
    assert_close(found, expected, baseline)
    assert found.dtype == dtype
    assert passes.count == (dtype in HALVES)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_norm_spreads_what_is_not_a_number_along_its_row(dtype: torch.dtype) -> None:
    ours, theirs = norms(dtype)
    x = numbers(5, WIDTH, dtype=dtype)
    x[1, 2], x[2, 3], x[3, 4] = torch.nan, torch.inf, -torch.inf
    with torch.no_grad():
        found, expected = ours(x), theirs(x)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isnan().any(1), torch.tensor([False, True, True, True, False]))


def test_a_norms_row_has_the_same_bits_in_any_batch() -> None:
    ours, _ = norms(torch.bfloat16)
    x = numbers(3, 101, WIDTH, dtype=torch.bfloat16)
    with torch.no_grad():
        whole = ours(x)
        for rows in (slice(7, 8), slice(50, 67)):
            assert torch.equal(ours(x[1:2, rows]), whole[1:2, rows])


def test_a_norm_with_derivatives_is_torchs(passes: Passes) -> None:
    ours, theirs = norms(torch.bfloat16)
    x = numbers(3, WIDTH, dtype=torch.bfloat16).requires_grad_()
    found, expected = (
        torch.autograd.grad(norm(x).square().sum(), (x, norm.weight)) for norm in (ours, theirs)
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), theirs(x))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(ours(x), theirs(x))
    assert passes.count == 0


def gated(dtype: torch.dtype = torch.float32, **options: Any) -> mh.GatedFeedForward:
    torch.manual_seed(3)
    return mh.GatedFeedForward(WIDTH, HIDDEN, **options).to(dtype)


def written_out(layer: mh.GatedFeedForward, x: Tensor) -> Tensor:
    gate, up = layer.gate_up_proj(x).chunk(2, dim=-1)
    return layer.down_proj(layer.activation(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_a_gate_in_place_has_the_bits_of_the_formula(dtype: torch.dtype, bias: bool) -> None:
    layer = gated(dtype, bias=bias)
    x = numbers(2, 31, WIDTH, dtype=dtype)
    before = x.clone()
    with torch.no_grad():
        expected = written_out(layer, x)
        assert torch.equal(layer(x), expected)
    assert torch.equal(x, before)


def test_what_a_hook_keeps_is_not_written_to() -> None:
    layer, x = gated(), numbers(3, 5, WIDTH)
    kept: list[Tensor] = []
    layer.gate_up_proj.register_forward_hook(lambda module, args, out: kept.append(out))
    with torch.no_grad():
        expected = written_out(layer, x)
        assert torch.equal(layer(x), expected)
    assert torch.equal(kept[0], kept[1])


def test_a_gate_with_derivatives_or_another_activation() -> None:
    x = numbers(3, 5, WIDTH)
    for activation in (torch.nn.functional.silu, torch.nn.functional.gelu, nn.Identity()):
        layer = gated(activation=activation)
        with torch.no_grad():
            assert torch.equal(layer(x), written_out(layer, x))
        parameters = tuple(layer.parameters())
        found, expected = (
            torch.autograd.grad(function(x).square().sum(), parameters)
            for function in (layer, lambda x, layer=layer: written_out(layer, x))
        )
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    mapped = torch.func.vmap(layer)(x[None])[0]
    assert torch.equal(mapped, layer(x))


@pytest.mark.parametrize(
    "context",
    [lambda: torch.autocast("cpu", torch.bfloat16), lambda: FlopCounterMode(display=False)],
    ids=["autocast", "operations counted"],
)
def test_a_gate_under_modes(context: Callable[[], AbstractContextManager[Any]]) -> None:
    layer, x = gated(), numbers(3, 5, WIDTH)
    with torch.no_grad(), context():
        assert torch.equal(layer(x), written_out(layer, x))
