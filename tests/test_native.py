"""The native kernels' own promises: any strides, nothing leaks, nothing is copied."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import multihead as mh
from cases import Case
from checks import check_forward
from close import assert_close
from multihead.ops.backends import native
from multihead.ops.problem import describe
from requires import require

NAN = float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MASKS = {
    "full": None,
    "causal": mh.Causal(),
    "window": mh.Window(40, 5, keep_first=3),
    "padding": mh.KeyPadding(torch.arange(331) >= torch.tensor([[70], [3]])) & mh.Causal(),
}


@pytest.fixture(autouse=True)
def _native() -> None:
    require("native")


def draw(*shape: int, seed: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tensors(
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    queries: int = 300,
    keys: int = 331,
    width: int = 32,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        draw(batch, heads, queries, width, seed=1, dtype=dtype),
        draw(batch, kv_heads, keys, width, seed=2, dtype=dtype),
        draw(batch, kv_heads, keys, width, seed=3, dtype=dtype),
    )


def call(query: Tensor, key: Tensor, value: Tensor, **options: object) -> mh.AttentionResult:
    return mh.attention_with_stats(
        query, key, value, stats=mh.STATISTICS, backend="native", **options
    )


def assert_same_bits(one: mh.AttentionResult, other: mh.AttentionResult) -> None:
    assert torch.equal(one.out, other.out)
    for name in mh.STATISTICS:
        assert torch.equal(one.stats[name], other.stats[name]), name


def test_bits_of_a_row_do_not_depend_on_the_rows_before_it() -> None:
    query, key, value = tensors()
    whole = call(query, key, value, mask=mh.Causal())
    for rows in (17, 33):  # fewer go through the kernel for few rows, which sums in another order
        tail = call(query[:, :, -rows:], key, value, mask=mh.Causal())
        assert torch.equal(tail.out, whole.out[:, :, -rows:])


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 16, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_asked_for_beside_the_output_changes_no_bit(rows: int, dtype: torch.dtype) -> None:
    query, key, value = tensors(heads=2, kv_heads=2, queries=rows, dtype=dtype)
    for mask in MASKS.values():
        every = call(query, key, value, mask=mask)
        plain = mh.attention(query, key, value, mask=mask, backend="native")
        assert torch.equal(plain, every.out)
        for name in mh.STATISTICS:
            alone = mh.attention_with_stats(
                query, key, value, mask=mask, stats=(name,), backend="native"
            )
            assert torch.equal(alone.out, every.out)
            assert torch.equal(alone.stats[name], every.stats[name]), name


@pytest.mark.parametrize("axis", range(4))
def test_inputs_are_read_through_their_strides(axis: int) -> None:
    inputs = tensors(queries=37, keys=73, width=19)
    expected = call(*inputs)

    def spread(x: Tensor) -> Tensor:
        """Every third element along `axis` of a tensor of NaN."""
        wide = torch.full([3 * n if a == axis else n for a, n in enumerate(x.shape)], NAN)
        view = wide[tuple(slice(None, None, 3) if a == axis else slice(None) for a in range(4))]
        return view.copy_(x)

    assert_same_bits(call(*(spread(x) for x in inputs)), expected)


def test_expanded_heads_and_a_bfloat16_row_of_odd_length() -> None:
    query, key, value = tensors(heads=3, kv_heads=1, queries=35, keys=67, width=9)
    whole = call(query, key, value)
    assert_same_bits(call(query, key.expand(-1, 3, -1, -1), value.expand(-1, 3, -1, -1)), whole)
    odd = [x.bfloat16() for x in (query, key, value)]
    padded = [torch.nn.functional.pad(x, (0, 1), value=NAN)[..., :9] for x in odd]
    assert_same_bits(call(*padded), call(*odd))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_that_some_rows_do_not_see_reach_only_those_that_do(dtype: torch.dtype) -> None:
    query, key, value = tensors(queries=97, keys=97, width=7, dtype=dtype)
    clean = call(query, key, value, mask=mh.Causal())
    for when in (0, 31, 64, 90):
        poisoned = value.clone()
        poisoned[0, 1, when, 2] = NAN
        dirty = call(query, key, poisoned, mask=mh.Causal())
        reached = torch.zeros(2, 4, 97, 7, dtype=torch.bool)
        reached[0, 2:, when:, 2] = True
        assert torch.equal(dirty.out.isnan(), reached)
        assert torch.equal(dirty.out[~reached], clean.out[~reached])
        assert torch.equal(dirty.lse, clean.lse)


def test_a_nan_query_is_a_nan_row_and_no_other() -> None:
    query, key, value = tensors(queries=50, keys=70, width=5)
    clean = call(query, key, value)
    query[1, 3, 20, 4] = NAN
    dirty = call(query, key, value)
    row = torch.zeros(2, 4, 50, dtype=torch.bool)
    row[1, 3, 20] = True
    assert torch.equal(dirty.out.isnan().all(-1), row)
    assert torch.equal(dirty.out[~row], clean.out[~row])
    for name in mh.STATISTICS:
        if name == "argmax":
            assert dirty.argmax[1, 3, 20] == -1
        else:
            assert torch.equal(dirty.stats[name].isnan(), row), name


def test_a_bias_of_the_lowest_float_is_a_bias() -> None:
    """Rows that it covers wholly stay a softmax; elsewhere it weighs nothing."""
    query, key, value = tensors(queries=5, keys=70, width=5)
    bias = torch.zeros(1, 1, 5, 70)
    bias[..., 0, :] = torch.finfo(torch.float32).min
    bias[..., 1, 3:] = torch.finfo(torch.float32).min
    out = call(query, key, value, bias=bias).out
    mean = value.mean(2).repeat_interleave(2, 1)
    torch.testing.assert_close(out[:, :, 0], mean)
    few = mh.attention(query, key[:, :, :3], value[:, :, :3], backend="reference")
    torch.testing.assert_close(out[:, :, 1], few[:, :, 1])


def test_infinite_bias_hides_even_where_the_score_is_nan() -> None:
    query, key, value = tensors(queries=5, keys=70, width=5)
    bias = torch.zeros(1, 1, 5, 70)
    bias[..., 66] = -torch.inf
    clean = call(query, key, value, bias=bias)
    key[:, :, 66], value[:, :, 66] = NAN, NAN
    assert_same_bits(call(query, key, value, bias=bias), clean)


@pytest.mark.parametrize("bias_dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_a_bias_of_any_float_dtype_is_used_in_float32(bias_dtype: torch.dtype) -> None:
    query, key, value = tensors(queries=37, keys=70, width=5)
    # Subnormal and large numbers of float16 among them.
    bias = torch.cat((draw(37, 68), torch.tensor([[6e-6, -3e4]]).expand(37, 2)), 1).to(bias_dtype)
    assert_same_bits(call(query, key, value, bias=bias), call(query, key, value, bias=bias.float()))


def test_a_long_row_is_as_accurate_as_torch() -> None:
    """Block sums are joined once each: a chain through all keys would have 3 times the error."""
    query, key, value = tensors(batch=1, heads=1, kv_heads=1, queries=64, keys=4096, width=64)
    exact = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double()
    )
    theirs = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    ours = mh.attention(query, key, value, backend="native")
    assert_close(ours, exact, theirs, factor=1.5)


@pytest.mark.parametrize("logit", [100.0, 300.0])
def test_statistics_keep_their_digits_at_large_logits(logit: float) -> None:
    case = Case("large", key_length=131, head_dim=8, value_dim=8, scale=logit, sinks=True)
    check_forward(case, torch.float32, "native")


def test_float64_is_refused_with_a_reason() -> None:
    query, key, value = (x.double() for x in tensors(queries=3, keys=3))
    with pytest.raises(mh.BackendError, match="float32, bfloat16 and float16, not float64"):
        mh.attention(query, key, value, backend="native")


def test_only_what_is_asked_for_comes_back() -> None:
    query, key, value = tensors(queries=3, keys=5)
    options = {"mask": None, "bias": None, "scale": None, "softcap": None, "sinks": None}
    problem = describe(query, key, value, dropout_p=0.0, stats=("argmax", "lse"), **options)
    _, stats = native.forward(problem)
    assert set(stats) == {"argmax", "lse"}
    assert stats["argmax"].dtype == torch.int64


def test_without_the_extension_reasons_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_native", None)
    monkeypatch.setattr(native, "_MISSING", "The native extension is not built: gone.")
    query, key, value = tensors(queries=3, keys=3)
    assert torch.isfinite(mh.attention(query, key, value)).all()
    with pytest.raises(mh.BackendError, match="not built: gone"):
        mh.attention(query, key, value, backend="native")
    assert native.instruction_sets() == []
    assert native.instruction_set() is None


def test_peaks_are_measured() -> None:
    fma = native.peak("fma", 1)
    assert fma is not None
    assert fma > 1
    for kind, name in (("dpbf16", "avx512_bf16"), ("amx", "avx512_amx")):
        assert (native.peak(kind, 1) is None) == (name not in native.instruction_sets())
