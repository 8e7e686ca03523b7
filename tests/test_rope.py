"""Rotary positions: which lanes turn, by which angles, in which arithmetic."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import multihead as mh
from close import assert_close
from requires import require
from test_onnx import split_heads, to_tensor

SCALINGS = {
    "default": None,
    "linear": mh.LinearScaling(3.0),
    "ntk": mh.NTKScaling(3.0),
    "dynamic": mh.DynamicNTKScaling(2.0, 16),
    "yarn": mh.YaRNScaling(8.0, 64),
    "longrope": mh.LongRoPEScaling((1.0, 1.5, 2.0, 2.5), [1, 4, 9, 16], 16, 8.0),
    "llama3": mh.Llama3Scaling(8.0, 64),
}
HALF_SPLIT_TO_INTERLEAVED = [0, 2, 4, 6, 1, 3, 5, 7]


def turned(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """The definition: each pair of lanes by its angle [L, r], in float64."""
    x, out = x.double(), x.double().clone()
    half = angles.shape[-1]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        cos, sin = angles[:, i].cos(), angles[:, i].sin()
        out[..., a] = x[..., a] * cos - x[..., b] * sin
        out[..., b] = x[..., b] * cos + x[..., a] * sin
    return out


def test_two_lanes_by_hand() -> None:
    x = torch.tensor([[[[3.0, 5.0]] * 3]])
    want = [[3.0, 5.0]]
    for angle in (1.0, 7.0):
        cos, sin = math.cos(angle), math.sin(angle)
        want.append([3 * cos - 5 * sin, 5 * cos + 3 * sin])
    for interleaved in (False, True):
        got = mh.apply_rope(x, torch.tensor([0, 1, 7]), interleaved=interleaved)
        torch.testing.assert_close(got[0, 0], torch.tensor(want), rtol=0, atol=2e-6)
        assert torch.equal(got[0, 0, 0], x[0, 0, 0])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_definition(dtype: torch.dtype, rotary_dim: int | None, interleaved: bool) -> None:
    x = torch.randn(2, 3, 5, 22, dtype=torch.float64).to(dtype)
    positions = torch.tensor([0, 1, 7, 1000, 30011])
    width = rotary_dim or 22
    frequencies = 1 / 10000 ** (torch.arange(0, width, 2).float() / width)
    angles = (positions.float()[:, None] * frequencies).double()
    want = turned(x, angles, interleaved)
    rope = mh.RoPE(rotary_dim=rotary_dim, interleaved=interleaved)
    got = rope.rotation(positions, 22).apply(x)
    assert got.dtype == dtype
    # Plain torch: float32 cosines, and everything after them in the dtype.
    plain = turned(x, angles.float().double(), interleaved).to(dtype)
    if dtype == torch.float64:
        cosines = torch.complex(angles.float().cos(), angles.float().sin()).angle().double()
        plain = turned(x, cosines, interleaved)
    assert_close(got, want, plain)
    assert torch.equal(got[..., width:], x[..., width:])


def test_half_precision_is_rounded_once() -> None:
    x = torch.randn(1, 2, 300, 16).bfloat16()
    for interleaved in (False, True):
        rotation = mh.RoPE(interleaved=interleaved).rotation(torch.arange(300) + 5000, 16)
        assert torch.equal(rotation.apply(x), rotation.apply(x.float()).bfloat16())


def test_one_convention_is_a_permutation_of_the_other() -> None:
    x = torch.randn(1, 2, 3, 8)
    positions = torch.tensor([0, 1, 7])
    half_split = mh.apply_rope(x, positions)
    shuffled = mh.apply_rope(
        x[..., _inverse(HALF_SPLIT_TO_INTERLEAVED)], positions, interleaved=True
    )
    torch.testing.assert_close(
        shuffled[..., HALF_SPLIT_TO_INTERLEAVED], half_split, rtol=0, atol=1e-6
    )


def _inverse(order: list[int]) -> list[int]:
    return [order.index(i) for i in range(len(order))]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("start", [0, 11, 2**24, 2**24 + 1, 2**31, 2**40])
def test_products_depend_on_distance_alone(start: int, interleaved: bool) -> None:
    query, key = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)

    def product(m: int, n: int) -> float:
        rope = mh.RoPE(interleaved=interleaved)
        q = rope.rotation(torch.tensor([m]), 16).apply(query)
        k = rope.rotation(torch.tensor([n]), 16).apply(key)
        return float((q * k).sum())

    # float64's own rounding of the angle, beside float32's rounding of cosine and sine.
    bound = 2e-6 + start * 2.0**-50
    assert product(start + 8, start + 5) == pytest.approx(product(3, 0), abs=bound)


def test_angles_are_those_of_float32_as_far_as_it_counts() -> None:
    """Up to 2^24 the bits that models were trained with; beyond, neighbors stay apart."""
    positions = torch.tensor([0, 3, 4097, 131071, 2**24 - 1, 2**24])
    rotation = mh.RoPE(500000.0).rotation(positions, 64)
    frequencies = 1.0 / 500000.0 ** (torch.arange(0, 64, 2).float() / 64)
    angles = positions.float()[:, None] * frequencies
    torch.testing.assert_close(rotation.cos[0, 0], angles.double().cos().float(), rtol=0, atol=0)
    torch.testing.assert_close(rotation.sin[0, 0], angles.double().sin().float(), rtol=0, atol=0)
    far = mh.RoPE().rotation(torch.tensor([2**24, 2**24 + 1, 2**24 + 2]), 2)
    want = torch.tensor([math.cos(2**24 + i) for i in range(3)])
    torch.testing.assert_close(far.cos.flatten(), want, rtol=0, atol=1e-7)


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_every_kind_of_integer(kind: torch.dtype) -> None:
    x = torch.randn(1, 2, 3, 4)
    positions = torch.tensor([0, 1, 7])
    assert torch.equal(mh.apply_rope(x, positions.to(kind)), mh.apply_rope(x, positions))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [6, 8, 16, 64])
def test_a_token_is_turned_alike_wherever_it_lies(width: int, interleaved: bool) -> None:
    """Bit for bit, whatever the batch, the heads and the tokens around it."""
    x = torch.randn(2, 3, 5, width)
    positions = torch.stack((torch.arange(5), torch.arange(5) * 3 + 2))
    both = mh.apply_rope(x, positions, interleaved=interleaved)
    for row in range(2):
        for token in range(5):
            alone = x[row : row + 1, 1:2, token : token + 1].clone()
            got = mh.apply_rope(alone, positions[row, token : token + 1], interleaved=interleaved)
            assert torch.equal(got, both[row : row + 1, 1:2, token : token + 1])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [8, 32])
def test_any_strides(width: int, interleaved: bool) -> None:
    positions = torch.tensor([4, 5, 9])
    x = torch.randn(2, 3, 5, width)  # [B, L, H, D]
    want = mh.apply_rope(x.transpose(1, 2).contiguous(), positions, interleaved=interleaved)
    wide = torch.randn(2 * 3 * 5 * 67 + 1)
    odd = wide[1:].view(2, 3, 5, 67)[..., 3 : 3 + width]  # odd strides and an odd offset
    odd.copy_(x)
    apart = torch.empty(2, 3, 5, 2 * width)[..., ::2]
    apart.copy_(x)
    expanded = x[:1, :, :1].expand(2, 3, 5, width)
    for view in (x, odd, apart):
        got = mh.apply_rope(view.transpose(1, 2), positions, interleaved=interleaved)
        assert torch.equal(got, want)
    got = mh.apply_rope(expanded.transpose(1, 2), positions, interleaved=interleaved)
    plain = mh.apply_rope(expanded.transpose(1, 2).clone(), positions, interleaved=interleaved)
    assert torch.equal(got, plain)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [6, 16])
@pytest.mark.parametrize("rotary_dim", [None, 4])
def test_derivatives(width: int, interleaved: bool, rotary_dim: int | None) -> None:
    x = torch.randn(2, 1, 3, width, dtype=torch.float64, requires_grad=True)
    rope = mh.RoPE(rotary_dim=rotary_dim, interleaved=interleaved)
    rotation = rope.rotation(torch.tensor([0, 1, 7]), width)
    assert torch.autograd.gradcheck(rotation.apply, (x,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(rotation.apply, (x,))
    each = torch.func.vmap(lambda row: rotation.apply(row[None])[0])(x)
    assert torch.equal(each, rotation.apply(x))
    assert torch.equal(x, x.detach().clone())


@pytest.mark.parametrize("interleaved", [False, True])
def test_input_is_left_alone(interleaved: bool) -> None:
    x = torch.randn(1, 2, 3, 8)
    kept = x.clone()
    mh.apply_rope(x, torch.tensor([4, 5, 9]), interleaved=interleaved)
    assert torch.equal(x, kept)


def test_what_the_kernel_must_not_hide() -> None:
    """Autograd, modes and other kinds of tensors see torch's own operations."""
    require("native")
    x, rotation = torch.randn(1, 2, 3, 8), mh.RoPE().rotation(torch.arange(3), 8)
    want = rotation.apply(x)
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = rotation.apply(mode.from_tensor(x))
    assert fake.shape == x.shape
    assert mh.RoPE().rotation(torch.arange(3, device="meta"), 8).apply(x.to("meta")).is_meta
    leaf = x.clone().requires_grad_()
    assert rotation.apply(leaf).requires_grad
    with torch.no_grad():
        assert not rotation.apply(leaf).requires_grad
    negated = torch._neg_view(x)
    torch.testing.assert_close(rotation.apply(negated), -want)
    wide = mh.Rotation(rotation.cos.double(), rotation.sin.double(), 8)
    torch.testing.assert_close(wide.apply(x), want)
    strided = rotation.cos.mT.contiguous().mT
    torch.testing.assert_close(mh.Rotation(strided, rotation.sin, 8).apply(x), want)
    nan = x.clone()
    nan[0, 1, 2, 3] = torch.nan
    expected = torch.zeros(8, dtype=torch.bool)
    expected[[3, 7]] = True
    assert torch.equal(rotation.apply(nan).isnan()[0, 1, 2], expected)


