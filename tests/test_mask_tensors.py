"""Tensors as masks and biases: whose axis is which, and what True, 0 and -inf say.

Users of many libraries met masks that were inverted, ignored or read along the wrong axis: a
[B, Lq, Lk] mask lands on the heads when B equals H, a float mask of 0 and 1 is read as bools, and
the sum of two finfo.min planes overflows. Training still runs.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from serving import BACKENDS, FLOATS, assert_call, assert_gradients, draw, draw_qkv, require_serving

N = 3  # batch, heads and queries are as many, so that a wrong axis fits


def per_sample() -> Tensor:
    """A mask for each sample, [B, Lq, Lk], every row with an open key."""
    return (draw(N, N, 4, seed=6) < 0.3) | (torch.arange(4) == 1)


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return draw_qkv((N, N, N, 8), (N, N, 4, 8), 5, dtype=dtype)


def hiding(visible: Tensor) -> Tensor:
    return torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["mask", "bias"])
def test_each_sample_and_head_reads_its_own_plane(
    kind: str, backend: str, dtype: torch.dtype
) -> None:
    """As many samples as heads and queries: each alone gives what it gives in the batch."""
    require_serving(backend, dtype)
    visible = per_sample()
    for axis, whole in enumerate((visible[:, None], visible[None])):
        given = whole if kind == "mask" else hiding(whole)
        out = assert_call(tensors(dtype), backend, **{kind: given}).out
        for i in range(N):
            one = [slice(None)] * 2
            one[axis] = slice(i, i + 1)
            part = visible[i] if kind == "mask" else hiding(visible[i])
            query, key, value = (x[tuple(one)] for x in tensors(dtype))
            alone = mh.attention(query, key, value, backend=backend, **{kind: part})
            atol = 2 * torch.finfo(dtype).eps
            torch.testing.assert_close(out[tuple(one)], alone, rtol=0, atol=atol)


@pytest.mark.parametrize("kind", ["mask", "bias"])
def test_three_dimensions_are_refused_rather_than_guessed(kind: str) -> None:
    """[B, Lq, Lk], [H, Lq, Lk] and [B*H, Lq, Lk] look alike; the message names both remedies."""
    layer = mh.MultiHeadAttention(12, N)
    for planes in (N, 1, N * N):
        visible = torch.ones(planes, N, 4).bool()
        given = visible if kind == "mask" else hiding(visible)
        with pytest.raises(mh.MaskError, match=rf"{kind}\[:, None\].*{kind}\[None\]"):
            mh.attention(*tensors(), **{kind: given})
        with pytest.raises(mh.MaskError, match=rf"{kind}\[:, None\]"):
            layer(torch.zeros(N, 4, 12), **{kind: given[..., :1, :].expand(planes, 4, 4)})
    with pytest.raises(mh.MaskError, match="KeyPadding"):
        mh.attention(*tensors(), mask=torch.ones(4).bool())


def test_a_plane_for_each_sample_and_head_has_four_dimensions() -> None:
    """What torch's module calls [B*H, Lq, Lk] is numbered b * H + h."""
    planes = (draw(N * N, N, 4, seed=7) < 0.3) | (torch.arange(4) == 1)
    query, key, value = tensors()
    out = mh.attention(query, key, value, mask=planes.view(N, N, N, 4))
    for b in range(N):
        for h in range(N):
            one = (slice(b, b + 1), slice(h, h + 1))
            alone = mh.attention(query[one], key[one], value[one], mask=planes[b * N + h])
            torch.testing.assert_close(out[one], alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_dimensions_are_queries_and_keys_whatever_the_batch(backend: str) -> None:
    """[B, Lk] with as many samples as queries: `KeyPadding` says it, a bare tensor does not."""
    require_serving(backend, torch.float32)
    shown = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 0, 0, 1]]).bool()
    padded = assert_call(tensors(), backend, mask=mh.KeyPadding(shown)).out
    same = assert_call(tensors(), backend, mask=shown[:, None, None]).out
    by_row = assert_call(tensors(), backend, mask=shown).out
    assert torch.equal(padded, same)
    assert not torch.allclose(padded, by_row)
    for sample in range(N):
        one = slice(sample, sample + 1)
        query, key, value = (x[one] for x in tensors())
        few = shown[sample]
        alone = mh.attention(query, key[:, :, few], value[:, :, few], backend=backend)
        torch.testing.assert_close(padded[one], alone, rtol=0, atol=1e-6)
    for row in range(N):
        one, few = slice(row, row + 1), shown[row]
        query, key, value = tensors()
        alone = mh.attention(query[:, :, one], key[:, :, few], value[:, :, few], backend=backend)
        torch.testing.assert_close(by_row[:, :, one], alone, rtol=0, atol=1e-6)


