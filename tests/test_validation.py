"""Bad input is refused before any work; the smallest and largest legal calls work."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import Tensor

import multihead as mh


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


QUERY, KEY = zeros(2, 4, 3, 8), zeros(2, 2, 5, 8)


@pytest.mark.parametrize(
    ("query", "key", "value", "words"),
    [
        (QUERY, KEY, zeros(2, 2, 6, 8), ["length", "5", "6"]),
        (QUERY, zeros(2, 2, 6, 8), zeros(2, 2, 5, 8), ["length", "6", "5"]),
        (zeros(2, 8, 3, 8), zeros(2, 3, 5, 8), zeros(2, 3, 5, 8), ["8 query heads", "3 KV heads"]),
        (QUERY, KEY, zeros(2, 3, 5, 8), ["KV heads", "2", "3"]),
        (QUERY, zeros(4, 2, 5, 8), zeros(4, 2, 5, 8), ["batch", "2", "4"]),
        (QUERY, zeros(1, 2, 5, 8), zeros(1, 2, 5, 8), ["batch", "2", "1", "expand"]),
        (QUERY, zeros(2, 2, 5, 16), KEY, ["width D", "8", "16"]),
        (zeros(4, 3, 8), KEY, KEY, ["four dimensions", "unsqueeze"]),
        (zeros(2, 4, 3, 0), zeros(2, 2, 5, 0), KEY, ["at least 1"]),
    ],
)
def test_shapes_that_are_refused(
    query: Tensor, key: Tensor, value: Tensor, words: list[str]
) -> None:
    for call in (mh.attention, mh.attention_with_stats, mh.explain):
        with pytest.raises(mh.ArgumentError) as caught:
            call(query, key, value)
        for word in words:
            assert word in str(caught.value)
        assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"mask": zeros(3, 5)}, mh.DtypeError, "`bias=`"),
        ({"mask": torch.ones(3, 5, dtype=torch.int64)}, mh.DtypeError, "mask.bool()"),
        ({"mask": torch.ones(3, 5, dtype=torch.uint8)}, mh.DtypeError, "mask.bool()"),
        ({"mask": "causal"}, mh.DtypeError, "Causal()"),
        ({"mask": torch.ones(3, 6).bool()}, mh.MaskError, "[2, 4, 3, 5]"),
        ({"mask": torch.ones(2, 3, 5).bool()}, mh.MaskError, "mask[:, None]"),
        ({"mask": torch.ones(5).bool()}, mh.MaskError, "KeyPadding"),
        ({"bias": zeros(2, 3, 5)}, mh.MaskError, "bias[None]"),
        ({"bias": zeros(3, 6)}, mh.MaskError, "[2, 4, 3, 5]"),
        ({"bias": torch.ones(3, 5).bool()}, mh.DtypeError, "`mask=`"),
        ({"bias": mh.ALiBi(zeros(3))}, mh.ArgumentError, "(4,)"),
        ({"scale": float("nan")}, mh.ArgumentError, "finite"),
        ({"scale": "large"}, mh.ArgumentError, "finite"),
        ({"softcap": 0.0}, mh.ArgumentError, "above 0"),
        ({"softcap": -3.0}, mh.ArgumentError, "None means no cap"),
        ({"sinks": zeros(2)}, mh.ArgumentError, "(4,)"),
        ({"sinks": torch.ones(4, dtype=torch.int32)}, mh.DtypeError, "float tensor [H]"),
        ({"dropout_p": 1.5}, mh.ArgumentError, "between 0 and 1"),
        ({"dropout_p": True}, mh.ArgumentError, "a number from 0 to 1"),
        ({"dropout_p": "0.1%"}, mh.ArgumentError, "0 means no dropout"),
        ({"dropout_p": 0.1, "backend": "native"}, mh.BackendError, "no dropout yet"),
        ({"backend": "flash"}, mh.ArgumentError, "auto, native, chunked, reference"),
    ],
)
def test_options_that_are_refused(
    options: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=re.escape(words)):
        mh.attention(QUERY, KEY, KEY, **options)  # type: ignore[arg-type]


def test_dtypes_and_devices_that_are_refused() -> None:
    with pytest.raises(mh.DtypeError, match=r"key is float32, but query is bfloat16.*key\.to"):
        mh.attention(QUERY.bfloat16(), KEY, KEY)
    with pytest.raises(mh.DtypeError, match="must be float32"):
        mh.attention(QUERY.long(), KEY.long(), KEY.long())
    with pytest.raises(mh.DtypeError, match="got list"):
        mh.attention([1.0], KEY, KEY)  # type: ignore[arg-type,type-var]
    with pytest.raises(mh.DeviceError, match=r"key is on meta.*key\.to"):
        mh.attention(QUERY, KEY.to("meta"), KEY)
    with pytest.raises(mh.DeviceError, match="meta"):
        mh.attention(QUERY, KEY, KEY, mask=torch.ones(3, 5, dtype=torch.bool, device="meta"))
    with pytest.raises(mh.ArgumentError, match="to_dense"):
        mh.attention(QUERY.to_sparse(), KEY, KEY)
    with pytest.raises(mh.ArgumentError, match="got None"):
        mh.attention_with_stats(QUERY, KEY, KEY, stats=None)  # type: ignore[arg-type]
    with pytest.raises(mh.ArgumentError, match="lse, entropy"):
        mh.attention_with_stats(QUERY, KEY, KEY, stats=("variance",))


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ((0, 2, 3, 4), (0, 2, 5, 4)),
        ((1, 2, 0, 4), (1, 2, 5, 4)),
        ((1, 2, 3, 4), (1, 2, 0, 4)),
        ((1, 1, 1, 1), (1, 1, 1, 1)),
        ((1, 2, 7, 288), (1, 2, 11, 288)),
        ((1, 0, 3, 4), (1, 0, 5, 4)),
    ],
)
def test_smallest_legal_calls(query: tuple[int, ...], key: tuple[int, ...]) -> None:
    tensors = [torch.randn(query, requires_grad=True)]
    tensors += [torch.randn(key, requires_grad=True) for _ in range(2)]
    result = mh.attention_with_stats(*tensors, stats=mh.STATISTICS)
    assert result.out.shape == query
    assert all(statistic.shape == query[:3] for statistic in result.stats.values())
    assert result.weights(slice(None), slice(None)).shape == (*query[:3], key[2])
    result.out.sum().backward()
    for tensor in tensors:
        assert tensor.grad is not None
        assert tensor.grad.shape == tensor.shape
        assert bool(tensor.grad.isfinite().all())
    if key[2] == 0:
        assert bool((result.out == 0).all())
        assert bool((result.lse == -torch.inf).all())


def test_more_heads_than_a_grid_dimension() -> None:
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(70_000, 1, 10, 16, generator=draw) for _ in range(3))
    out = mh.attention(query, key, value)
    alone = mh.attention(query[-1:], key[-1:], value[-1:])
    assert torch.equal(out[-1:], alone) or torch.allclose(out[-1:], alone, rtol=0, atol=1e-6)


def test_half_precision_does_not_overflow() -> None:
    query = torch.full((1, 1, 4, 64), 256.0, dtype=torch.float16)
    key = query.clone()
    key[0, 0, 2] = 255
    value = torch.randn(1, 1, 4, 64, generator=torch.Generator().manual_seed(0)).half()
    expected = mh.attention(query.double(), key.double(), value.double(), backend="reference")
    out = mh.attention(query, key, value)
    assert bool(out.isfinite().all())
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("backend", ["auto", "chunked", "reference"])
def test_autocast_casts_the_inputs_and_nothing_else(backend: str) -> None:
    """Scores, softmax and sums stay in float32, in the gradient too; float64 is left alone."""
    draw = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(1, 2, n, 16, generator=draw) for n in (9, 33, 33))
    half = [x.bfloat16() for x in (query, key, value)]
    options: dict[str, object] = {"scale": 1.0, "mask": mh.Causal(), "backend": backend}
    expected = mh.attention_with_stats(*half, stats=mh.STATISTICS, **options)
    leaves = [x.clone().requires_grad_() for x in half]
    mh.attention(*leaves, **options).float().square().sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = mh.attention_with_stats(query, key, value, stats=mh.STATISTICS, **options)
        weights = result.weights(slice(None), slice(None))
        pooled = mh.attention_map(*half[:2], result.lse, scale=1.0, mask=mh.Causal(), bins=4)
        inside = [x.clone().requires_grad_() for x in half]
        loss = mh.attention(*inside, **options).float().square().sum()
        exact = mh.attention(query.double(), key.double(), value.double(), **options)
    loss.backward()
    assert result.out.dtype == torch.bfloat16
    assert exact.dtype == torch.float64
    assert torch.equal(result.out, expected.out)
    for name in mh.STATISTICS:
        assert torch.equal(result.stats[name], expected.stats[name]), name
    for sums in (weights.sum(-1), pooled.nansum(-1)):
        torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-5)
    for got, want in zip(inside, leaves, strict=True):
        assert torch.equal(got.grad, want.grad)


def test_numpy_in_numpy_out() -> None:
    draw = np.random.default_rng(0)
    query, key, value = (draw.standard_normal((1, 2, n, 4)).astype("f4") for n in (3, 5, 5))
    out = mh.attention(query, key, value, mask=np.tril(np.ones((3, 5), dtype=bool), 2))
    assert isinstance(out, np.ndarray)
    tensors = [torch.from_numpy(x) for x in (query, key, value)]
    assert np.array_equal(out, mh.attention(*tensors, mask=mh.Causal()).numpy())
    result = mh.attention_with_stats(query, key, value, mask=mh.Causal())
    assert isinstance(result.entropy, np.ndarray)
    assert isinstance(result.weights([0], slice(None)), np.ndarray)


def test_numpy_arrays_of_any_stride() -> None:
    draw = np.random.default_rng(1)
    values = draw.standard_normal((1, 2, 5, 4)).astype("f4")
    expected = mh.attention(values[:, :, ::-1].copy(), values, values)
    assert np.array_equal(mh.attention(values[:, :, ::-1], values, values), expected)
    fixed = np.broadcast_to(values[:, :1], values.shape)
    assert np.array_equal(mh.attention(fixed, fixed, fixed), mh.attention(*[fixed.copy()] * 3))
    shown = np.array([[True, True, False, True, True]])
    padded = mh.attention(values, values, values, mask=mh.KeyPadding(shown))
    assert np.array_equal(padded, mh.attention(values, values, values, mask=shown[None, None]))


def test_zeros_that_have_no_memory() -> None:
    """Autograd makes such tensors of gradients that are 0."""
    zeros = torch._efficientzerotensor(1, 2, 3, 4)
    key = torch.randn(1, 2, 3, 4)
    assert torch.equal(mh.attention(zeros, key, key), mh.attention(torch.zeros_like(key), key, key))
    assert torch.equal(mh.attention(key, zeros, zeros), torch.zeros_like(key))


def test_lazily_negated_inputs() -> None:
    draw = torch.Generator().manual_seed(5)
    query, key, bias = (torch.randn(1, 2, 5, n, generator=draw) for n in (4, 4, 5))
    negated = torch._neg_view(query)
    out = mh.attention(negated, key, key, bias=torch._neg_view(bias), sinks=-bias[0, :, 0, 0])
    expected = mh.attention(-query, key, key, bias=-bias, sinks=-bias[0, :, 0, 0])
    assert torch.equal(out, expected)


def test_the_default_device_does_not_matter() -> None:
    query = torch.randn(1, 2, 5, 4)
    expected = mh.attention_with_stats(query, query, query, mask=mh.Causal())
    with torch.device("meta"):
        result = mh.attention_with_stats(query, query, query, mask=mh.Causal())
    assert torch.equal(result.out, expected.out)
    assert torch.equal(result.lse, expected.lse)


def test_explain_counts_what_a_bias_hides_once_a_head() -> None:
    query = torch.randn(1, 8, 100, 4)
    plain = mh.explain(query, query, query)
    assert plain.cost.exponentials == 8 * 100 * 100
    assert mh.explain(query, query, query, bias=torch.zeros(1, 8, 100, 100)).cost == plain.cost
    half = torch.zeros(1, 1, 1, 100).masked_fill(torch.arange(100) < 50, -torch.inf)
    assert mh.explain(query, query, query, bias=half).cost.exponentials == 8 * 100 * 50
    with pytest.raises(mh.ArgumentError, match="meta"):
        mh.explain(*(torch.empty(1, 1, 3, 4, device="meta") for _ in range(3)))


def test_explain_counts_and_gives_reasons() -> None:
    query, key = torch.randn(1, 4, 16, 8), torch.randn(1, 2, 16, 8)
    value = torch.randn(1, 2, 16, 16)
    found = mh.explain(query, key, value, mask=mh.Causal(), backend="chunked")
    assert found.backend == "chunked"
    assert found.cost.flops == 2 * 4 * 136 * (8 + 16)
    assert found.reasons["reference"] == ()
    assert "served by: chunked" in str(found)
    double = mh.explain(query.double(), key.double(), value.double(), backend="native")
    assert double.backend is None
    assert double.reasons["native"]
    with pytest.raises(mh.BackendError, match="native"):
        mh.attention(query.double(), key.double(), value.double(), backend="native")


def test_a_result_names_what_was_not_asked_for() -> None:
    result = mh.attention_with_stats(QUERY, KEY, KEY, stats=("lse",))
    with pytest.raises(AttributeError, match="'entropy' was not asked for"):
        _ = result.entropy
    assert list(result.stats) == ["lse"]
    with pytest.raises(AttributeError, match="no attribute 'entrophy'"):
        _ = result.entrophy
    assert repr(result) == "AttentionResult(out=[2, 4, 3, 8], stats=['lse'])"
