"""The same calls by torch: its own function, and the best way to write each with its operations.

Shapes: b batch, h head, g KV head, q query, k key, d width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from multihead.bench.case import Case
from multihead.masks import Causal


def sdpa(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Callable[[], Tensor]:
    """torch's function as its documentation would have it called: a dense mask but for a triangle.

    Grouped queries are asked for by `enable_gqa`.
    """
    call: Callable[..., Tensor] = partial(scaled_dot_product_attention, query, key, value)
    if case.heads != case.kv_heads:
        call = partial(call, enable_gqa=True)
    if case.mask is None:
        return call
    if isinstance(case.mask, Causal) and case.queries == case.keys:
        return partial(call, is_causal=True)  # its triangle is ours where the lengths are equal
    return partial(call, attn_mask=case.mask.to_dense(case.queries, case.keys))


def matmul(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Callable[[], Tensor]:
    """Two products and a softmax, the table of scores between them; a mask is a table to add."""
    query = query * case.width**-0.5
    hidden = None
    if case.mask is not None:
        visible = case.mask.to_dense(case.queries, case.keys)
        hidden = torch.zeros(visible.shape, dtype=case.dtype).masked_fill_(~visible, -torch.inf)

    def call() -> Tensor:
        scores_bhqk = query @ key.mT
        if hidden is not None:
            scores_bhqk += hidden
        return torch.softmax(scores_bhqk, dim=-1) @ value

    return call


def grouped_matmul(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One query a head, the heads of a group side by side: each KV head is read once."""
    batch, heads, _, width = query.shape
    rows = query.reshape(batch, key.shape[1], -1, width) * width**-0.5
    weights = torch.softmax(rows @ key.mT, dim=-1)
    return (weights @ value).reshape(batch, heads, 1, width)


def window_blocks(
    size: int, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """A causal window as a batch of blocks: `size` queries and the 2 `size` keys they may see.

    The blocks of keys overlap in memory, so nothing is copied. Returns the call, and the call with
    its result as [1, H, L, D].
    """
    _, heads, length, width = query.shape
    blocks = length // size

    def overlapping(x: Tensor) -> Tensor:
        padded = torch.cat([x.new_zeros(heads, size, width), x[0]], dim=1)
        row, step, column = padded.stride()
        shape, strides = (blocks, heads, 2 * size, width), (size * step, row, step, column)
        return padded.as_strided(shape, strides)

    q = query[0].unflatten(1, (blocks, size)).transpose(0, 1)
    k, v = overlapping(key), overlapping(value)
    # A block's first column stands `size` before its first query: row i sees i + 1 to i + size.
    i, j = torch.arange(size)[:, None], torch.arange(2 * size)[None]
    visible = ((j > i) & (j <= i + size)).expand(blocks, 1, size, 2 * size).clone()
    visible[0] &= j >= size  # what lies before the first key is padding

    call: Callable[[], Tensor] = partial(scaled_dot_product_attention, q, k, v, attn_mask=visible)

    def result() -> Tensor:
        return call().transpose(0, 1).reshape(1, heads, length, width)

    return call, result


def batched_documents(
    count: int, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Documents of equal length as a batch [count, H, L, D], copied before the call.

    Returns the call, and the call with its result as [1, H, count * L, D].
    """

    def rows(x: Tensor) -> Tensor:
        heads, length, width = x.shape[1:]
        return x.reshape(heads, count, length // count, width).transpose(0, 1).contiguous()

    q, k, v = map(rows, (query, key, value))

    call: Callable[[], Tensor] = partial(scaled_dot_product_attention, q, k, v)

    def result() -> Tensor:
        return call().transpose(0, 1).reshape(query.shape)

    return call, result
