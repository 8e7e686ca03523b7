"""Rules join, and nothing else that a call asks for changes what they say.

Users of keras, torch and ONNX lost the causal rule, or their own mask, as soon as weights were
asked for, dropout was set, the input had another rank or gradients were off: one path applied the
rule and the other did not, so that future tokens leaked.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from functools import reduce
from operator import and_

import pytest
import torch
from torch import Tensor

import multihead as mh
from serving import BACKENDS, FLOATS, assert_call, assert_gradients, draw, draw_qkv, require_serving

B, H, L = 2, 3, 7
HOLES = (draw(B, H, L, L, seed=8) < 0.4) | torch.eye(L).bool()
SHOWN = torch.tensor([[True] * 6 + [False], [False] + [True] * 6])
IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [2, 2, 2, 2, 2, 5, 5]])

RULES: dict[str, tuple[mh.Mask, Tensor]] = {
    "causal": (mh.Causal(), torch.ones(L, L).bool().tril()),
    "holes": (mh.Dense(HOLES), HOLES),
    "padding": (mh.KeyPadding(SHOWN), SHOWN[:, None, None]),
    "documents": (mh.Documents(IDS), (IDS[:, :, None] == IDS[:, None])[:, None]),
    "window": (mh.Window(3, 2), torch.ones(L, L).bool().triu(-3).tril(2)),
}
SETS = [names for n in range(1, 6) for names in itertools.combinations(RULES, n)]


def rules(names: tuple[str, ...]) -> tuple[mh.Mask, Tensor]:
    """The joined mask, and what it lets in, [B, H, L, L]."""
    masks, visible = zip(*(RULES[name] for name in names), strict=True)
    return reduce(and_, masks), reduce(and_, visible).expand(B, H, L, L)


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return draw_qkv((B, H, L, 8), (B, H, L, 8), 5, dtype=dtype)


def textbook(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    scores = (query @ key.mT / 8**0.5).masked_fill(~visible, -torch.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0) @ value


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("names", SETS, ids="+".join)
def test_a_key_is_visible_only_if_every_rule_lets_it_in(
    names: tuple[str, ...], backend: str
) -> None:
    require_serving(backend, torch.float32)
    mask, visible = rules(names)
    expected = textbook(*tensors(torch.float64), visible)
    hiding = torch.zeros(B, H, L, L).masked_fill(~visible, -torch.inf)
    first, *rest = names
    partly = torch.zeros(B, H, L, L).masked_fill(~rules((first,))[1], -torch.inf)
    spellings: list[dict[str, object]] = [
        {"mask": mask},
        {"mask": reduce(and_, (RULES[name][0] for name in reversed(names)))},
        {"mask": visible},
        {"bias": hiding},
        {"mask": rules(tuple(rest))[0] if rest else None, "bias": partly},
    ]
    for options in spellings:
        result = assert_call(tensors(), backend, **options)
        torch.testing.assert_close(result.out.double(), expected, rtol=0, atol=1e-5)
        weights = result.weights(slice(None), slice(None))
        assert not bool(weights[~visible].any())
        torch.testing.assert_close(weights @ tensors()[2], result.out, rtol=0, atol=1e-5)


ASKED: dict[str, Callable[..., Tensor]] = {
    "nothing more": lambda *qkv, **options: mh.attention(*qkv, **options),
    "no statistics": lambda *qkv, **o: mh.attention_with_stats(*qkv, stats=(), **o).out,
    "every statistic": lambda *qkv, **o: (
        mh.attention_with_stats(*qkv, stats=mh.STATISTICS, **o).out
    ),
    **{
        name: lambda *qkv, name=name, **o: mh.attention_with_stats(*qkv, stats=(name,), **o).out
        for name in mh.STATISTICS
    },
}
MODES: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "grad": contextlib.nullcontext,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_output_does_not_depend_on_what_else_is_asked_for(
    backend: str, dtype: torch.dtype
) -> None:
    """Statistics, recorded gradients and modes of autograd: the same bits."""
    require_serving(backend, dtype)
    for names in SETS[::3]:
        mask, _ = rules(names)
        expected = mh.attention(*tensors(dtype), mask=mask, backend=backend)
        for asked, mode, record in itertools.product(ASKED, MODES, (False, True)):
            leaves = [x.requires_grad_(record) for x in tensors(dtype)]
            with MODES[mode]():
                out = ASKED[asked](*leaves, mask=mask, backend=backend)
            assert torch.equal(out, expected), (names, asked, mode, record)


@pytest.mark.parametrize("names", SETS[::4], ids="+".join)
def test_gradients_follow_every_rule(names: tuple[str, ...]) -> None:
    mask, visible = rules(names)
    for dtype in (*FLOATS, torch.float64):
        assert_gradients(tensors(dtype), mask=mask)
    query, key, value = (x.requires_grad_() for x in tensors())
    out = mh.attention(query, key, value, mask=mask)
    row = torch.autograd.grad(out[0, 0, 2].sum(), value)[0][0, 0].abs().sum(-1)
    assert torch.equal(row > 0, visible[0, 0, 2])


def test_what_is_not_offered_is_refused_rather_than_dropped() -> None:
    query, key, value = tensors()
    with pytest.raises(mh.ArgumentError, match="four dimensions"):
        mh.attention(query[0], key[0], value[0], mask=mh.Causal())
    with pytest.raises(mh.BackendError, match="dropout"):
        mh.attention(query, key, value, mask=mh.Causal(), dropout_p=0.1, backend="native")
    with pytest.raises(TypeError):
        mh.attention(query, key, value, is_causal=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("names", SETS[::2], ids="+".join)
def test_a_layer_has_one_path(names: tuple[str, ...]) -> None:
    """Weights asked for or not, train or eval, gradients or none, watched or not: the same."""
    mask, visible = rules(names)
    layer = mh.MultiHeadAttention(12, H, qkv_bias=True, out_bias=True)
    x = draw(B, L, 12, seed=4)
    hiding = torch.zeros(B, H, L, L).masked_fill(~visible, -torch.inf)
    expected = layer(x, mask=visible).detach()
    modes = {**MODES, "watched": lambda: mh.watch(layer)}
    for training, mode in itertools.product((True, False), modes):
        layer.train(training)
        for options in ({"mask": mask}, {"bias": hiding}):
            with modes[mode]():
                plain = layer(x, **options)
                out, heads = layer.forward_with_stats(x, stats=mh.STATISTICS, **options)
                weights = heads.weights(slice(None), slice(None))
            assert torch.equal(plain, out)
            torch.testing.assert_close(out.detach(), expected, rtol=0, atol=1e-6)
            assert not bool(weights[~visible].any())
    x = x.clone().requires_grad_()
    reached = torch.autograd.grad(layer(x, mask=mask)[0, 3].sum(), x)[0][0].abs().sum(-1) > 0
    by_any_head = visible[0, :, 3].any(0)
    by_any_head[3] = True  # through its own query
    assert torch.equal(reached, by_any_head)
