"""Statistics of attention from queries and keys alone, on all rows or on some of them.

Shape suffixes: b batch, h head, q query row, k key column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..masks import Mask, MaskParts
from . import library
from .cells import visible_at
from .problem import ALiBi, Problem, checked_stats, describe
from .weights import Places, place_index


@torch.no_grad()
def attention_stats(
    query: Tensor,
    key: Tensor,
    *,
    stats: Sequence[str] = ("lse", "entropy", "max_logit"),
    rows: Places | Literal["all"] = "all",
    mask: Mask | Tensor | None = None,
    bias: Tensor | ALiBi | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> dict[str, Tensor]:
    """The statistics of `attention_with_stats` without its output, hence without values.

    It stands beside any other kernel that computes the output: give it the same arguments.

    Args:
        query: [B, H, Lq, D].
        key: [B, Hkv, Lk, D].
        stats: names as in `attention_with_stats`.
        rows: "all", or the query rows that are wanted: a slice, integers or a 1-D integer tensor;
            negative ones count from the end. Time and memory are those of these rows.
        mask, bias, scale, softcap, sinks: as in `attention`.

    Returns:
        Each statistic [B, H, rows], float32 (float64 for float64 input; argmax int64), detached.

    Raises what `attention` raises, and ArgumentError for an unknown statistic or a row outside.
    """
    call = describe(
        query.detach() if isinstance(query, Tensor) else query,
        key.detach() if isinstance(key, Tensor) else key,
        # Some value has to be there; the narrowest costs least.
        key[..., :1].detach() if isinstance(key, Tensor) and key.ndim == 4 else key,
        mask=mask,
        bias=bias,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        dropout_p=0.0,
        stats=stats,
    )
    if isinstance(rows, str):
        if rows != "all":
            raise ArgumentError(f"rows must be 'all', a slice or integers; got {rows!r}.")
        return statistics_of(call, call.stats)
    index = place_index(rows, call.query_length, "rows", call.query.device)
    return statistics_of(call, call.stats, index)


@torch.no_grad()
def statistics_of(
    call: Problem, stats: Sequence[str], rows: Tensor | None = None
) -> dict[str, Tensor]:
    """`stats` of a described call, [B, H, Lq], or of the rows of an int64 index, [B, H, rows]."""
    names = checked_stats(stats)
    alone = replace(
        call if rows is None else at_rows(call, rows),
        value=call.key[..., :1],
        stats=names,
        bins=None,
        dropout=None,
    )
    _, found = library.run(alone, "auto")
    return {name: found[name] for name in names}


def at_rows(call: Problem, rows: Tensor) -> Problem:
    """The call of these query rows alone, int64 [q]; they see what they saw among all."""
    parts = call.parts
    visible_bhqk = None
    if not parts.hides_nothing:
        columns = torch.arange(call.key_length, device=rows.device)
        visible_bhqk = visible_at(parts, rows, columns[None, None])
    positions_bq = parts.query_position(slice(0, call.query_length))[:, 0, rows]
    taken = MaskParts(
        query_length=len(rows),
        key_length=call.key_length,
        device=rows.device,
        first=parts.first,
        query_positions=positions_bq.to(torch.int32),
        key_positions=parts.key_positions,
        dense=visible_bhqk,
    )
    bias = call.bias
    if isinstance(bias, Tensor) and bias.shape[2] != 1:
        bias = bias[:, :, rows]
    return replace(call, query=call.query[:, :, rows], parts=taken, bias=bias)