def test_empty() -> None:
    positions = torch.empty(0, dtype=torch.int64)
    for scaling in SCALINGS.values():
        rotation = mh.RoPE(scaling=scaling).rotation(positions, 8)
        assert rotation.apply(torch.empty(2, 3, 0, 8)).shape == (2, 3, 0, 8)


def test_dynamic_ntk_forgets() -> None:
    rope = mh.RoPE(scaling=mh.DynamicNTKScaling(2.0, 16))
    x = torch.randn(1, 2, 64, 8)
    first = rope.rotation(torch.arange(8), 8).apply(x[:, :, :8])
    long = rope.rotation(torch.arange(64), 8).apply(x)
    again = rope.rotation(torch.arange(8), 8).apply(x[:, :, :8])
    assert torch.equal(first, again)
    assert torch.equal(first, mh.apply_rope(x[:, :, :8], torch.arange(8)))
    assert not torch.equal(long[:, :, :8], first)


def test_dynamic_ntk_of_a_row_does_not_depend_on_its_batch() -> None:
    rope = mh.RoPE(scaling=mh.DynamicNTKScaling(2.0, 16))
    x = torch.randn(2, 2, 8, 8)
    positions = torch.stack((torch.arange(8), torch.arange(8) + 56))
    both = rope.rotation(positions, 8).apply(x)
    for row in range(2):
        alone = rope.rotation(positions[row], 8).apply(x[row : row + 1])
        assert torch.equal(both[row : row + 1], alone)


