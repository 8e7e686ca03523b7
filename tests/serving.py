"""Calls with tensors at hand, over every backend that serves them, held to the definition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import multihead as mh
from checks import compare
from close import assert_close, float64_baseline
from multihead.ops import dispatch

BACKENDS = [backend.NAME for backend in dispatch.BACKENDS]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
DIFFERENTIABLE = ("lse", "entropy", "max_logit")
Options = dict[str, object]


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """N(0, 1), the same values in every dtype."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(torch.bfloat16).to(dtype)


def draw_qkv(
    query: tuple[int, ...], key: tuple[int, ...], value_dim: int | None = None, *,
    seed: int = 0, dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """query, key and value of these shapes."""
    value = (*key[:3], key[3] if value_dim is None else value_dim)
    shapes = query, key, value
    q, k, v = (draw(*shape, seed=3 * seed + i, dtype=dtype) for i, shape in enumerate(shapes))
    return q, k, v


def require_serving(backend: str, dtype: torch.dtype) -> None:
    """Skip the calling test where `backend` does not compute `dtype` on this machine."""
    found = mh.explain(*draw_qkv((1, 1, 1, 1), (1, 1, 1, 1), dtype=dtype)).reasons[backend]
    if found:
        pytest.skip(f"{backend}: {found[0]}")


def exact(tensors: tuple[Tensor, ...], options: Options) -> mh.AttentionResult:
    """The definition in float64, with every statistic."""
    query, key, value = (x.double() for x in tensors)
    return mh.attention_with_stats(
        query, key, value, stats=mh.STATISTICS, backend="reference", **options
    )


def baseline(
    tensors: tuple[Tensor, ...], options: Options, expected: mh.AttentionResult
) -> mh.AttentionResult:
    """What plain torch operations make of the call in its dtype (float32 for float64).

    The worst of some orders of the lanes of q.k, which the exact answer does not depend on: on a
    small call one order alone is exact by luck. To it is added what one rounding in float32 of
    every query, key and value, and of the scale of all logits does: no algorithm can promise more
    than the exact answer to a question that is one rounding away.
    """
    query, key, value = (x.float() if x.dtype == torch.float64 else x for x in tensors)
    lanes = torch.arange(query.shape[3])
    some = torch.randperm(len(lanes), generator=torch.Generator().manual_seed(0))
    plain = [
        mh.attention_with_stats(
            query[..., order], key[..., order], value,
            stats=mh.STATISTICS, backend="reference", **options,
        )
        for order in (lanes, lanes.flip(0), some)
    ]  # fmt: skip
    randoms = torch.Generator().manual_seed(1)

    def nudged(x: Tensor) -> Tensor:
        signs = torch.randint(0, 2, x.shape, generator=randoms) * 2 - 1
        return x.double() * (1 + signs * 2.0**-23)

    near = tuple(nudged(x) for x in tensors)
    rounded = exact(near, _scaled(options, 1 + 2**-23, len(lanes)))

    def worst(name: str) -> Tensor:
        want, *found, off = (
            (it.out if name == "out" else it.stats[name]).double()
            for it in (expected, *plain, rounded)
        )
        errors = [(x - want).abs().nan_to_num() for x in found]
        return want + torch.stack(errors).amax(0) + (off - want).abs().nan_to_num()

    stats = {name: worst(name) for name in mh.STATISTICS if name != "argmax"}
    # It is a difference of numbers of the size of 1, so where it is tiny that rounding remains.
    stats["entropy"] = stats["entropy"] + torch.finfo(torch.float32).eps
    return replace(plain[0], out=worst("out"), stats={**stats, "argmax": plain[0].argmax})


def _scaled(options: Options, factor: float, head_dim: int) -> Options:
    """The options of a call whose every logit is `factor` times as large."""
    scaled: Options = {**options, "scale": factor * head_dim**-0.5}
    for name in ("scale", "softcap", "sinks", "bias"):
        given = options.get(name)
        if isinstance(given, mh.ALiBi):
            scaled[name] = mh.ALiBi(given.slopes.double() * factor)
        elif given is not None:
            scaled[name] = factor * (given.double() if isinstance(given, Tensor) else given)
    return scaled


def assert_call(tensors: tuple[Tensor, ...], backend: str, **options: object) -> mh.AttentionResult:
    """Output and every statistic of the call against the definition; returns them."""
    actual = mh.attention_with_stats(*tensors, stats=mh.STATISTICS, backend=backend, **options)
    assert actual.out.dtype == tensors[0].dtype
    expected = exact(tensors, options)
    compare(actual, expected, baseline(tensors, options, expected))
    return actual


def grads(
    tensors: tuple[Tensor, ...], backend: str, dtype: torch.dtype,
    weight: Tensor, stats: tuple[str, ...], options: Options,
) -> Iterator[Tensor]:  # fmt: skip
    """Gradients of query, key and value; `weight` weighs the output, a draw each row of `stats`."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
    result = mh.attention_with_stats(*leaves, stats=DIFFERENTIABLE, backend=backend, **options)
    loss = (result.out.double() * weight).sum()
    per_row = draw(*weight.shape[:3], seed=98, dtype=torch.float64)
    for name in stats:
        row = result.stats[name].double()
        loss = loss + (row.masked_fill(row.isinf(), 0) * per_row).sum()
    yield from torch.autograd.grad(loss, leaves)


def assert_gradients(
    tensors: tuple[Tensor, ...], backend: str = "auto", *,
    weight: Tensor | None = None, stats: tuple[str, ...] = DIFFERENTIABLE, **options: object,
) -> None:  # fmt: skip
    """Gradients of query, key and value against autograd through the definition in float64."""
    query, _, value = tensors
    dtype = query.dtype
    if weight is None:
        weight = draw(*query.shape[:3], value.shape[3], seed=97, dtype=torch.float64)
    single = torch.float32 if dtype == torch.float64 else dtype
    found = grads(tensors, backend, dtype, weight, stats, options)
    wanted = grads(tensors, "reference", torch.float64, weight, stats, options)
    base = grads(tensors, "reference", single, weight, stats, options)
    for name, got, want, near in zip(("query", "key", "value"), found, wanted, base, strict=True):
        assert got.dtype == dtype
        near = float64_baseline(want, near) if dtype == torch.float64 else near
        assert_close(got, want, near, factor=3.0, what=f"gradient of {name}")
