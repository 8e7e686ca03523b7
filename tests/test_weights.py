"""Exact pieces of the matrix against the whole matrix in float64, by the definitions."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import multihead as mh
from cases import CASES, Case
from close import assert_close
from matrix import dense, exact_lse
from multihead.ops import sweep as sweep_module
from multihead.ops.backends import native
from multihead.ops.cells import visible_at
from multihead.ops.diagonal import weights_along
from multihead.ops.pooling import Bins, bin_edges
from multihead.ops.problem import describe_logits
from multihead.ops.sweep import visible_keys
from multihead.ops.weights import top_keys, weights_at
from requires import require

BINS = 5


def call(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, object]]:
    """query, key, lse, and the options that the pieces take."""
    query, key, _ = case.tensors(torch.float32)
    options = case.options(torch.float32)
    del options["sinks"]
    return query, key, exact_lse(case), options


def pooled(matrix: dict[str, torch.Tensor], pool: str) -> torch.Tensor:
    """A map by its definition, cell by cell."""
    weights, visible = matrix["softmax"], matrix["visible"]
    rows = list(itertools.pairwise(bin_edges(weights.shape[-2], BINS)))
    columns = list(itertools.pairwise(bin_edges(weights.shape[-1], BINS)))
    cells = weights.new_empty((*weights.shape[:2], len(rows), len(columns)))
    uniform = visible.to(weights.dtype) / visible.sum(-1, keepdim=True).clamp(min=1)
    for (r, (top, bottom)), (c, (left, right)) in itertools.product(
        enumerate(rows), enumerate(columns)
    ):
        live = visible[..., top:bottom, :].any(-1).sum(-1)
        cell = weights[..., top:bottom, left:right]
        value = cell.amax((-1, -2)) if pool == "peak" else cell.sum((-1, -2)) / live
        if pool == "lift":
            even = uniform[..., top:bottom, left:right].sum((-1, -2)) / live
            value = torch.log2(value / even).clamp(-6, 6)
        shown = visible[..., top:bottom, left:right].any(-1).any(-1)
        cells[..., r, c] = value.masked_fill(~shown, torch.nan)
    return cells


CELLS = [case for case in CASES if case.batch and case.query_length and case.key_length]
SWEPT = [
    *CELLS,
    Case("bins and blocks", batch=1, heads=6, kv_heads=2, query_length=613, key_length=701,
         mask=mh.Causal()),
    Case("window over blocks", batch=1, query_length=701, key_length=701,
         mask=mh.Window(211, 3, keep_first=2)),
    Case("padding over blocks", query_length=347, key_length=347, softcap=1.3,
         mask=mh.Causal() & mh.KeyPadding(torch.arange(347) >= torch.tensor([[0], [97]]))),
]  # fmt: skip


@pytest.mark.parametrize("case", CELLS, ids=lambda case: case.name)
def test_rectangles_at_every_stage(case: Case) -> None:
    query, key, lse, options = call(case)
    expected, plain = dense(case, torch.float64), dense(case, torch.float32)
    everything = slice(None)
    for stage in ("scores", "capped", "biased", "softmax"):
        options["stage"] = stage
        whole = mh.attention_weights(
            query, key, lse, rows=everything, columns=everything, **options
        )
        assert whole.dtype == torch.float32
        assert_close(whole, expected[stage], plain[stage], what=stage)
        rows = [case.query_length - 1, 0, case.query_length // 2]
        columns = torch.tensor([-1, case.key_length // 3])
        some = mh.attention_weights(query, key, lse, rows=rows, columns=columns, **options)
        for (i, row), (j, column) in itertools.product(enumerate(rows), enumerate(columns)):
            whole[..., row, column] = some[..., i, j]
        assert_close(whole, expected[stage], plain[stage], what=f"{stage} of chosen cells")
    assert not whole[~expected["visible"]].any()


@pytest.mark.parametrize("extension", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("case", SWEPT, ids=lambda case: case.name)
def test_maps_and_received_attention(
    case: Case, extension: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if extension:
        require("native")
    else:
        monkeypatch.setattr(native, "_native", None)
    check_sweep(case)


@pytest.mark.parametrize("case", CELLS, ids=lambda case: case.name)
def test_a_sweep_in_small_blocks(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_native", None)
    if case.query_length < 100:
        monkeypatch.setattr(sweep_module, "BLOCK_ROWS", 3)
        monkeypatch.setattr(sweep_module, "BLOCK_ELEMENTS", 40)
        monkeypatch.setattr(sweep_module, "_BLOCK_COLUMNS", 4)
    monkeypatch.setattr(sweep_module, "_BUFFER_ELEMENTS", 60)
    check_sweep(case)


def check_sweep(case: Case) -> None:
    """Every map and what keys receive, against sums over the whole matrix."""
    query, key, lse, options = call(case)
    expected, plain = dense(case, torch.float64), dense(case, torch.float32)
    for pool in ("mass", "peak", "lift"):
        cells = mh.attention_map(query, key, lse, bins=BINS, pool=pool, **options)
        assert_close(cells, pooled(expected, pool), pooled(plain, pool), what=pool)
    received, mean = mh.received_attention(query, key, lse, **options)
    viewers = expected["visible"].sum(-2)
    sums = expected["softmax"].sum(-2), plain["softmax"].sum(-2)
    assert_close(received, *sums, what="received")
    assert_close(mean, sums[0] / viewers, sums[1] / viewers, what="mean over viewers")


@pytest.mark.parametrize("case", CELLS, ids=lambda case: case.name)
def test_named_keys_of_each_query(case: Case) -> None:
    query, key, lse, options = call(case)
    logits = describe_logits(query, key, **options)
    expected, plain = dense(case, torch.float64), dense(case, torch.float32)
    rows, other = torch.arange(case.query_length), torch.arange(case.query_length).flip(0)
    columns = (torch.stack((rows, other), -1)[None] * 3 + 1) % (case.key_length + 2) - 1
    weights, visible = weights_along(logits, lse, columns)
    exists = (columns >= 0) & (columns < case.key_length)
    place = columns.clamp(0, case.key_length - 1)[:, None].expand(*lse.shape, 2)

    def along(matrix: torch.Tensor) -> torch.Tensor:
        return matrix.gather(-1, place) * exists

    # The error of the whole matrix, since a few cells can be exact by luck.
    whole = plain["softmax"].double() - expected["softmax"]
    baseline = along(expected["softmax"]) + whole.abs().max()
    assert_close(weights, along(expected["softmax"]), baseline)
    assert torch.equal(visible.expand_as(weights), along(expected["visible"]).bool())
    counts = visible_keys(logits)
    assert torch.equal(counts.expand_as(lse).long(), expected["visible"].sum(-1))


def test_strongest_keys_of_rows() -> None:
    case = next(case for case in CASES if case.name == "grouped")
    query, key, lse, options = call(case)
    logits = describe_logits(query, key, **options)
    columns, weights, mean = top_keys(logits, lse, torch.tensor([0, 6]), 7)
    expected = dense(case, torch.float64)["softmax"][:, :, [0, 6]]
    assert torch.equal(columns[..., 0], expected.argmax(-1))
    assert torch.equal(columns[:, :, 0] == -1, (torch.arange(7) >= 5).expand(2, 6, 7))
    assert torch.equal(weights[columns == -1], torch.zeros(2 * 6 * 2))
    torch.testing.assert_close(weights.sum(-1)[:, :, 0], torch.ones(2, 6))
    torch.testing.assert_close(mean, expected.mean(1).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_compute_in_float32_or_float64(dtype: torch.dtype) -> None:
    case = replace(CASES[1], name="dtypes", heads=6, kv_heads=2)
    query, key, value = case.tensors(dtype)
    lse = mh.attention_with_stats(query, key, value, stats=("lse",), mask=mh.Causal()).lse
    expected, plain = dense(case, torch.float64), dense(case, torch.float32)
    cells = mh.attention_map(query, key, lse, mask=mh.Causal(), bins=BINS)
    assert cells.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close(cells.float(), pooled(expected, "mass"), pooled(plain, "mass"))


def test_rows_of_the_mass_sum_to_one_at_any_length() -> None:
    for length in (7, 211, 1031):
        query, key = torch.randn(1, 2, length, 3), torch.randn(1, 1, length, 3)
        lse = mh.attention_with_stats(query, key, key, stats=("lse",), mask=mh.Causal()).lse
        rows = mh.attention_map(query, key, lse, mask=mh.Causal()).nansum(-1)
        torch.testing.assert_close(rows, torch.ones_like(rows))


def test_a_key_that_is_hidden_does_not_exist() -> None:
    query, key = torch.randn(1, 2, 5, 3), torch.randn(1, 2, 7, 3)
    mask = mh.KeyPadding(torch.arange(7)[None] != 4)
    lse = mh.attention_with_stats(query, key, key, stats=("lse",), mask=mask).lse
    clean = mh.received_attention(query, key, lse, mask=mask)
    key[:, :, 4] = torch.nan
    for before, after in zip(clean, mh.received_attention(query, key, lse, mask=mask), strict=True):
        torch.testing.assert_close(before, after, equal_nan=True)
    weights = mh.attention_weights(
        query, key, lse, rows=slice(None), columns=slice(None), mask=mask
    )
    assert weights.isfinite().all()


def test_empty_axes() -> None:
    for query_length, key_length in ((0, 5), (5, 0)):
        query, key = torch.randn(1, 2, query_length, 3), torch.randn(1, 2, key_length, 3)
        lse = torch.full((1, 2, query_length), -torch.inf)
        assert mh.attention_map(query, key, lse).numel() == 0
        assert torch.equal(mh.received_attention(query, key, lse)[0], torch.zeros(1, 2, key_length))
        weights = mh.attention_weights(query, key, lse, rows=slice(None), columns=slice(None))
        assert weights.shape == (1, 2, query_length, key_length)


@pytest.mark.parametrize(("length", "bins"), [(1, 5), (5, 5), (7, 3), (128, 64), (131, 64)])
def test_bins(length: int, bins: int) -> None:
    values = torch.randn(2, length)
    over = Bins(length, bins)
    parts = [values[:, a:b] for a, b in itertools.pairwise(bin_edges(length, bins))]
    assert over.count == len(parts) == min(length, bins)
    assert {part.shape[1] for part in parts} <= {length // over.count, -(-length // over.count)}
    torch.testing.assert_close(over.sum(values), torch.stack([p.sum(-1) for p in parts], -1))
    torch.testing.assert_close(over.mean(values), torch.stack([p.mean(-1) for p in parts], -1))
    assert torch.equal(over.max(values), torch.stack([p.amax(-1) for p in parts], -1))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rows": [5]}, mh.ArgumentError, "between -5 and 4"),
        ({"columns": [-8]}, mh.ArgumentError, "got -8"),
        ({"rows": torch.zeros(2, 2, dtype=torch.long)}, mh.ArgumentError, "one dimension"),
        ({"rows": torch.ones(5, dtype=torch.bool)}, mh.DtypeError, "nonzero"),
        ({"columns": [0.5]}, mh.DtypeError, "integer"),
        ({"stage": "logits"}, mh.ArgumentError, "scores, capped, biased, softmax"),
        ({"lse": None}, mh.DtypeError, "attention_with_stats"),
        ({"lse": torch.zeros(1, 2, 7)}, mh.ArgumentError, r"\[1, 2, 5\]"),
        ({"key": torch.randn(1, 3, 7, 3)}, mh.ArgumentError, "evenly"),
    ],
)
def test_what_is_refused(arguments: dict[str, object], error: type, message: str) -> None:
    given = {
        "query": torch.randn(1, 2, 5, 3), "key": torch.randn(1, 1, 7, 3),
        "lse": torch.zeros(1, 2, 5), "rows": [0], "columns": [0],
    }  # fmt: skip
    with pytest.raises(error, match=message):
        mh.attention_weights(**{**given, **arguments})


@pytest.mark.parametrize("arguments", [{"bins": 0}, {"bins": True}, {"pool": "mean"}])
def test_maps_that_are_refused(arguments: dict[str, object]) -> None:
    query = torch.randn(1, 2, 5, 3)
    with pytest.raises(mh.ArgumentError, match=next(iter(arguments))):
        mh.attention_map(query, query, torch.zeros(1, 2, 5), **arguments)


# Row and column lists against the mask's own table: every rule, and cells that no slice takes.
FRAMES = {
    "positions": mh.Positions(torch.tensor([[5, 0, 3, 9, 2], [1, 1, -4, 7, 3]]), torch.arange(7))
    & mh.Window(3, 1),
    "positions, a start": mh.Positions(torch.arange(5), torch.tensor([6, -2, 0, 3, 1, 5, 4]))
    & mh.Window(1, 0, keep_first=2),
    "positions, a prefix": mh.Positions(torch.arange(5), torch.tensor([6, -2, 0, 3, 1, 5, 4]))
    & mh.PrefixCausal(torch.tensor([0, 3])),
    "ids": mh.Documents(torch.tensor([0, 0, 1, 1, -1]), torch.tensor([0, 1, 0, 1, -1, 0, 1])),
    "start of each sample": mh.QueryStart(torch.tensor([2, 0])) & mh.Causal(),
    "heads apart": mh.Window(torch.tensor([1, 4]), torch.tensor([0, 2])),
    "padding": mh.KeyPadding(torch.arange(7) > torch.tensor([[1], [3]])) & mh.Causal(),
    "one row": mh.Dense((torch.arange(7) % 3 != 1)[None]),
    "a column": mh.Dense((torch.arange(5) % 3 != 1)[:, None]),
    "dense": mh.Dense(torch.arange(70).view(2, 1, 5, 7) % 4 != 1),
}  # fmt: skip


@pytest.mark.parametrize("name", FRAMES)
def test_chosen_cells_are_those_of_the_whole_mask(name: str) -> None:
    query, key = torch.randn(2, 2, 5, 3), torch.randn(2, 2, 7, 3)
    parts = describe_logits(query, key, mask=FRAMES[name]).parts
    whole = parts.visible().expand(2, 2, 5, 7)
    rows, columns = torch.tensor([4, 0, 0, 3]), torch.tensor([6, 1, 0])
    chosen = visible_at(parts, rows, columns[None, None])
    assert torch.equal(chosen.expand(2, 2, 4, 3), whole[:, :, rows][..., columns])
    own = torch.tensor([[6, 0, 2, 2], [5, 3, 0, 1]])
    along = visible_at(parts, rows, own[..., None]).expand(2, 2, 4, 1)
    place = own[:, None, :, None].expand(2, 2, 4, 1)
    assert torch.equal(along, whole[:, :, rows].gather(-1, place))


class Footprint(TorchDispatchMode):
    """Counts operations while it is entered, and the bytes of the largest new tensor."""

    def __init__(self, *given: torch.Tensor | None) -> None:
        super().__init__()
        self.given = {x.untyped_storage().data_ptr() for x in given if x is not None}
        self.calls = self.bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.calls += 1
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, list | tuple) else (made,):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage.data_ptr() not in self.given:
                self.bytes = max(self.bytes, storage.nbytes())
        return made


@pytest.mark.parametrize("kind", ["causal", "positions", "documents", "dense", "bias"])
def test_two_columns_of_a_long_matrix_cost_two_columns(kind: str) -> None:
    length = 1009
    query, key = torch.randn(1, 2, length, 3), torch.randn(1, 1, length, 3)
    ids = torch.arange(length) // 100
    mask = {
        "positions": mh.Positions(ids, ids) & mh.Causal(),
        "documents": mh.Documents(ids),
        "dense": torch.ones(length, length, dtype=torch.bool).tril(),
    }.get(kind, mh.Causal())
    bias = torch.randn(length, length) if kind == "bias" else None
    logits = describe_logits(query, key, mask=mask, bias=bias)
    lse = torch.zeros(1, 2, length)
    with Footprint(bias, logits.parts.dense) as made:
        weights_at(logits, lse, torch.arange(length), torch.tensor([0, length - 1]))
        weights_along(logits, lse, torch.arange(length)[None, :, None])
    assert made.calls < 200, "a loop over rows"
    assert made.bytes <= 2 * 2 * 8 * length, "more than a few numbers a row"