def test_longrope_of_a_row_goes_by_its_own_length() -> None:
    rope = mh.RoPE(scaling=SCALINGS["longrope"])
    plain = mh.RoPE().frequencies(torch.arange(1), 8)
    positions = torch.stack((torch.arange(9) + 7, torch.arange(9) + 8))
    short, long = rope.frequencies(positions, 8)[:, 0]
    torch.testing.assert_close(short, plain / torch.tensor([1.0, 1.5, 2.0, 2.5]))
    torch.testing.assert_close(long, plain / torch.tensor([1.0, 4.0, 9.0, 16.0]))
    rotation = rope.rotation(positions, 8)
    assert rotation.cos.amax() == pytest.approx((1 + 3 / 4) ** 0.5)  # ln 8 / ln 16


def test_ntk_slows_the_slowest_lane_by_its_factor() -> None:
    plain = mh.RoPE().frequencies(torch.arange(1), 64)
    scaled = mh.RoPE(scaling=mh.NTKScaling(4.0)).frequencies(torch.arange(1), 64)
    assert scaled[0] == plain[0]
    torch.testing.assert_close(scaled[-1], plain[-1] / 4)
    # What dynamic scaling reaches when factor * length / limit - (factor - 1) is 4.
    dynamic = mh.RoPE(scaling=mh.DynamicNTKScaling(3.0, 16))
    torch.testing.assert_close(dynamic.frequencies(torch.tensor([31]), 64).flatten(), scaled)