SIZES = [(b, h, q, k) for b in (1, N) for h in (1, N) for q in (1, N) for k in (1, 4)]


@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_axis_may_be_broadcast(backend: str, shape: tuple[int, ...]) -> None:
    require_serving(backend, torch.float32)
    visible, bias = draw(*shape, seed=1) < 0.4, draw(*shape, seed=2)
    full = (N, N, N, 4)
    for options, expanded in (
        ({"mask": visible}, {"mask": visible.expand(full).contiguous()}),
        ({"bias": bias}, {"bias": bias.expand(full).contiguous()}),
        ({"bias": bias.masked_fill(~visible, -torch.inf)}, {"bias": bias, "mask": visible}),
    ):
        got = assert_call(tensors(), backend, **options)
        want = mh.attention(*tensors(), backend=backend, **expanded)
        torch.testing.assert_close(got.out, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_gradients_of_a_broadcast_bias_are_summed(shape: tuple[int, ...]) -> None:
    bias = draw(*shape, seed=2, dtype=torch.float64).requires_grad_()
    wide = bias.detach().expand(N, N, N, 4).contiguous().requires_grad_()
    double = tensors(torch.float64)
    weight = draw(N, N, N, 5, seed=3, dtype=torch.float64)
    (small,) = torch.autograd.grad((mh.attention(*double, bias=bias) * weight).sum(), bias)
    (large,) = torch.autograd.grad((mh.attention(*double, bias=wide) * weight).sum(), wide)
    torch.testing.assert_close(small, large.sum_to_size(shape), rtol=0, atol=1e-12)


EYE = torch.eye(3)
LOWEST = torch.finfo(torch.float32).min
ADDED = [[2, 1, 1], [1, 2, 1], [1, 1, 2]]  # e^bias with a bias of ln 2 on the diagonal
OPEN = [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
MEANINGS: dict[str, tuple[dict[str, Tensor], list[list[int]]]] = {
    "bools, True attends": ({"mask": EYE.bool()}, OPEN),
    "bools off the diagonal": ({"mask": ~EYE.bool()}, [[0, 1, 1], [1, 0, 1], [1, 1, 0]]),
    "0 and ln 2 are added": ({"bias": EYE * math.log(2)}, ADDED),
    "0 and 1 are added, not read as bools": ({"bias": 1 + 0 * EYE}, [[1] * 3] * 3),
    "-inf hides": ({"bias": EYE.log()}, OPEN),
    "the lowest float weighs nothing": ({"bias": (1 - EYE) * LOWEST}, OPEN),
    "two planes of the lowest float": ({"bias": (1 - EYE) * LOWEST + (1 - EYE) * LOWEST}, OPEN),
    "a plane that is lowest for every key": ({"bias": torch.full((3, 3), LOWEST)}, [[1] * 3] * 3),
    "bools and floats": (
        {"mask": torch.ones(3, 3).bool().tril(), "bias": torch.ones(3, 3).triu().log()},
        OPEN,
    ),
    "bools and a lowest float": (
        {"mask": torch.ones(3, 3).bool().tril(), "bias": torch.ones(3, 3).tril(-1) * LOWEST},
        OPEN,
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("meaning", MEANINGS)
def test_what_a_value_means(meaning: str, backend: str, dtype: torch.dtype) -> None:
    """With equal scores the weights are the mask's alone."""
    require_serving(backend, dtype)
    options, shares = MEANINGS[meaning]
    zeros, value = torch.zeros(1, 1, 3, 8, dtype=dtype), EYE[None, None].to(dtype)
    out = mh.attention(zeros, zeros, value, backend=backend, **options)[0, 0]
    expected = torch.tensor(shares).double()
    expected /= expected.sum(-1, keepdim=True)
    atol = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("bias_dtype", [*FLOATS, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
def test_a_bias_of_any_float_dtype(dtype: torch.dtype, bias_dtype: torch.dtype) -> None:
    """The lowest finite value of the bias' dtype, too, and never rounded to the query's."""
    bias = draw(N, 4, seed=9).to(bias_dtype)
    bias[0, 1:] = torch.finfo(bias_dtype).min
    bias[1] = torch.finfo(bias_dtype).min
    bias[2, 3] = -torch.inf
    if bias_dtype == torch.float64 and dtype != torch.float64:
        bias = bias.clamp(min=LOWEST)  # beyond float32, in which it is used
    for backend in BACKENDS:
        if mh.explain(*tensors(dtype)).reasons[backend]:
            continue
        out = assert_call(tensors(dtype), backend, bias=bias).out
        assert bool(out.isfinite().all())
    assert_gradients(tensors(dtype), bias=bias)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32], ids=str)
def test_a_mask_of_numbers_is_refused(dtype: torch.dtype) -> None:
    """1 may mean "attend" or "hide", and 0 with 1 may be meant to be added."""
    mask = torch.eye(3, 4).to(dtype)
    with pytest.raises(mh.DtypeError, match="bool tensor"):
        mh.attention(*tensors(), mask=mask)
    layer = mh.MultiHeadAttention(12, N)
    with pytest.raises(mh.DtypeError, match="bool tensor"):
        layer(torch.zeros(N, 4, 12), mask=torch.eye(4).to(dtype))
    with pytest.raises(mh.DtypeError, match="bool tensor"):
        mh.KeyPadding(torch.ones(N, 4).to(dtype))
    with pytest.raises(mh.DtypeError, match="bool tensor"):
        mh.Dense(mask)
    if not dtype.is_floating_point:
        with pytest.raises(mh.DtypeError, match="float tensor"):
            mh.attention(*tensors(), bias=mask)
    with pytest.raises(mh.DtypeError, match="`mask=`"):
        mh.attention(*tensors(), bias=mask.bool())


def test_a_layer_says_attend_where_torch_says_hide() -> None:
    """An asymmetric mask, as bools, as floats, and padding of either kind beside either."""
    module = nn.MultiheadAttention(12, N, batch_first=True).eval()
    layer = mh.MultiHeadAttention.from_torch(module)
    x = draw(N, 4, 12, seed=3)
    visible = torch.ones(4, 4).bool().tril()
    shown = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 1, 1]]).bool()

    def torchs(**options: Tensor) -> Tensor:
        return module(x, x, x, need_weights=True, **options)[0]

    for mask, theirs in (
        (visible, {"attn_mask": ~visible}),
        (mh.Dense(visible) & mh.KeyPadding(shown), {
            "attn_mask": ~visible, "key_padding_mask": ~shown,
        }),
        (mh.Dense(visible) & mh.KeyPadding(shown), {
            "attn_mask": hiding(visible), "key_padding_mask": hiding(shown),
        }),
        (mh.KeyPadding(shown), {"key_padding_mask": ~shown}),
    ):  # fmt: skip
        torch.testing.assert_close(layer(x, mask=mask), torchs(**theirs), rtol=0, atol=1e-5)
    added = draw(4, 4, seed=5)
    torch.testing.assert_close(layer(x, bias=added), torchs(attn_mask=added), rtol=0, atol=1e-5)
    both = layer(x, mask=visible, bias=hiding(shown)[:, None, None])
    padded = torchs(attn_mask=hiding(visible), key_padding_mask=hiding(shown))
    torch.testing.assert_close(both, padded, rtol=0, atol=1e-5)
    assert not torch.allclose(layer(x, mask=~visible | torch.eye(4).bool()), layer(x, mask=visible))
