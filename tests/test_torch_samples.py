"""The samples by which torch tests its own scaled_dot_product_attention, run through ours.

torch.testing lists them with the operator: inputs of three and of four axes, inputs that broadcast,
the causal flag and an additive mask. Ours take four axes and broadcast nothing, so these are made
explicit; what has no counterpart is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import multihead as mh
from close import assert_close
from serving import BACKENDS, require_serving

pytest.importorskip("expecttest", reason="torch's own samples need it")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# Of 25 samples in torch 2.13: twelve drop out half of the weights.
SAMPLES, DROPPED_OUT = 25, 12


@dataclass(frozen=True)
class Sample:
    """One of torch's calls: its tensors and arguments as torch takes them."""

    tensors: tuple[Tensor, Tensor, Tensor]
    arguments: dict[str, object]

    def torchs(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """By the textbook's operations, one after the other, in the tensors' dtype."""
        given = dict(self.arguments)
        if isinstance(given.get("attn_mask"), Tensor):
            mask = given["attn_mask"]
            given["attn_mask"] = mask if mask.dtype == torch.bool else mask.to(tensors[0].dtype)
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(*tensors, **given)

    def ours(self, tensors: tuple[Tensor, ...], backend: str) -> Tensor:
        """By multihead, in the shape that torch returns."""
        given = dict(self.arguments)
        assert given.pop("dropout_p", 0.0) == 0.0
        options: dict[str, object] = {"scale": given.pop("scale", None)}
        mask = given.pop("attn_mask", None)
        if isinstance(mask, Tensor):
            options["mask" if mask.dtype == torch.bool else "bias"] = mask
        if given.pop("is_causal", False):
            options["mask"] = mh.Causal() & mh.QueryStart(0)
        given.pop("enable_gqa", None)
        assert not given, f"arguments without a counterpart: {list(given)}"
        out = mh.attention(*_four_axes(tensors), backend=backend, **options)
        return out[:, 0] if max(x.ndim for x in tensors) == 3 else out


def _four_axes(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Inputs [B, H, L, D] that no longer broadcast; [B, L, D] is one head."""
    if max(x.ndim for x in tensors) == 3:
        return [x[:, None] for x in tensors]
    widened = [x if x.ndim == 4 else x[None] for x in tensors]
    batch = max(x.shape[0] for x in widened)
    return [x.expand(batch, -1, -1, -1) for x in widened]


def samples(dtype: torch.dtype, requires_grad: bool = False) -> Iterator[Sample]:
    """Every sample that torch has, its reference inputs too if there are any."""
    from torch.testing._internal.common_methods_invocations import op_db

    (operator,) = (it for it in op_db if it.name == "nn.functional.scaled_dot_product_attention")
    assert operator.error_inputs_func is None, "there are error inputs now: test them as well"
    torch.manual_seed(0)
    for given in operator.reference_inputs("cpu", dtype, requires_grad=requires_grad):
        yield Sample((given.input, *given.args), dict(given.kwargs))


def supported(dtype: torch.dtype) -> list[Sample]:
    """Those without dropout."""
    every = list(samples(dtype))
    kept = [it for it in every if it.arguments.get("dropout_p", 0.0) == 0.0]
    print(f"{len(kept)} of torch's {len(every)} samples; {len(every) - len(kept)} with dropout")
    assert len(every) >= SAMPLES
    assert len(every) - len(kept) == DROPPED_OUT
    return kept


def by_formula(sample: Sample, weight: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradients of its sum under `weight`, in extended precision.

    float64 results need an answer that is more exact than they are.
    """
    query, key, value = (x.double().numpy().astype(np.longdouble) for x in sample.tensors)
    scale = 1 / np.sqrt(np.longdouble(query.shape[-1]))
    scores = scale * query @ np.swapaxes(key, -1, -2)
    if sample.arguments.get("is_causal"):
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    if isinstance(mask := sample.arguments.get("attn_mask"), Tensor):
        scores = scores + mask.double().numpy()
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    grad_out = weight.numpy().astype(np.longdouble)
    grad_weights = grad_out @ np.swapaxes(value, -1, -2)
    mean = (weights * grad_weights).sum(-1, keepdims=True)
    grad_scores = scale * weights * (grad_weights - mean)
    grads = (
        grad_scores @ key,
        np.swapaxes(grad_scores, -1, -2) @ query,
        np.swapaxes(weights, -1, -2) @ grad_out,
    )
    rounded = (torch.from_numpy(grad.astype(np.float64)) for grad in grads)
    summed = [x.sum_to_size(y.shape) for x, y in zip(rounded, sample.tensors, strict=True)]
    return torch.from_numpy((weights @ value).astype(np.float64)), summed


def weight_of(sample: Sample) -> Tensor:
    shape = sample.torchs(sample.tensors).shape
    return torch.linspace(-1, 2, shape.numel(), dtype=torch.float64).view(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs(backend: str, dtype: torch.dtype) -> None:
    require_serving(backend, dtype)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for sample in supported(dtype):
        exact, _ = by_formula(sample, weight_of(sample))
        double = sample.torchs(tuple(x.double() for x in sample.tensors))
        torch.testing.assert_close(exact, double, rtol=0, atol=1e-12)
        ours = sample.ours(sample.tensors, backend)
        assert ours.shape == exact.shape
        assert ours.dtype == dtype
        found.append((ours, exact, sample.torchs(sample.tensors)))
    assert_close(*together(found))


def together(found: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Of all samples: on a single one of a few numbers torch is exact by luck."""
    columns = zip(*found, strict=True)
    ours, exact, plain = (torch.cat([x.flatten() for x in column]) for column in columns)
    return ours, exact, plain


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients(dtype: torch.dtype) -> None:
    found: list[list[tuple[Tensor, Tensor, Tensor]]] = [[], [], []]
    for sample in supported(dtype):
        weight = weight_of(sample)

        def gradients(
            compute: Callable[[tuple[Tensor, ...]], Tensor], weight: Tensor = weight,
            tensors: tuple[Tensor, ...] = sample.tensors,
        ) -> list[Tensor]:  # fmt: skip
            leaves = tuple(x.detach().clone().requires_grad_() for x in tensors)
            return list(torch.autograd.grad((compute(leaves).double() * weight).sum(), leaves))

        ours = gradients(partial(sample.ours, backend="auto"))
        exact, plain = by_formula(sample, weight)[1], gradients(sample.torchs)
        for i, triple in enumerate(zip(ours, exact, plain, strict=True)):
            assert triple[0].shape == triple[1].shape
            assert triple[0].dtype == dtype
            found[i].append(triple)
    for name, each in zip(("query", "key", "value"), found, strict=True):
        assert_close(*together(each), factor=3.0, what=f"gradient of {name}")


def test_what_torch_drops_out_the_definition_drops_too() -> None:
    dropping = [it for it in samples(torch.float32) if it.arguments["dropout_p"]]
    assert dropping
    for sample in dropping:
        outs = []
        for backend, dtype in (("auto", None), ("reference", torch.float64), ("reference", None)):
            torch.manual_seed(5)
            tensors = [x.to(dtype) for x in _four_axes(sample.tensors)]
            p = sample.arguments["dropout_p"]
            outs.append(mh.attention(*tensors, dropout_p=p, backend=backend))
        assert_close(*outs)
