"""What NaN and infinity may reach, in every backend, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import multihead as mh
from multihead.ops import dispatch
from requires import require

BACKENDS = ["native", "chunked", "reference"]
NAN = float("nan")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend that serves a plain float32 call on this machine."""
    name = str(request.param)
    module = next(it for it in dispatch.BACKENDS if name == it.NAME)
    tensors = draw(3)
    if mh.explain(*tensors).reasons[module.NAME]:
        pytest.skip(f"{name} can't serve here: {mh.explain(*tensors).reasons[name][0]}")
    return name


def draw(length: int, heads: int = 2, width: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(1, heads, length, width, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("length", [7, 150])
@pytest.mark.parametrize("poison", [NAN, torch.inf, -torch.inf])
def test_hidden_keys_and_values_reach_nothing(backend: str, length: int, poison: float) -> None:
    query, key, value = draw(length)
    hidden = length // 2
    visible = torch.ones(1, length, dtype=torch.bool)
    visible[0, hidden] = False
    poisoned_key, poisoned_value = key.clone(), value.clone()
    poisoned_key[:, :, hidden] = poison
    poisoned_value[:, :, hidden] = poison
    for mask in (mh.KeyPadding(visible), mh.Dense(visible[None, None]) & mh.Causal()):
        options = {"mask": mask, "backend": backend, "stats": mh.STATISTICS}
        clean = mh.attention_with_stats(query, key, value, **options)
        dirty = mh.attention_with_stats(query, poisoned_key, poisoned_value, **options)
        assert torch.equal(dirty.out, clean.out)
        for name in mh.STATISTICS:
            assert torch.equal(dirty.stats[name], clean.stats[name]), name


@pytest.mark.parametrize("length", [7, 150])
def test_the_future_reaches_no_row_before_it(backend: str, length: int) -> None:
    query, key, value = draw(length)
    clean = mh.attention(query, key, value, mask=mh.Causal(), backend=backend)
    when = length - 3
    key[:, :, when:], value[:, :, when:] = NAN, NAN
    dirty = mh.attention(query, key, value, mask=mh.Causal(), backend=backend)
    assert torch.equal(dirty[:, :, :when], clean[:, :, :when])
    assert bool(dirty[:, :, when:].isnan().all())


@pytest.mark.parametrize("length", [7, 150])
def test_visible_nan_stays_nan(backend: str, length: int) -> None:
    query, key, value = draw(length)
    query[0, 0, 1] = NAN
    result = mh.attention_with_stats(query, key, value, stats=mh.STATISTICS, backend=backend)
    assert bool(result.out[0, 0, 1].isnan().all())
    assert int(result.out.isnan().any(-1).sum()) == 1
    for name in mh.STATISTICS:
        if name == "argmax":
            assert int(result.argmax[0, 0, 1]) == -1
        else:
            assert torch.equal(result.stats[name].isnan(), result.out.isnan().any(-1)), name
    value[0, 1, length - 1, 2] = NAN
    out = mh.attention(draw(length)[0], key, value, backend=backend)
    assert bool(out[0, 1, :, 2].isnan().all())
    assert int(out.isnan().sum()) == length


def test_rows_that_see_nothing(backend: str) -> None:
    query, key, value = draw(6)
    visible = torch.ones(6, 6, dtype=torch.bool)
    visible[2] = False
    hiding = torch.zeros(6, 6).masked_fill(~visible, -torch.inf)
    open_rows = [0, 1, 3, 4, 5]
    free = mh.attention(query, key, value, backend=backend)
    for options in ({"mask": visible}, {"bias": hiding}):
        result = mh.attention_with_stats(
            query, key, value, stats=mh.STATISTICS, backend=backend, **options
        )
        assert bool((result.out[:, :, 2] == 0).all())
        torch.testing.assert_close(
            result.out[:, :, open_rows], free[:, :, open_rows], rtol=0, atol=1e-6
        )
        assert bool((result.lse[:, :, 2] == -torch.inf).all())
        assert bool((result.argmax[:, :, 2] == -1).all())
        for name in ("entropy", "max_weight", "mean_distance", "sink_mass", "participation"):
            assert bool((result.stats[name][:, :, 2] == 0).all()), name


@pytest.mark.parametrize("kind", ["bool", "bias"])
def test_gradients_through_rows_that_see_nothing(kind: str) -> None:
    tensors = [x.double().requires_grad_() for x in draw(6)]
    visible = torch.ones(6, 6, dtype=torch.bool)
    visible[2] = False
    hiding = torch.zeros(6, 6).masked_fill(~visible, -torch.inf)
    options = {"mask": visible} if kind == "bool" else {"bias": hiding}
    weight = torch.randn(1, 2, 6, 5, generator=torch.Generator().manual_seed(0)).double()
    out = mh.attention(*tensors, **options)
    grads = torch.autograd.grad((out * weight).sum(), tensors)
    rest = [0, 1, 3, 4, 5]
    without = [tensors[0][:, :, rest], *tensors[1:]]
    expected = torch.autograd.grad((mh.attention(*without) * weight[:, :, rest]).sum(), tensors)
    for grad, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-12, atol=1e-12)
    assert bool((grads[0][:, :, 2] == 0).all())


def test_hidden_nan_reaches_no_gradient() -> None:
    query, key, value = (x.double() for x in draw(9))
    weight = torch.ones(1, 2, 9, 5, dtype=torch.float64)
    weight[:, :, 6:] = 0

    def gradients(key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        visible = (torch.arange(9) < 6)[None]
        out = mh.attention(*leaves, mask=mh.KeyPadding(visible), softcap=3.0)
        return torch.autograd.grad((out * weight).sum(), leaves)

    clean = gradients(key, value)
    key, value = key.clone(), value.clone()
    key[:, :, 6:], value[:, :, 6:] = NAN, torch.inf
    for grad, want in zip(gradients(key, value), clean, strict=True):
        assert torch.equal(grad, want)


def test_entropy_of_known_rows(backend: str) -> None:
    zeros, value = torch.zeros(1, 4, 4, 8), torch.randn(1, 2, 4, 8)
    result = mh.attention_with_stats(
        zeros, zeros[:, :2], value, mask=mh.Causal(), stats=("entropy",), backend=backend
    )
    counts = torch.arange(1, 5).log()
    torch.testing.assert_close(result.entropy, counts.expand(1, 4, 4), rtol=0, atol=1e-6)
    sharp = torch.eye(8)[None, None, :4] * 1e4
    one_hot = mh.attention_with_stats(sharp, sharp, sharp, stats=("entropy",), backend=backend)
    assert bool((one_hot.entropy == 0).all())


@pytest.mark.parametrize("least", [-3e38, torch.finfo(torch.float32).min])
def test_huge_negative_logits(backend: str, least: float) -> None:
    """What a finfo.min bias makes of a row: finite statistics, and finite gradients."""
    query, key = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 10, 4)
    everywhere = torch.full((1, 10), least)
    for sinks in (None, torch.tensor([-torch.inf])):
        result = mh.attention_with_stats(
            query, key, key, bias=everywhere, sinks=sinks, stats=mh.STATISTICS, backend=backend
        )
        assert result.max_weight.item() == pytest.approx(0.1, abs=1e-6)
        assert result.entropy.item() == pytest.approx(math.log(10), abs=1e-6)
    drowned = mh.attention_with_stats(
        query, key, key, bias=everywhere, sinks=torch.zeros(1), backend=backend
    )
    assert drowned.entropy.item() == 0
    bias = torch.zeros(1, 10).masked_fill(torch.arange(10) > 2, least)
    query.requires_grad_()
    partly = mh.attention_with_stats(query, key, key, bias=bias, backend=backend)
    assert partly.entropy.item() == pytest.approx(math.log(3), abs=1e-6)
    (grad,) = torch.autograd.grad(5 * partly.entropy.sum(), query)
    assert bool((grad == 0).all())


@pytest.mark.parametrize("poison", ["sink", "infinite sink", "infinite logit", "bias"])
def test_an_undefined_row_has_undefined_statistics(backend: str, poison: str) -> None:
    query, key, value = draw(5)
    options: dict[str, object] = {}
    if poison in ("sink", "infinite sink"):
        options["sinks"] = torch.tensor([NAN if poison == "sink" else torch.inf, 0.0])
    elif poison == "bias":
        options["bias"] = torch.zeros(1, 2, 1, 5)
        options["bias"][0, 0, 0, 3] = NAN  # type: ignore[index]
    else:
        key[0, 0, 3] = torch.inf
        query[0, 0] = query[0, 0].abs()
    result = mh.attention_with_stats(
        query, key, value, stats=mh.STATISTICS, backend=backend, **options
    )
    assert bool(result.out[0, 0].isnan().all())
    for name in mh.STATISTICS:
        if name == "argmax":
            assert bool((result.argmax[0, 0] == -1).all())
        else:
            assert bool(result.stats[name][0, 0].isnan().all()), name
            assert bool(result.stats[name][0, 1].isfinite().all()), name


@pytest.mark.parametrize("rows", [1, 40])
def test_a_product_of_minus_infinity_stays_under_a_bias(rows: int) -> None:
    require("native")
    query, value = torch.ones(1, 1, rows, 4), torch.randn(1, 1, 70, 4)
    key = torch.full((1, 1, 70, 4), -torch.inf)
    bias = torch.zeros(1, 1, 1, 70)
    for backend in ("native", "chunked", "reference"):
        result = mh.attention_with_stats(query, key, value, bias=bias, backend=backend)
        assert torch.equal(result.out, torch.zeros_like(result.out))
        assert bool((result.lse == -torch.inf).all())


def test_a_row_that_sees_minus_infinity_alone_counts_in_a_map() -> None:
    require("native")
    query = torch.ones(1, 1, 40, 4)
    key, value = torch.ones(2, 1, 1, 40, 4).unbind()
    key = key.clone()
    key[:, :, 0] = -torch.inf
    maps = [
        mh.attention_with_stats(query, key, value, mask=mh.Causal(), bins=4, backend=name).map
        for name in ("native", "chunked", "reference")
    ]
    assert torch.allclose(maps[0], maps[2], equal_nan=True)
    assert torch.allclose(maps[1], maps[2], equal_nan=True)
    assert float(maps[0][0, 0, 0, 0]) == pytest.approx(0.9)