@pytest.mark.parametrize(("scaling", "interleaved"), [("yarn", False), ("dynamic", True)])
def test_compile_in_one_graph(scaling: str, interleaved: bool) -> None:
    rope = mh.RoPE(rotary_dim=4, interleaved=interleaved, scaling=SCALINGS[scaling])

    def turn(x: Tensor, positions: Tensor, shared: mh.Rotation) -> tuple[Tensor, Tensor]:
        return rope.rotation(positions, x.shape[-1]).apply(x), shared.apply(x)

    torch._dynamo.reset()
    graphs = CompileCounter()
    run = torch.compile(turn, fullgraph=True, dynamic=True, backend=graphs)
    for length in (5, 7, 29):
        x, positions = torch.randn(2, 3, length, 8), torch.arange(length) + 2
        shared = rope.rotation(positions, 8)
        for got in run(x, positions, shared):
            torch.testing.assert_close(got, shared.apply(x))
    assert graphs.frame_count == 1


@pytest.mark.proof
@pytest.mark.parametrize("interleaved", [False, True])
def test_compile_with_inductor(interleaved: bool) -> None:
    rope = mh.RoPE(interleaved=interleaved)

    def loss(x: Tensor, positions: Tensor) -> Tensor:
        return rope.rotation(positions, x.shape[-1]).apply(x).square().cumsum(-1).sum()

    torch._dynamo.reset()
    x, positions = torch.randn(2, 3, 7, 16), torch.arange(7) * 1000
    grads = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*complex.*")
        for run in (loss, torch.compile(loss, fullgraph=True, dynamic=True)):
            leaf = x.clone().requires_grad_()
            run(leaf, positions).backward()
            grads.append(leaf.grad)
    torch.testing.assert_close(grads[0], grads[1])


def test_export_with_a_changing_length() -> None:
    class Turn(torch.nn.Module):
        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            return mh.apply_rope(x, positions)

    length = torch.export.Dim("length", min=2, max=64)
    shapes = {"x": {2: length}, "positions": {0: length}}
    arguments = torch.randn(1, 2, 5, 8), torch.arange(5)
    program = torch.export.export(Turn(), arguments, dynamic_shapes=shapes)
    x, positions = torch.randn(1, 2, 11, 8), torch.arange(11)
    torch.testing.assert_close(program.module()(x, positions), mh.apply_rope(x, positions))


