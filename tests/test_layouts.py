"""Memory layout never changes a result, nor a gradient.

Users of torch and of kernels met wrong numbers without a warning where the last axis was strided,
keys were expanded with stride 0, or the gradient that comes back had another layout.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import multihead as mh
from serving import BACKENDS, FLOATS, assert_call, draw, draw_qkv, require_serving

Layout = Callable[[Tensor], Tensor]
NAN = float("nan")


def _among_nan(x: Tensor, axis: int, step: int = 2) -> Tensor:
    """Every step-th element along `axis` of a tensor of NaN."""
    shape = [step * n if i == axis else n for i, n in enumerate(x.shape)]
    wide = torch.full(shape, NAN, dtype=x.dtype)
    view = wide[tuple(slice(None, None, step) if i == axis else slice(None) for i in range(4))]
    return view.copy_(x)


def _packed(x: Tensor) -> Tensor:
    """A slice of a packed projection [B, L, 3, H, D], not on a vector's boundary."""
    batch, heads, length, width = x.shape
    wide = torch.full((batch, length, 3, heads, width), NAN, dtype=x.dtype)
    return wide[:, :, 1].transpose(1, 2).copy_(x)


def _odd_offset(x: Tensor) -> Tensor:
    """Starts one element into its storage, and has one element between its rows."""
    *outer, width = x.shape
    wide = torch.full((*outer, width + 1), NAN, dtype=x.dtype)
    return wide[..., 1:].copy_(x)


# These hold the same values.
LAYOUTS: dict[str, Layout] = {
    "length before heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "width before length": lambda x: x.mT.contiguous().mT,
    "batch last": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "every second batch": lambda x: _among_nan(x, 0),
    "every second head": lambda x: _among_nan(x, 1),
    "every second row": lambda x: _among_nan(x, 2),
    "every second lane": lambda x: _among_nan(x, 3),
    "every third lane": lambda x: _among_nan(x, 3, 3),
    "sliced from packed projections": _packed,
    "an odd offset": _odd_offset,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
}
# These hold one slice's values, read again and again with a stride of 0.
EXPANDED: dict[str, Layout] = {
    "over batch and heads": lambda x: x[:1, :1].expand_as(x),
    "over heads": lambda x: x[:, :1].expand_as(x),
    "over rows": lambda x: x[:, :, :1].expand_as(x),
    "over width": lambda x: x[..., :1].expand_as(x),
    "over everything": lambda x: x[:1, :1, :1, :1].expand_as(x),
}
ODD = {"query": 0, "key": 1, "value": 2}
OPERANDS = [*ODD, "all"]
SHAPES = [((2, 4, 5, 8), (2, 2, 7, 8), 6), ((2, 2, 37, 33), (2, 2, 70, 33), 16)]


def arranged(tensors: tuple[Tensor, ...], layout: Layout, operand: str) -> list[Tensor]:
    return [layout(x) if operand in ("all", name) else x
            for name, x in zip(ODD, tensors, strict=True)]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [*LAYOUTS, *EXPANDED])
def test_a_layout_equals_the_contiguous_copy(name: str, backend: str, dtype: torch.dtype) -> None:
    """One operand odd at a time, then all of them."""
    require_serving(backend, dtype)
    layout = {**LAYOUTS, **EXPANDED}[name]
    for query, key, value_dim in SHAPES:
        for operand in OPERANDS:
            tensors = draw_qkv(query, key, value_dim, dtype=dtype)
            odd = arranged(tensors, layout, operand)
            copies = tuple(x.contiguous().clone() for x in odd)
            result = assert_call(copies, backend, mask=mh.Causal())
            out = mh.attention(*odd, mask=mh.Causal(), backend=backend)
            if backend == "native":
                assert torch.equal(out, result.out), operand
            else:
                atol = 4 * torch.finfo(dtype).eps
                torch.testing.assert_close(out, result.out, rtol=0, atol=atol)


