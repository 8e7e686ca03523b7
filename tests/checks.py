"""What every backend is held to, case by case; used on the backends and on planted faults."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

import multihead as mh
from cases import Case
from close import assert_close, float64_baseline


def run(case: Case, dtype: torch.dtype, backend: str) -> mh.AttentionResult:
    """The case's call with every statistic."""
    query, key, value = case.tensors(dtype)
    options = case.options(dtype)
    return mh.attention_with_stats(
        query, key, value, stats=mh.STATISTICS, backend=backend, **options
    )


def check_forward(case: Case, dtype: torch.dtype, backend: str) -> None:
    """Output and every statistic against the definition in float64."""
    actual = run(case, dtype, backend)
    assert actual.out.dtype == dtype
    single = torch.float32 if dtype == torch.float64 else dtype
    compare(actual, run(case, torch.float64, "reference"), run(case, single, "reference"))


def compare(
    actual: mh.AttentionResult, expected: mh.AttentionResult, plain: mh.AttentionResult,
    factor: float = 2.0,
) -> None:  # fmt: skip
    """Hold a result with every statistic to the one of the definition in float64.

    `plain` is what plain torch operations give in the dtype of `actual`, or in float32 where that
    is float64: see float64_baseline.
    """
    baseline = plain
    if actual.out.dtype == torch.float64:
        stats = {n: float64_baseline(expected.stats[n], plain.stats[n]) for n in mh.STATISTICS}
        baseline = replace(plain, out=float64_baseline(expected.out, plain.out), stats=stats)
    assert_close(actual.out, expected.out, baseline.out, factor=factor, what="out")
    for name in mh.STATISTICS:
        if name != "argmax":
            got, want, near = (it.stats[name] for it in (actual, expected, baseline))
            assert_close(got, want, near, factor=factor, what=name)
    _check_argmax(actual, expected, baseline, factor)


def _check_argmax(
    actual: mh.AttentionResult, expected: mh.AttentionResult, baseline: mh.AttentionResult,
    factor: float,
) -> None:  # fmt: skip
    """The same column, unless its weight is within the error of the largest one."""
    assert torch.equal(actual.argmax == -1, expected.argmax == -1)
    weights = expected.weights(slice(None), slice(None))
    if weights.numel() == 0:
        return
    chosen = weights.gather(-1, actual.argmax.clamp(min=0)[..., None])[..., 0]
    rows = expected.argmax >= 0
    assert_close(
        chosen[rows].to(baseline.max_weight.dtype),
        weights.amax(-1)[rows],
        baseline.max_weight[rows],
        factor=factor,
        what="weight at argmax",
    )


def leaves_and_loss(
    case: Case, dtype: torch.dtype, backend: str, stats: tuple[str, ...]
) -> tuple[dict[str, Tensor], Tensor]:
    """A case's differentiable inputs by name, and one scalar that weighs the output and `stats` by
    fixed random numbers.
    """
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
        query, key, value, stats=("lse", "entropy", "max_logit"), backend=backend, **options
    )
    draw = torch.Generator().manual_seed(11)
    loss = torch.zeros((), dtype=torch.float64)
    for name in ("out", *stats):
        tensor = result.out if name == "out" else result.stats[name]
        weight = torch.randn(tensor.shape, generator=draw, dtype=torch.float64)
        # An empty row's lse and max_logit are -inf whatever the inputs are.
        loss = loss + (tensor.double().masked_fill(tensor.isinf(), 0) * weight).sum()
    return leaves, loss


def gradients(
    case: Case, dtype: torch.dtype, backend: str, stats: tuple[str, ...]
) -> dict[str, Tensor]:
    """Gradients of the loss of `leaves_and_loss`; zeros where nothing arrives."""
    leaves, loss = leaves_and_loss(case, dtype, backend, stats)
    found = torch.autograd.grad(loss, tuple(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }


def check_gradients(
    case: Case, dtype: torch.dtype, backend: str, stats: tuple[str, ...] = ()
) -> None:
    """Every input's gradient against autograd through the definition in float64."""
    expected = gradients(case, torch.float64, "reference", stats)
    plain_dtype = torch.float32 if dtype == torch.float64 else dtype
    plain = gradients(case, plain_dtype, "reference", stats)
    actual = gradients(case, dtype, backend, stats)
    assert actual.keys() == expected.keys()
    for name, grad in actual.items():
        assert grad.dtype == dtype
        baseline = plain[name]
        if dtype == torch.float64:
            baseline = float64_baseline(expected[name], baseline)
        assert_close(grad, expected[name], baseline, factor=3.0, what=f"gradient of {name}")