WRONG: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: mh.RoPE(rotary_dim=5), ValueError, "rotary_dim must be even"),
    (lambda: mh.RoPE(rotary_dim=0), ValueError, "rotary_dim must be at least 1"),
    (lambda: mh.RoPE(rotary_dim=4.0), TypeError, "rotary_dim must be an integer"),
    (lambda: mh.RoPE(base=0), ValueError, "base must be a number above 1"),
    (lambda: mh.RoPE(base="10000"), ValueError, "base must be a number above 1"),
    (lambda: mh.RoPE(scaling={"factor": 2}), TypeError, "from_config"),
    (lambda: mh.RoPE().rotation(torch.arange(3), 7), ValueError, "head_dim must be even"),
    (lambda: mh.RoPE(rotary_dim=8).rotation(torch.arange(3), 6), ValueError, "only head_dim=6"),
    (lambda: mh.RoPE().rotation(torch.arange(3.0), 8), TypeError, "integer tensor"),
    (lambda: mh.RoPE().rotation(torch.ones(3, dtype=torch.bool), 8), TypeError, "integer tensor"),
    (lambda: mh.RoPE().rotation(range(3), 8), TypeError, "got range"),
    (lambda: mh.RoPE().rotation(torch.zeros(1, 1, 3).long(), 8), ValueError, r"\(1, 1, 3\)"),
    (lambda: mh.apply_rope(torch.ones(1, 2, 3, 8), torch.arange(4)), ValueError, r"\[1, 2, 3, 8\]"),
    (lambda: mh.apply_rope(torch.ones(2, 3, 8), torch.arange(3)), ValueError, "B, H, L, D"),
    (lambda: mh.apply_rope(torch.ones(1, 2, 3, 8).long(), torch.arange(3)), TypeError, "float"),
    (lambda: mh.apply_rope(torch.ones(3, 2, 4, 8), torch.ones(2, 4).long()), ValueError, "got"),
    (lambda: mh.RoPE().rotation(torch.arange(3), 4).apply(torch.ones(1, 2, 3, 8)), ValueError, "4"),
    (lambda: mh.LinearScaling(0.5), ValueError, "factor must be at least 1"),
    (lambda: mh.LinearScaling("2"), TypeError, "factor must be a number"),
    (lambda: mh.DynamicNTKScaling(2.0, 0), ValueError, "max_length must be at least 1"),
    (lambda: mh.YaRNScaling(2.0, 64, beta_fast=1, beta_slow=2), ValueError, "beta_fast"),
    (lambda: mh.LongRoPEScaling((1.0, 0.0), (1.0, 2.0), 64), ValueError, "short_factor must hold"),
    (lambda: mh.LongRoPEScaling((1.0,), 2.0, 64), TypeError, "long_factor must be a list"),
    (lambda: mh.LongRoPEScaling((1.0,), ("2",), 64), TypeError, "long_factor must be a number"),
    (
        lambda: mh.RoPE(scaling=SCALINGS["longrope"]).rotation(torch.arange(2), 16),
        ValueError,
        "short_factor must have a number for each of the 8 pairs of lanes that turn; it has 4",
    ),
    (lambda: mh.Llama3Scaling(2.0, 64, low_freq_factor=4.0), ValueError, "high_freq_factor"),
    (
        lambda: mh.RoPE(scaling=mh.NTKScaling(2.0)).rotation(torch.arange(2), 2),
        ValueError,
        "rotary_dim of at least 4",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "words"), WRONG, ids=range(len(WRONG)))
def test_refused(call: Callable[[], Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        call()
    assert isinstance(caught.value, mh.MultiheadError)


def rotary_cases() -> list[Any]:
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = [case for case in collect_testcases(None) if case.model is not None]
    return [c for c in cases if [n.op_type for n in c.model.graph.node] == ["RotaryEmbedding"]]


ONNX = rotary_cases()


def test_every_onnx_case_is_here() -> None:
    assert len(ONNX) == 8


@pytest.mark.parametrize("case", ONNX, ids=lambda case: case.name)
def test_onnx(case: Any) -> None:
    """The operator takes tables of cosines and sines: a Rotation holds the rows it picks."""
    node = case.model.graph.node[0]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    for arrays, (expected,) in case.data_sets:
        x, cos, sin, *positions = map(to_tensor, arrays)
        if positions:
            cos, sin = cos[positions[0]], sin[positions[0]]
        heads = split_heads(x, attributes.get("num_heads"))
        rotation = mh.Rotation(
            cos[:, None], sin[:, None], heads.shape[-1], bool(attributes.get("interleaved"))
        )
        got = rotation.apply(heads)
        got = got if x.ndim == 4 else got.transpose(1, 2).flatten(2)
        torch.testing.assert_close(got, to_tensor(expected), rtol=case.rtol, atol=case.atol)
