"""The suite `attention`: the native kernels against torch's own, one call at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from multihead.bench.limits import Limits
from multihead.bench.timing import Timing, alternate
from multihead.bench.verify import check
from multihead.errors import BackendError
from multihead.masks import Causal, Mask, SlidingWindow
from multihead.ops import STATISTICS, attention, attention_with_stats

BATCH, HEADS, WIDTH = 1, 8, 64

USUAL_STATISTICS = ("lse", "entropy", "max_logit")

Entry = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One comparison: a shape, a dtype and a mask."""

    kind: str
    length: int
    dtype: torch.dtype
    mask: Mask | None = None

    @property
    def dtype_name(self) -> str:
        """`float32` or `bfloat16`."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def name(self) -> str:
        """What `--only` takes."""
        return f"{self.kind}-{self.length}-{self.dtype_name}"

    @property
    def operations(self) -> int:
        """Multiplications and additions of the two products, over visible pairs alone."""
        pairs = (
            self.length**2
            if self.mask is None
            else self.mask.visible_pairs(self.length, self.length)
        )
        return 4 * BATCH * HEADS * WIDTH * pairs


DTYPES = (torch.float32, torch.bfloat16)
ROWS: tuple[Row, ...] = (
    *(Row("full", length, dtype) for dtype in DTYPES for length in (1024, 4096)),
    *(Row("causal", length, dtype, Causal()) for dtype in DTYPES for length in (1024, 4096)),
    *(Row("window-256", 8192, dtype, SlidingWindow(256)) for dtype in DTYPES),
    *(Row("statistics", 4096, dtype) for dtype in DTYPES),
)


def measure(row: Row, limits: Limits, *, seconds: float = 3.0) -> Entry:
    """Time a row for about `seconds`, verify its results, and return its entry in the document.

    Raises:
        BackendError: the native kernels cannot serve, or a result is wrong.
    """
    if row.kind == "statistics":
        return _statistics_overhead(row, seconds)
    return _against_torch(row, limits, seconds)


def _against_torch(row: Row, limits: Limits, seconds: float) -> Entry:
    query, key, value = _inputs(row)
    ours = partial(attention, query, key, value, mask=row.mask, backend="native")
    theirs = _torch_call(row, query, key, value)
    with torch.inference_mode():
        times = alternate({"native": ours, "torch": theirs}, seconds=seconds)
        result = check(query, key, value, row.mask, ours(), theirs())
    if not result.passed:
        raise BackendError(
            f"{row.name}: the native result differs from float64 by {result.error:.2e}; torch's by "
            f"{result.peer_error:.2e}, so {result.bound:.2e} is allowed. Its time means nothing."
        )
    rate = row.operations / times["native"].median / 1e9
    limit_name, limit = limits.of(row.dtype)
    return {
        **_head(row, times),
        "ratio": times["torch"].median / times["native"].median,
        "gflops": rate,
        "limit": limit_name,
        "limit_share": rate / limit,
        "check": result.to_json(),
    }


def _statistics_overhead(row: Row, seconds: float) -> Entry:
    query, key, value = _inputs(row)

    def with_stats(stats: tuple[str, ...]) -> Callable[[], Tensor]:
        return lambda: attention_with_stats(query, key, value, stats=stats, backend="native").out

    plain = partial(attention, query, key, value, backend="native")
    some, every = with_stats(USUAL_STATISTICS), with_stats(STATISTICS)
    with torch.inference_mode():
        times = alternate({"plain": plain, "usual": some, "all": every}, seconds=seconds)
        if not (torch.equal(plain(), some()) and torch.equal(plain(), every())):
            raise BackendError(f"{row.name}: asking for statistics changed the output.")
    return {
        **_head(row, times),
        "usual_overhead": times["usual"].median / times["plain"].median - 1,
        "all_overhead": times["all"].median / times["plain"].median - 1,
    }


def _head(row: Row, times: dict[str, Timing]) -> Entry:
    return {
        "name": row.name,
        "kind": row.kind,
        "dtype": row.dtype_name,
        "length": row.length,
        "heads": HEADS,
        "width": WIDTH,
        "times": {name: timing.to_json() for name, timing in times.items()},
    }


def _inputs(row: Row) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(row.length)
    query, key, value = torch.randn(3, BATCH, HEADS, row.length, WIDTH, generator=generator).to(
        row.dtype
    )
    return query, key, value


def _torch_call(row: Row, query: Tensor, key: Tensor, value: Tensor) -> Callable[[], Tensor]:
    if row.mask is None:
        return partial(scaled_dot_product_attention, query, key, value)
    if row.kind == "causal":  # as many queries as keys: torch's triangle is ours
        return partial(scaled_dot_product_attention, query, key, value, is_causal=True)
    visible = row.mask.to_dense(row.length, row.length)
    return partial(scaled_dot_product_attention, query, key, value, attn_mask=visible)
