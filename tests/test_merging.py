"""Parts over disjoint keys join to the attention over all of them."""

from itertools import pairwise

import pytest
import torch

import multihead as mh
from close import assert_close

B, H, G, LQ, LK, D, DV = 2, 6, 3, 13, 37, 8, 5


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return 2 * draw(B, H, LQ, D), 2 * draw(B, G, LK, D), draw(B, G, LK, DV)


def part(query, key, value, keys: slice, backend: str = "auto", mask=None):
    """The result over some keys, which stand where they stand among all."""
    frame = mh.Positions(torch.arange(LK - LQ, LK), torch.arange(LK)[keys])
    return mh.attention_with_stats(
        query,
        key[:, :, keys],
        value[:, :, keys],
        mask=frame if mask is None else mask & frame,
        stats=("lse",),
        backend=backend,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("cuts", [(0, 20, LK), (0, 1, 30, LK), (0, 0, LK)])
@pytest.mark.parametrize("mask", [None, mh.Causal(), mh.SlidingWindow(4)])
def test_parts_join_to_the_whole(dtype: torch.dtype, cuts: tuple[int, ...], mask) -> None:
    arguments = inputs(dtype)

    def whole(dtype: torch.dtype, backend: str) -> mh.AttentionResult:
        taken = [x.to(dtype) for x in arguments]
        return part(*taken, slice(0, LK), backend, mask)

    parts = [part(*arguments, slice(*pair), mask=mask) for pair in pairwise(cuts)]
    out, lse = parts[0].out, parts[0].lse
    for each in parts[1:]:
        out, lse = mh.merge_attention(out, lse, each.out, each.lse)
    assert (out.dtype, lse.dtype) == (dtype, parts[0].lse.dtype)
    expected = whole(torch.float64, "reference")
    baseline = whole(torch.float32 if dtype is torch.float64 else dtype, "reference")
    if dtype is torch.float64:
        torch.testing.assert_close(out, expected.out, rtol=0, atol=1e-13)
        torch.testing.assert_close(lse, expected.lse, rtol=0, atol=1e-13)
        return
    # Each part is rounded to the outputs' dtype before it is joined.
    assert_close(out, expected.out, baseline.out, factor=2.0 + len(parts), what="out")
    assert_close(lse, expected.lse, baseline.lse, factor=2.0 + len(parts), what="lse")


def test_a_part_without_keys_changes_no_bit_whatever_it_holds() -> None:
    query, key, value = inputs(torch.float32)
    whole = part(query, key, value, slice(0, LK))
    for garbage in (0.0, float("nan"), float("inf")):
        empty = torch.full_like(whole.out, garbage), torch.full_like(whole.lse, -torch.inf)
        for arguments in ((whole.out, whole.lse, *empty), (*empty, whole.out, whole.lse)):
            out, lse = mh.merge_attention(*arguments)
            assert torch.equal(out, whole.out)
            assert torch.equal(lse, whole.lse)


def test_two_parts_without_keys_are_zeros_with_zero_gradients() -> None:
    out_a, out_b = (torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(2))
    lse_a, lse_b = (torch.full((1, 2, 3), -torch.inf, requires_grad=True) for _ in range(2))
    out, lse = mh.merge_attention(out_a, lse_a, out_b, lse_b)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))
    leaves = (out_a, lse_a, out_b, lse_b)
    for gradient in torch.autograd.grad(out.sum() + lse.sum(), leaves):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_nan_of_a_visible_key_stays() -> None:
    query, key, value = inputs(torch.float32)
    key[0, 0, 3] = torch.nan
    a, b = part(query, key, value, slice(0, 20)), part(query, key, value, slice(20, LK))
    out, lse = mh.merge_attention(a.out, a.lse, b.out, b.lse)
    assert out[0, :2].isnan().all()
    assert lse[0, :2].isnan().all()
    assert out[0, 2:].isfinite().all()
    assert lse[1].isfinite().all()


