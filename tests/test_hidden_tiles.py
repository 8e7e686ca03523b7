"""Rows whose first keys are hidden for longer than a tile: the running maximum is still -inf.

Users of torch and of kernels met NaN from row 512 on with a band mask (-inf minus -inf), and a
window that the backward pass read differently.
"""

from __future__ import annotations

import pytest
import torch

import multihead as mh
from multihead.ops import scores
from serving import (
    BACKENDS,
    FLOATS,
    Options,
    assert_call,
    assert_gradients,
    draw_qkv,
    require_serving,
)

LENGTHS = [1, 15, 16, 17, 33, 65, 129, 257, 640]


def spellings(length: int) -> dict[str, Options]:
    """A band of ten keys that ends with the query's own, and other ways to hide a long start."""
    band = mh.SlidingWindow(10).to_dense(length, length)[0, 0]
    hiding = torch.zeros(length, length).masked_fill(~band, -torch.inf)
    late = torch.arange(length) >= length - 3
    ids = torch.arange(length) // 10
    return {
        "window": {"mask": mh.SlidingWindow(10)},
        "bools": {"mask": band},
        "-inf": {"bias": hiding},
        "lowest float": {"bias": hiding.clamp(min=torch.finfo(torch.float32).min)},
        "documents": {"mask": mh.Documents(ids) & mh.Causal()},
        "padding": {"mask": mh.KeyPadding(late[None])},
        "bools over keys": {"mask": late[None, None, None]},
        "-inf over keys": {"bias": torch.zeros(1, length).masked_fill(~late, -torch.inf)},
        "positions": {
            "mask": mh.SlidingWindow(10)
            & mh.Positions(torch.arange(length).flip(0), torch.arange(length).flip(0))
        },
        "a kept start": {"mask": mh.Window(9, 0, keep_first=1)},
        "a sink": {"mask": mh.SlidingWindow(10), "sinks": torch.tensor([1.0, 50.0])},
    }


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_hidden_tiles_before_the_first_key(length: int, backend: str, dtype: torch.dtype) -> None:
    require_serving(backend, dtype)
    tensors = draw_qkv((1, 2, length, 4), (1, 1, length, 4), dtype=dtype)
    cases = list(spellings(length).items())
    for name, options in cases if length < 300 else cases[:3]:
        result = assert_call(tensors, backend, **options)
        assert bool(result.out.isfinite().all()), name


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
@pytest.mark.parametrize("length", [1, 129, 257])
def test_gradients_behind_hidden_tiles(length: int, dtype: torch.dtype) -> None:
    tensors = draw_qkv((1, 2, length, 4), (1, 1, length, 4), dtype=dtype)
    for options in spellings(length).values():
        assert_gradients(tensors, **options)


@pytest.mark.parametrize("elements", [1, 300, 1 << 30], ids=["a row", "some rows", "everything"])
def test_any_block_of_rows(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunked backend with blocks of one row, and with one block larger than the call."""
    monkeypatch.setattr(scores, "BLOCK_ELEMENTS", elements)
    tensors = draw_qkv((1, 2, 129, 4), (1, 1, 129, 4))
    for options in spellings(129).values():
        assert_call(tensors, "chunked", **options)
        assert_gradients(tensors, "chunked", **options)
