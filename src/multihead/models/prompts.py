"""Prompts of any form as one batch whose rows end in the same column.

Rows that end together continue together: every cache then holds the same number of columns for each
row, and the newest token is the last column of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ..errors import ArgumentError, DtypeError
from ..masks import KeyPadding

Prompts = Tensor | Sequence[int] | Sequence[Sequence[int]] | Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class Batch:
    """Prompts as columns.

    Attributes:
        token_ids: [B, L] int64; columns before a row's first token hold 0, which nothing reads.
        visible: bool [B, L], True where there is a token; None if every row fills its columns.
    """

    token_ids: Tensor
    visible: Tensor | None


def batch_of(
    prompts: Prompts, padding: KeyPadding | None = None, device: torch.device | str = "cpu"
) -> Batch:
    """Gather prompts, whatever their form, at the right end of common columns.

    Args:
        prompts: integer tensor [L] or [B, L]; a sequence of tokens; or a sequence of rows (tensors
            or sequences of tokens) of any lengths.
        padding: which entries of a tensor [B, L] are tokens; on the left, on the right or inside.
        device: where the batch shall be.

    Raises:
        ArgumentError: no prompt, a prompt without a token, or a padding of another shape.
        DtypeError: tokens that are not integers.
    """
    rows = _rows(prompts, padding, device)
    if not rows:
        raise ArgumentError("prompts must hold at least one row; got none.")
    lengths = [row.numel() for row in rows]
    empty = [index for index, length in enumerate(lengths) if length == 0]
    if empty:
        raise ArgumentError(
            f"prompt {empty[0]} has no token. A model continues at least one: begin with its start "
            "token."
        )
    longest = max(lengths)
    if min(lengths) == longest:
        return Batch(torch.stack(rows), None)
    token_ids = torch.zeros(len(rows), longest, dtype=torch.int64, device=device)
    for row, tokens in zip(token_ids, rows, strict=True):
        row[longest - tokens.numel() :] = tokens
    first = longest - torch.tensor(lengths, device=device)
    return Batch(token_ids, torch.arange(longest, device=device) >= first[:, None])


def _rows(prompts: Prompts, padding: KeyPadding | None, device: torch.device | str) -> list[Tensor]:
    if isinstance(prompts, Tensor):
        return _tensor_rows(prompts, padding, device)
    if not isinstance(prompts, Sequence) or isinstance(prompts, str):
        raise DtypeError(
            f"prompts must be tokens: an integer tensor, or lists of integers; got "
            f"{type(prompts).__name__}. A text is encoded first, an array is "
            "torch.as_tensor(array), and a tokenizer's result holds its tokens as input_ids."
        )
    if padding is not None:
        raise ArgumentError(
            "padding says which entries of a tensor [B, L] are tokens; prompts of other forms have "
            "their own lengths. Leave it out."
        )
    several = not prompts or isinstance(prompts[0], Tensor | Sequence)
    given = cast(Sequence[Tensor | Sequence[int]], prompts if several else [prompts])
    rows = [_tokens(row, device) for row in given]
    for index, row in enumerate(rows):
        if row.ndim != 1:
            raise ArgumentError(
                f"prompt {index} must be one row of tokens; got shape {tuple(row.shape)}."
            )
    return rows


def _tensor_rows(
    prompts: Tensor, padding: KeyPadding | None, device: torch.device | str
) -> list[Tensor]:
    if prompts.ndim not in (1, 2):
        raise ArgumentError(
            f"prompts must be [B, L] or [L]; got a tensor of shape {tuple(prompts.shape)}."
        )
    tokens = _tokens(prompts, device)
    rows = [tokens] if tokens.ndim == 1 else list(tokens)
    if padding is None:
        return rows
    if not isinstance(padding, KeyPadding):
        raise DtypeError(
            f"padding must be a KeyPadding; got {type(padding).__name__}. Write "
            "multihead.KeyPadding(attention_mask.bool())."
        )
    shape = tuple(padding.visible.shape)
    if shape != (len(rows), prompts.shape[-1]):
        raise ArgumentError(
            f"padding must have the shape of prompts, {tuple(prompts.shape)}; got {shape}."
        )
    visible = padding.visible.to(device)
    return [row[mark] for row, mark in zip(rows, visible, strict=True)]


def _tokens(row: Tensor | Sequence[int], device: torch.device | str) -> Tensor:
    try:
        tokens = row if isinstance(row, Tensor) else torch.as_tensor(list(row))
    except (TypeError, ValueError):
        raise DtypeError(f"a prompt must be a row of integers; got {row!r:.60}.") from None
    if tokens.numel() == 0:
        tokens = tokens.long()
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise DtypeError(f"tokens must be integers; got {tokens.dtype}.")
    return tokens.to(device=device, dtype=torch.int64)
