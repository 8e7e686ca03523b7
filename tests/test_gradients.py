"""First derivatives of every case against autograd through the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import multihead as mh
from cases import CASES, Case
from checks import check_gradients

DIFFERENTIABLE = ("lse", "entropy", "max_logit")


@pytest.mark.parametrize("stats", [(), DIFFERENTIABLE], ids=["out", "out and statistics"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients(case: Case, dtype: torch.dtype, stats: tuple[str, ...]) -> None:
    check_gradients(case, dtype, "auto", stats)


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
