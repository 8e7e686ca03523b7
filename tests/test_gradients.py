"""First derivatives of every case against autograd through the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import multihead as mh
from cases import CASES, Case
from close import assert_close, float64_baseline

DIFFERENTIABLE = ("lse", "entropy", "max_logit")


def gradients(
    case: Case, dtype: torch.dtype, backend: str, stats: tuple[str, ...]
) -> dict[str, Tensor]:
    """Gradients of one scalar that weighs the output and `stats` by fixed random numbers."""
    query, key, value = (x.detach().clone().requires_grad_() for x in case.tensors(dtype))
    options = case.options(dtype)
    leaves = {"query": query, "key": key, "value": value}
    bias = options["bias"]
    if isinstance(bias, mh.ALiBi):
        leaves["slopes"] = bias.slopes.requires_grad_()
    elif isinstance(bias, Tensor):
        leaves["bias"] = bias.requires_grad_()
    if isinstance(options["sinks"], Tensor):
        leaves["sinks"] = options["sinks"].requires_grad_()
    result = mh.attention_with_stats(
        query, key, value, stats=DIFFERENTIABLE, backend=backend, **options
    )
    draw = torch.Generator().manual_seed(11)
    loss = torch.zeros((), dtype=torch.float64)
    for name in ("out", *stats):
        tensor = result.out if name == "out" else result.stats[name]
        weight = torch.randn(tensor.shape, generator=draw, dtype=torch.float64)
        # An empty row's lse and max_logit are -inf whatever the inputs are.
        loss = loss + (tensor.double().masked_fill(tensor.isinf(), 0) * weight).sum()
    found = torch.autograd.grad(loss, tuple(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }


@pytest.mark.parametrize("stats", [(), DIFFERENTIABLE], ids=["out", "out and statistics"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients(case: Case, dtype: torch.dtype, stats: tuple[str, ...]) -> None:
    expected = gradients(case, torch.float64, "reference", stats)
    plain = gradients(case, torch.float32 if dtype == torch.float64 else dtype, "reference", stats)
    actual = gradients(case, dtype, "auto", stats)
    assert actual.keys() == expected.keys()
    for name, grad in actual.items():
        assert grad.dtype == dtype
        baseline = plain[name]
        if dtype == torch.float64:
            baseline = float64_baseline(expected[name], baseline)
        assert_close(grad, expected[name], baseline, factor=3.0, what=f"gradient of {name}")


def test_bias_gradient_has_the_shape_of_the_bias() -> None:
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, 5, 7, generator=draw) for _ in range(3))
    bias = torch.randn(1, 3, 1, 5, generator=draw, requires_grad=True)
    mh.attention(query, key, value, bias=bias).sum().backward()
    assert bias.grad is not None
    assert bias.grad.shape == (1, 3, 1, 5)


def test_gradients_of_expanded_inputs_are_summed_to_their_base() -> None:
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(2, 3, 5, 7, generator=draw, dtype=torch.float64)
    base = torch.randn(1, 1, 11, 7, generator=draw, dtype=torch.float64, requires_grad=True)
    wide = base.expand(2, 3, 11, 7)
    (shared,) = torch.autograd.grad(mh.attention(query, wide, wide).sum(), base)
    repeated = base.detach().repeat(2, 3, 1, 1).requires_grad_()
    (apart,) = torch.autograd.grad(mh.attention(query, repeated, repeated).sum(), repeated)
    torch.testing.assert_close(shared, apart.sum((0, 1), keepdim=True), rtol=1e-12, atol=1e-12)


def test_gradcheck_of_output_and_statistics() -> None:
    draw = torch.Generator().manual_seed(2)
    inputs = [
        torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True)
        for shape in ((1, 4, 3, 2), (1, 2, 5, 2), (1, 2, 5, 3), (1, 4, 1, 5), (4,))
    ]

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        query, key, value, bias, sinks = tensors
        result = mh.attention_with_stats(
            query, key, value, mask=mh.Causal(), bias=bias, sinks=sinks, softcap=1.5
        )
        return result.out, result.lse, result.entropy, result.max_logit

    assert torch.autograd.gradcheck(call, inputs)


def test_reference_has_second_derivatives_and_transforms() -> None:
    draw = torch.Generator().manual_seed(3)
    inputs = [
        torch.randn((1, 2, 3, 2), generator=draw, dtype=torch.float64, requires_grad=True)
        for _ in range(3)
    ]

    def call(*tensors: Tensor) -> Tensor:
        return mh.attention(*tensors, mask=mh.Causal(), backend="reference")

    assert torch.autograd.gradgradcheck(call, inputs)
    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True, check_batched_grad=True)


@pytest.mark.parametrize("backend", ["auto", "chunked"])
def test_what_is_missing_raises_and_names_the_way_out(backend: str) -> None:
    query = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)

    def loss(query: Tensor) -> Tensor:
        return mh.attention(query, query, query, backend=backend).square().sum()

    with pytest.raises(mh.BackendError, match='backend="reference"'):
        torch.autograd.grad(loss(query), query, create_graph=True)
    with pytest.raises(mh.BackendError, match='backend="reference"'):
        torch.func.jvp(loss, (query.detach(),), (torch.ones_like(query),))
    with pytest.raises(mh.BackendError, match='backend="reference"'):
        torch.func.grad(loss)(query.detach())
    with pytest.raises(mh.BackendError, match='backend="reference"'):
        torch.func.vmap(loss)(query.detach()[None])