def gradients(leaves: list[Tensor], tensors: list[Tensor], grad_out: Tensor) -> list[Tensor]:
    out = mh.attention(*tensors, mask=mh.Causal())
    return list(torch.autograd.grad(out, leaves, grad_out))


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("name", [*LAYOUTS, *EXPANDED])
def test_gradients_are_summed_back_to_their_base(name: str, operand: str) -> None:
    layout = {**LAYOUTS, **EXPANDED}[name]
    for query, key, value_dim in SHAPES:
        tensors = draw_qkv(query, key, value_dim, dtype=torch.float64)
        leaves = [x.clone().requires_grad_() for x in tensors]
        if name in LAYOUTS:
            odd = arranged(tensors, layout, operand)
            tensors_of = [x.detach().requires_grad_() for x in odd]
            bases = tensors_of
        else:
            bases, tensors_of = leaves, arranged(tuple(leaves), layout, operand)
        copies = [x.detach().contiguous().clone().requires_grad_() for x in tensors_of]
        shape = (*query[:3], value_dim)
        grad_outs: dict[str, Tensor] = {
            "contiguous": draw(*shape, seed=8, dtype=torch.float64),
            "expanded": torch.ones((), dtype=torch.float64).expand(shape),
            "width before length": draw(*shape, seed=8, dtype=torch.float64).mT.contiguous().mT,
            "every second lane": _among_nan(draw(*shape, seed=8, dtype=torch.float64), 3),
        }
        for kind, grad_out in grad_outs.items():
            got = gradients(bases, tensors_of, grad_out)
            wanted = gradients(copies, copies, grad_out.contiguous())
            for i, (grad, want) in enumerate(zip(got, wanted, strict=True)):
                if name in EXPANDED and operand in ("all", list(ODD)[i]):
                    kept = [1 if stride == 0 else n for n, stride in
                        zip(want.shape, tensors_of[i].stride(), strict=True)]  # fmt: skip
                    summed = want.sum_to_size(kept)
                    grad, rest = grad[tuple(slice(n) for n in kept)], grad
                    assert int((rest != 0).sum()) <= summed.numel()
                    want = summed
                torch.testing.assert_close(grad, want, rtol=1e-10, atol=1e-10, msg=kind)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (3,), (0, 1), (2, 3), (0, 1, 2, 3)], ids=str)
def test_masks_and_biases_of_any_layout(axes: tuple[int, ...], backend: str) -> None:
    """Expanded over rows, over columns, over both; transposed; strided among other values."""
    require_serving(backend, torch.float32)
    tensors = draw_qkv((2, 4, 5, 8), (2, 2, 7, 8), 6)
    shape = [1 if axis in axes else n for axis, n in enumerate((2, 4, 5, 7))]
    shown, added = draw(*shape, seed=3) < 0.5, draw(*shape, seed=4)
    shown = shown.expand(2, 4, 5, 7)
    added = added.expand(2, 4, 5, 7)
    full = {"mask": shown.contiguous(), "bias": added.contiguous()}
    expected = assert_call(tensors, backend, **full).out
    for arrange in (
        lambda x: x,
        lambda x: x.contiguous().mT.contiguous().mT,
        lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        lambda x: x.repeat_interleave(2, -1)[..., ::2],
        lambda x: torch.cat((x[..., :1], x), -1)[..., 1:],
    ):
        options = {"mask": arrange(shown), "bias": arrange(added)}
        out = mh.attention(*tensors, backend=backend, **options)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_small_operands_of_any_layout(backend: str) -> None:
    """Sinks, slopes, lengths, padding, ids and positions that are slices of something else."""
    require_serving(backend, torch.float32)
    tensors = draw_qkv((2, 4, 7, 8), (2, 2, 7, 8), 6)

    def strided(x: Tensor) -> Tensor:
        return x.repeat_interleave(3, -1)[..., ::3]

    def turned(x: Tensor) -> Tensor:
        return x.T.contiguous().T

    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [2, 2, 2, 2, 2, 5, 5]])
    shown, lengths = ids != 1, torch.tensor([0, 7])
    heads, sizes = torch.tensor([0.5, 0.25, 2.0, 1.0]), torch.tensor([5, 7, 1, 2])
    for f in (strided, turned):
        for odd, even in (
            (mh.KeyPadding(f(shown)) & mh.Causal(), mh.KeyPadding(shown) & mh.Causal()),
            (mh.Documents(f(ids)), mh.Documents(ids)),
            (mh.Causal() & mh.Positions(f(ids), f(ids)), mh.Causal() & mh.Positions(ids, ids)),
            (mh.KeyLengths(strided(lengths)), mh.KeyLengths(lengths)),
            (mh.Window(strided(sizes), 0), mh.Window(sizes, 0)),
        ):
            given = {"sinks": strided(heads), "bias": mh.ALiBi(strided(heads))}
            got = mh.attention(*tensors, mask=odd, backend=backend, **given)
            plain = {"sinks": heads, "bias": mh.ALiBi(heads)}
            assert torch.equal(mh.attention(*tensors, mask=even, backend=backend, **plain), got)


def test_a_layer_reads_inputs_of_any_layout() -> None:
    layer = mh.MultiHeadAttention(12, 4, num_kv_heads=2)
    x = draw(2, 7, 12, seed=1)
    expected = layer(x, mask=mh.Causal())
    for odd in (
        x.transpose(0, 1).contiguous().transpose(0, 1),
        x.mT.contiguous().mT,
        torch.cat((x, x), -1)[..., :12],
        x.repeat_interleave(2, -1)[..., ::2],
    ):
        torch.testing.assert_close(layer(odd, mask=mh.Causal()), expected, rtol=0, atol=1e-6)
    alike = x[:1].expand(2, -1, -1)
    out = layer(alike, mask=mh.Causal())
    torch.testing.assert_close(out[0], out[1], rtol=0, atol=1e-6)
