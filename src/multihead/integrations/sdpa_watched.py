"""A call of torch's attention as whoever watches sees it: one matrix, in the model's own frame.

What a mask tensor says may be computed block by block, but belongs together: positions, the first
key of a text and which keys are padding are read off the whole. Output and statistics come from
the same calls of the kernels as without anyone watching.

Shape suffixes: b batch, q query row, k key column.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from ..masks import KeyPadding, Mask, QueryStart, Window
from ..ops import dispatch
from ..ops.attention import attention_with_stats
from ..ops.problem import describe
from .sdpa_masks import Block, Lowered, RowRanges

_Start = int | Tensor


def run_watched(
    observer: dispatch.Observer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lowered: Lowered,
    key_visible: Tensor | None,
    scale: float | None,
) -> Tensor | None:
    """The output, shown to `observer` together with what it wants; None if it wants nothing.

    `key_visible`, bool [B, Lk], hides keys on top of what `lowered` says.
    """
    rows, columns = query.shape[2], key.shape[2]
    start = _start(lowered, rows, columns)
    whole = [_whole(lowered, rows, columns), *_padding(key_visible), _frame(start, rows, columns)]
    problem = describe(
        query,
        key,
        value,
        mask=_all(whole),
        bias=lowered.bias,
        scale=scale,
        softcap=None,
        sinks=None,
        dropout_p=0.0,
    )
    wanted = observer.wants(problem)
    if not wanted:
        return None
    outs, stats = [], []
    with unwatched():
        for block in lowered.blocks or (_everything(lowered, rows, columns),):
            some = slice(block.begin, block.end)
            rules, farther = _placed(block, start, is_whole=not lowered.blocks)
            shown = None if key_visible is None else key_visible[:, some]
            result = attention_with_stats(
                query[:, :, block.rows],
                key[:, :, some],
                value[:, :, some],
                stats=wanted,
                mask=_all([*rules, *_padding(shown)]),
                bias=lowered.bias,
                scale=scale,
            )
            outs.append(result.out)
            stats.append(_moved(result.stats, farther))
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
    observer.record(problem, out.detach(), _together(stats))
    return out


class unwatched:
    """No one sees the calls inside the block."""

    def __enter__(self) -> None:
        self._token = dispatch.observer.set(None)

    def __exit__(self, *error: object) -> None:
        dispatch.observer.reset(self._token)


def _placed(block: Block, start: _Start, *, is_whole: bool) -> tuple[list[Mask | None], int]:
    """A block's rules, its first row at `start` plus its number; and how much farther than they
    say its rows stand from their keys.

    The rules of a block end at the last key that a row sees, which need not be the row's own.
    """
    rows, columns = block.rows.stop - block.rows.start, block.end - block.begin
    place = start + block.rows.start - block.begin
    if is_whole or block.mask is None or isinstance(place, Tensor):
        return [block.mask, _frame(place, rows, columns)], 0
    beyond = columns - rows - place
    if beyond <= 0:
        return [block.mask], -beyond
    return [RowRanges(_table(_ranges(block) - block.begin)), QueryStart(place)], 0


def _moved(stats: Mapping[str, Tensor], farther: int) -> Mapping[str, Tensor]:
    """Statistics of rows that stand `farther` behind all their keys than was said."""
    if not farther or "mean_distance" not in stats:
        return stats
    return {**stats, "mean_distance": stats["mean_distance"] + farther}


def _together(stats: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([it[name].detach() for it in stats], dim=2) for name in stats[0]}


def _everything(lowered: Lowered, rows: int, columns: int) -> Block:
    return Block(slice(0, rows), 0, columns, lowered.mask)


def _padding(key_visible: Tensor | None) -> list[Mask]:
    return [] if key_visible is None else [KeyPadding(key_visible)]


def _frame(start: _Start, rows: int, columns: int) -> Mask | None:
    """What sets queries to `start`, where they do not stand there anyway."""
    is_usual = not isinstance(start, Tensor) and start == columns - rows
    return None if is_usual else QueryStart(start)


def _all(rules: list[Mask | None]) -> Mask | None:
    given = [rule for rule in rules if rule is not None]
    return functools.reduce(Mask.__and__, given) if given else None


def _whole(lowered: Lowered, rows: int, columns: int) -> Mask | None:
    """The mask of the whole matrix."""
    blocks = lowered.blocks
    if not blocks:
        return lowered.mask
    if len(blocks) == 1 and (blocks[0].begin, blocks[0].end) == (0, columns):
        return blocks[0].mask
    return RowRanges(_table(torch.cat([_ranges(block) for block in blocks])))


def _table(ranges: Tensor) -> Tensor:
    """[1, 1, rows, 1, 2]: one range a row."""
    return ranges[None, None, :, None]


def _ranges(block: Block) -> Tensor:
    """The columns that each row of a block sees: int32 [rows, 2]."""
    count = block.rows.stop - block.rows.start
    end_q = torch.full((count,), block.end, dtype=torch.int32)
    if block.mask is not None:
        end_q -= torch.arange(count - 1, -1, -1, dtype=torch.int32)
    begin_q = torch.full_like(end_q, block.begin)
    if isinstance(block.mask, Window) and isinstance(block.mask.left, int):
        begin_q = begin_q.maximum(end_q - block.mask.left - 1)
    return torch.stack((begin_q, end_q), dim=-1)


def _start(lowered: Lowered, rows: int, columns: int) -> _Start:
    """Where the first query stands: an int, or int32 [B] where samples differ.

    As many queries as keys are the same tokens. Where the last key that a query sees moves on with
    the queries, it is the query's own: there may be room behind it, in a cache of fixed size. Else
    queries are the newest tokens.
    """
    usual = columns - rows
    if not usual:
        return usual
    if lowered.blocks:
        moving = [it for it in lowered.blocks if it.mask is not None]
        return moving[0].end - moving[0].rows.stop if moving else usual
    last_bq = _last_seen(lowered, rows, columns)
    if last_bq is None:
        return usual
    row_q = torch.arange(rows)
    seen_bq = last_bq >= 0
    offset_bq = last_bq - row_q
    low_b = torch.where(seen_bq, offset_bq, columns).amin(-1)
    high_b = torch.where(seen_bq, offset_bq, -rows).amax(-1)
    start_b = torch.where(low_b == high_b, low_b, usual)
    first = int(start_b[0])
    return first if bool((start_b == first).all()) else start_b.to(torch.int32)


def _last_seen(lowered: Lowered, rows: int, columns: int) -> Tensor | None:
    """The last column that any head of each query sees, int64 [B|1, Lq], -1 for none.

    None for a mask that says nothing of single queries.
    """
    if lowered.bias is not None:
        bias = lowered.bias.detach()
        if bias.shape[2] != rows:
            return None
        visible = (bias > torch.finfo(bias.dtype).min).expand(-1, -1, -1, columns)
    elif lowered.mask is None:
        return None
    else:
        parts = lowered.mask.lower(rows, columns)
        if parts.ranges is not None:
            ends = torch.where(parts.ranges[..., 0] < parts.ranges[..., 1], parts.ranges[..., 1], 0)
            return ends.amax(-1).amax(1).long() - 1
        table = parts.dense if parts.key_visible is None else parts.key_visible[:, None, None]
        if table is None or table.shape[2] != rows:
            return None
        visible = table.expand(-1, -1, -1, columns)
    seen_bqk = visible.any(1)
    last_bq = columns - 1 - seen_bqk.flip(-1).to(torch.uint8).argmax(-1)
    return torch.where(seen_bqk.any(-1), last_bq, -1)
