"""Rectangles of the logit matrix, computed when needed and never all at once.

Shape suffixes: b batch, g KV head, h query head, q query row, k key column, d width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from .problem import ALiBi, Logits

# Logits held at a time by a sweep over query rows, in elements: 2 MiB of float32, of which a
# backward pass holds a dozen. Blocks of 32 MiB take twice the time: each is fresh pages.
BLOCK_ELEMENTS = 1 << 19

_UNCHANGED = nullcontext()


@dataclass(frozen=True, eq=False)
class Rectangle:
    """One rectangle of the matrix at every stage; all [B, H, q, k] in the compute dtype.

    `qk` is `scale * q.k`, `capped` after softcap, `logits` after bias and mask (hidden = -inf),
    `visible` a bool tensor that broadcasts to them, or None where nothing is hidden.
    """

    rows: slice
    columns: slice
    qk: Tensor
    capped: Tensor
    biased: Tensor
    visible: Tensor | None

    @property
    def logits(self) -> Tensor:
        if self.visible is None:
            return self.biased
        return self.biased.masked_fill(~self.visible, -torch.inf)

    def hide(self, tensor: Tensor) -> Tensor:
        """`tensor` with 0 where a pair is hidden, whatever stood there."""
        return tensor if self.visible is None else tensor.masked_fill(~self.visible, 0)


def rectangle(call: Logits, rows: slice, columns: slice) -> Rectangle:
    """The logits of `rows` x `columns`; every step in the compute dtype."""
    query = call.query[:, :, rows].to(call.compute_dtype)
    key = call.key[:, :, columns].to(call.compute_dtype)
    qk = grouped_matmul(query, key.transpose(-1, -2)).mul_(call.scale)
    capped = qk if call.softcap is None else call.softcap * torch.tanh(qk / call.softcap)
    parts = call.parts
    visible = None if parts.hides_nothing else parts.visible(rows, columns)
    biased = capped
    if isinstance(call.bias, ALiBi):
        distance = distances(call, rows, columns).to(capped.dtype)
        biased = capped - call.bias.slopes.to(capped.dtype)[:, None, None] * distance
    elif call.bias is not None:
        bias = bias_rectangle(call.bias, rows, columns).to(capped.dtype)
        biased = capped + bias
        hidden = bias == -torch.inf
        if bool(hidden.any()):
            visible = ~hidden if visible is None else visible & ~hidden
    return Rectangle(rows, columns, qk, capped, biased, visible)


def row_blocks(call: Logits) -> Iterator[tuple[slice, slice]]:
    """Query rows, a few at a time, with the key columns that any of them may see.

    O(N) memory: one block holds at most BLOCK_ELEMENTS logits, or one row.
    """
    per_row = max(1, call.batch * call.heads * call.key_length)
    rows_at_a_time = max(1, min(BLOCK_ELEMENTS // per_row, 256))
    for begin in range(0, call.query_length, rows_at_a_time):
        rows = slice(begin, min(begin + rows_at_a_time, call.query_length))
        yield rows, slice(*call.parts.key_bounds(rows))


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Products as they are written, where an autocast region would round them to its dtype."""
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return _UNCHANGED
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return _UNCHANGED


def grouped_matmul(left_bhqx: Tensor, right_bgxy: Tensor) -> Tensor:
    """`left @ right` where H query heads read G KV heads in order, without repeating them."""
    batch, heads, rows, width = left_bhqx.shape
    kv_heads = right_bgxy.shape[1]
    with full_precision(left_bhqx.device):
        if heads == kv_heads:
            return left_bhqx @ right_bgxy
        grouped = left_bhqx.reshape(batch, kv_heads, (heads // kv_heads) * rows, width)
        return (grouped @ right_bgxy).reshape(batch, heads, rows, right_bgxy.shape[-1])


def distances(call: Logits, rows: slice, columns: slice) -> Tensor:
    """`|p - j|` of a rectangle, int64 [B|1, 1, q, k]."""
    position_q = call.parts.query_position(rows)[..., None]
    return (position_q - call.parts.key_position(columns)).abs()


def bias_rectangle(bias: Tensor, rows: slice, columns: slice) -> Tensor:
    """A rectangle of a bias that may be broadcast along rows or columns."""
    if bias.shape[2] != 1:
        bias = bias[:, :, rows]
    return bias if bias.shape[3] == 1 else bias[..., columns]
