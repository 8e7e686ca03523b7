"""The map that comes from the same pass as the output, against the one pooled afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import multihead as mh
from cases import CASES, Case
from close import assert_close
from multihead.ops.backends import native
from requires import require

# More rows than a tile, row bins that tiles and items straddle, and column bins within a block.
LONG = [
    Case("map: causal", heads=2, kv_heads=1, query_length=701, key_length=997, mask=mh.Causal()),
    Case("map: window", heads=2, kv_heads=1, query_length=701, key_length=997, sinks=1.0,
         mask=mh.Window(70, 5, keep_first=2)),
    Case("map: padding", heads=2, query_length=331, key_length=331, kv_heads=2, softcap=2.0,
         mask=mh.KeyPadding(torch.arange(331) >= torch.tensor([[170], [0]])) & mh.Causal()),
    Case("map: side by side", heads=8, kv_heads=2, query_length=9, key_length=131, bias="alibi"),
]  # fmt: skip
SHAPED = [case for case in CASES if case.batch and case.query_length]


def _as(dtype: torch.dtype, options: dict[str, Any]) -> dict[str, Any]:
    def cast(x: Any) -> Any:
        if isinstance(x, mh.ALiBi):
            return mh.ALiBi(x.slopes.to(dtype))
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    return {name: cast(x) for name, x in options.items()}


def _pooled_afterwards(
    case: Case, inputs_from: torch.dtype, dtype: torch.dtype, bins: int
) -> Tensor:
    """attention_map of the definition in `dtype`, on inputs rounded to `inputs_from`."""
    query, key, value = (x.to(dtype) for x in case.tensors(inputs_from))
    options = _as(dtype, case.options(inputs_from))
    result = mh.attention_with_stats(query, key, value, backend="reference", **options)
    options.pop("sinks")
    return mh.attention_map(query, key, result.lse, bins=bins, **options)


@pytest.fixture
def tiles() -> Any:
    """Small cases go through the tiles, which pool, and not through the kernel for few rows."""
    require("native")
    native.use_decoder(False)
    yield
    native.use_decoder(True)
    native.use_instruction_set(None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [*SHAPED, *LONG], ids=lambda case: case.name)
def test_map_is_the_one_pooled_afterwards(tiles: None, case: Case, dtype: torch.dtype) -> None:
    query, key, value = case.tensors(dtype)
    for bins in (1, 3, 64):
        expected = _pooled_afterwards(case, dtype, torch.float64, bins)
        plain = _pooled_afterwards(case, dtype, torch.float32, bins)
        for name in native.instruction_sets():
            native.use_instruction_set(name)
            result = mh.attention_with_stats(
                query, key, value, bins=bins, backend="native", **case.options(dtype)
            )
            assert_close(result.map, expected, plain, what=f"{name}, {bins} bins")


@pytest.mark.parametrize("backend", ["native", "chunked", "reference"])
def test_every_backend_has_the_map(backend: str) -> None:
    if backend == "native":
        require("native")
    for queries in (1, 90):
        query = torch.randn(2, 4, queries, 16)
        key, value = torch.randn(2, 2, 2, 90, 16)
        result = mh.attention_with_stats(
            query, key, value, mask=mh.Causal(), bins=7, stats=("entropy",), backend=backend
        )
        lse = mh.attention_with_stats(query, key, value, mask=mh.Causal()).lse
        expected = mh.attention_map(query, key, lse, mask=mh.Causal(), bins=7)
        assert torch.allclose(result.map, expected, atol=1e-6, equal_nan=True)
        assert torch.allclose(result.map.nan_to_num().sum(-1), torch.ones(2, 4, min(7, queries)))


def test_the_map_changes_nothing_else() -> None:
    require("native")
    query, key, value = torch.randn(3, 2, 3, 203, 32)
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [x.to(dtype) for x in (query, key, value)]
        plain = mh.attention_with_stats(*inputs, stats=mh.STATISTICS, mask=mh.Causal())
        mapped = mh.attention_with_stats(*inputs, stats=mh.STATISTICS, mask=mh.Causal(), bins=64)
        assert torch.equal(plain.out, mapped.out)
        assert all(torch.equal(plain.stats[name], mapped.stats[name]) for name in mh.STATISTICS)


def test_bits_of_a_map_do_not_depend_on_threads_or_batch() -> None:
    require("native")
    query, key, value = torch.randn(3, 3, 2, 701, 16)
    maps = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        maps.append(mh.attention_with_stats(query, key, value, mask=mh.Causal(), bins=50).map)
    assert torch.equal(maps[0].nan_to_num(-1), maps[1].nan_to_num(-1))
    assert torch.equal(maps[0].nan_to_num(-1), maps[2].nan_to_num(-1))
    alone = mh.attention_with_stats(
        *(x[1:2] for x in (query, key, value)), mask=mh.Causal(), bins=50
    ).map
    assert torch.equal(alone.nan_to_num(-1), maps[0][1:2].nan_to_num(-1))


def test_the_map_comes_with_gradients_and_arrays() -> None:
    query, key, value = torch.randn(3, 1, 2, 40, 8)
    expected = mh.attention_with_stats(query, key, value, bins=4).map
    query.requires_grad_()
    result = mh.attention_with_stats(query, key, value, bins=4)
    result.out.sum().backward()
    assert query.grad is not None
    assert not result.map.requires_grad
    assert torch.allclose(result.map, expected, atol=1e-6)
    arrays = [x.detach().numpy() for x in (query, key, value)]
    assert torch.allclose(torch.from_numpy(mh.attention_with_stats(*arrays, bins=4).map), expected)


def test_a_map_that_was_not_asked_for_says_so() -> None:
    query, key, value = torch.randn(3, 1, 1, 3, 4)
    with pytest.raises(AttributeError, match="pass bins=64"):
        _ = mh.attention_with_stats(query, key, value).map
    with pytest.raises(mh.ArgumentError, match="whole number, 1 or more; got 0"):
        mh.attention_with_stats(query, key, value, bins=0)


def test_tensors_without_memory_of_their_own_are_mapped_too() -> None:
    """Subclasses, fakes and transforms must not have their addresses taken."""
    query, key, value = torch.randn(3, 1, 2, 40, 8)
    result = mh.attention_with_stats(query, key, value, bins=4)
    twice = [TwoTensor(x.clone(), x.clone()) for x in (query, key, value)]
    pair = mh.attention_with_stats(*twice, bins=4).map
    assert pair.shape == result.map.shape  # what a subclass makes of its parts is its own affair

    def loss(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sum(), mh.attention_map(x, key, result.lse, bins=4)

    _, (_, found) = torch.func.grad_and_value(loss, has_aux=True)(query)
    assert torch.allclose(found, result.map, atol=1e-6)
    with FakeTensorMode():
        fake = torch.randn(1, 2, 40, 8)
        with pytest.raises(DataDependentOutputException):  # the sizes of bins are read
            mh.received_attention(fake, fake, torch.randn(1, 2, 40))


def test_explain_takes_bins() -> None:
    query, key, value = torch.randn(3, 1, 2, 40, 8)
    assert mh.explain(query, key, value, bins=4).backend is not None
    with pytest.raises(mh.ArgumentError, match="bins must be"):
        mh.explain(query, key, value, bins=0)


MAPPED = [
    Case("map: compiled", heads=4, kv_heads=2, query_length=9, key_length=13, mask=mh.Causal()),
    Case("map: compiled window", query_length=13, key_length=13, bias="alibi", sinks=1.0,
         mask=mh.Window(3, 2)),
]  # fmt: skip


@pytest.mark.parametrize("case", MAPPED, ids=lambda case: case.name)
@pytest.mark.parametrize("grad", [False, True])
def test_compiled_whole_and_exported_the_map_is_the_eager_one(case: Case, grad: bool) -> None:
    tensors = tuple(x.requires_grad_(grad) for x in case.tensors(torch.float32))
    options = case.options()

    class Mapped(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            result = mh.attention_with_stats(query, key, value, bins=5, **options)
            return result.out, result.map

    expected = Mapped()(*tensors)
    compiled = torch.compile(Mapped(), fullgraph=True, dynamic=True, backend="aot_eager")
    exported = torch.export.export(Mapped(), tensors).module()
    for run in (compiled, exported):
        for ours, eager in zip(run(*tensors), expected, strict=True):
            torch.testing.assert_close(ours, eager, rtol=0, atol=1e-6, equal_nan=True)


def test_meta_tensors_get_the_shape_of_a_map() -> None:
    query, key = torch.empty(2, 6, 3, 4, device="meta"), torch.empty(2, 3, 50, 4, device="meta")
    result = mh.attention_with_stats(query, key, key, bins=np.int64(7))
    assert result.map.shape == (2, 6, 3, 7)
    assert result.map.is_meta


def test_what_is_no_number_of_bins_is_refused() -> None:
    query = torch.zeros(1, 1, 2, 3)
    for bins in (0, -1, 1.5, True, "64"):
        with pytest.raises(mh.ArgumentError, match="bins must be a whole number"):
            mh.attention_with_stats(query, query, query, bins=bins)
    with pytest.raises(mh.ArgumentError, match="pass bins=64"):
        mh.attention_with_stats(query, query, query, stats=("lse", "map"))