def test_large_logits_do_not_overflow() -> None:
    out = torch.ones(1, 1, 2, 3)
    lse_a, lse_b = torch.tensor([[[3e4, -3e4]]]), torch.tensor([[[2e4, -2e4]]])
    merged, lse = mh.merge_attention(out, lse_a, 2 * out, lse_b)
    assert torch.equal(merged[0, 0, :, 0], torch.tensor([1.0, 2.0]))
    assert torch.equal(lse, torch.tensor([[[3e4, -2e4]]]))


def test_gradients() -> None:
    generator = torch.Generator().manual_seed(1)
    out_a, out_b = (torch.randn(1, 2, 3, 4, generator=generator).double() for _ in range(2))
    lse_a, lse_b = (torch.randn(1, 2, 3, generator=generator).double() for _ in range(2))
    arguments = tuple(x.requires_grad_() for x in (out_a, lse_a, out_b, lse_b))
    assert torch.autograd.gradcheck(mh.merge_attention, arguments)
    assert torch.autograd.gradgradcheck(mh.merge_attention, arguments)


def test_gradients_of_parts_are_those_of_the_whole() -> None:
    query, key, value = (x.requires_grad_() for x in inputs())
    leaves = (query, key, value)
    weight = torch.randn(B, H, LQ, DV, generator=torch.Generator().manual_seed(2)).double()
    whole = part(*leaves, slice(0, LK), mask=mh.Causal())
    expected = torch.autograd.grad((whole.out * weight).sum() + whole.lse.sum(), leaves)
    a, b = (part(*leaves, keys, mask=mh.Causal()) for keys in (slice(0, 30), slice(30, LK)))
    out, lse = mh.merge_attention(a.out, a.lse, b.out, b.lse)
    found = torch.autograd.grad((out * weight).sum() + lse.sum(), leaves)
    for gradient, right in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, right, rtol=0, atol=1e-11)


def test_it_compiles_to_one_graph() -> None:
    query, key, value = inputs(torch.float32)
    a, b = part(query, key, value, slice(0, 20)), part(query, key, value, slice(20, LK))
    arguments = (a.out, a.lse, b.out, b.lse)
    compiled = torch.compile(mh.merge_attention, fullgraph=True, backend="eager")
    for found, expected in zip(compiled(*arguments), mh.merge_attention(*arguments), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"out_a": torch.zeros(2, 3, 4)}, mh.ArgumentError, r"out_a must be \[B, H, Lq, Dv\]"),
        ({"lse_b": torch.zeros(1, 2, 1)}, mh.ArgumentError, r"lse_b must be \[1, 2, 3\]"),
        ({"out_b": torch.zeros(1, 2, 3, 5)}, mh.ArgumentError, r"out_b must be \[1, 2, 3, 4\]"),
        ({"out_b": torch.zeros(1, 2, 3, 4).double()}, mh.DtypeError, "of one dtype"),
        ({"lse_a": torch.zeros(1, 2, 3).double()}, mh.DtypeError, "lse_a is torch.float64"),
        ({"lse_a": torch.zeros(1, 2, 3).half()}, mh.DtypeError, "float32, float64"),
        ({"out_a": [1.0]}, mh.DtypeError, "out_a must be a tensor; got list"),
        ({"lse_b": torch.zeros(1, 2, 3, device="meta")}, mh.DeviceError, "lse_b is on meta"),
    ],
)
def test_bad_input_is_named(changed: dict, error: type, message: str) -> None:
    good = {
        **{"out_a": torch.zeros(1, 2, 3, 4), "lse_a": torch.zeros(1, 2, 3)},
        **{"out_b": torch.zeros(1, 2, 3, 4), "lse_b": torch.zeros(1, 2, 3)},
    }
    with pytest.raises(error, match=message):
        mh.merge_attention(**{**good, **changed})
