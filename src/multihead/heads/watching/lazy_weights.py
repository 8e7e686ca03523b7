"""Rows of attention weights under TransformerLens' names, each computed when it is asked for.

Of a layer's last call stay its queries, its keys and the log-sum-exp of each row: O(N) memory, from
which any cell of the N x N matrix follows exactly.

Shape suffixes: b batch, h head, q query row, k key column, d width.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ...errors import ArgumentError, ModelError
from ...masks import MaskParts
from ...ops.problem import ALiBi, Logits, Problem
from ...ops.weights import rectangle_at, weights_at

PATTERN, SCORES = "hook_pattern", "hook_attn_scores"

# Tokens up to which whole matrices are handed out: of 270 heads these are 283 MB in float32.
MOST_TOKENS = 512

# A model has few kinds of masks, but decoding makes one of another shape at each step.
_MOST_COPIES = 8

_Index = int | slice | Sequence[int] | Tensor | np.ndarray[Any, Any]
_AXES = ("batch", "head", "query", "key")


class Copies:
    """Copies of tensors; layers that share a mask share its copy."""

    def __init__(self) -> None:
        self._latest: dict[tuple[Any, ...], Tensor] = {}

    def of(self, value: Any) -> Any:
        """A tensor's numbers as they are now; what is no tensor as it is."""
        if not isinstance(value, Tensor):
            return value
        once = value.detach()
        for axis, step in enumerate(value.stride()):
            once = once.narrow(axis, 0, 1) if step == 0 and value.shape[axis] else once
        kind = once.shape, once.dtype, once.device
        copy = self._latest.get(kind)
        if copy is None or not torch.equal(copy, once):
            if len(self._latest) >= _MOST_COPIES:
                del self._latest[next(iter(self._latest))]
            copy = self._latest[kind] = once.clone()
        return copy.expand(value.shape)


@dataclass(frozen=True, eq=False)
class KeptCall:
    """Queries, keys, mask and bias of one call, copied, since caches, optimizers and users write
    to theirs; `lse` [B, H, Lq].
    """

    call: Logits
    lse: Tensor

    @classmethod
    def of(cls, problem: Problem, lse: Tensor, copies: Copies | None = None) -> KeptCall:
        """What `problem`, whose rows' log-sum-exp is `lse`, leaves to keep.

        Layers that are given the same `copies` share those of their masks.
        """
        copies = copies or Copies()
        bias = problem.bias
        call = Logits(
            query=problem.query.detach().clone(),
            key=problem.key.detach().clone(),
            parts=_parts_copied(problem.parts, copies),
            bias=ALiBi(copies.of(bias.slopes)) if isinstance(bias, ALiBi) else copies.of(bias),
            scale=problem.scale,
            softcap=problem.softcap,
        )
        return cls(call, lse.detach())

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[B, H, Lq, Lk]"""
        call = self.call
        return call.batch, call.heads, call.query_length, call.key_length

    @torch.no_grad()
    def cells(
        self, stage: Literal["softmax", "logits"], index: tuple[Tensor, Tensor, Tensor, Tensor]
    ) -> Tensor:
        """The cells of some samples, heads, queries and keys: [b, h, q, k] in the compute dtype."""
        samples, heads, rows, columns = index
        call = _taken(self.call, samples, heads)
        if stage == "logits":
            return rectangle_at(call, rows, columns).logits
        return weights_at(call, self.lse[samples][:, heads], rows, columns)


@dataclass(frozen=True, eq=False)
class LazyRows:
    """A tensor [batch, head, query, key] whose cells are computed when they are asked for.

    Indexed like a tensor: by integers, slices, or for one axis or several (taken as a product)
    lists of integers. `rows[0, 5, 100:110]` computes ten rows of one head and returns a tensor.
    """

    _kept: KeptCall
    _stage: Literal["softmax", "logits"]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[batch, head, query, key]"""
        return self._kept.shape

    @property
    def ndim(self) -> int:
        """4"""
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of what is returned: float32, or float64 of a model in float64."""
        return self._kept.call.compute_dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[sample] for sample in range(len(self)))

    def __repr__(self) -> str:
        return f"LazyRows(shape={list(self.shape)})"

    def __getitem__(self, index: Any) -> Tensor:
        parts = _four(index)
        device = self._kept.lse.device
        places = [
            _places(part, size, axis, device)
            for part, size, axis in zip(parts, self.shape, _AXES, strict=True)
        ]
        cells = self._kept.cells(self._stage, (places[0], places[1], places[2], places[3]))
        for axis in reversed(range(4)):
            if isinstance(parts[axis], int | np.integer):
                cells = cells.select(axis, 0)
        return cells

    def detach(self) -> Tensor:
        """The whole as a tensor, as tools ask a cache's tensors for it (attnview's `from_cache`);
        for texts of up to MOST_TOKENS tokens.
        """
        _check_size(self.shape)
        return self[:]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """The whole as an array; for texts of up to MOST_TOKENS tokens."""
        whole = self.detach().cpu().numpy()
        return whole if dtype is None else whole.astype(dtype)


class LazyWeights(Mapping[str, LazyRows]):
    """Attention weights and scores of each layer's last call, under TransformerLens' names.

    `blocks.{l}.attn.hook_pattern` are the weights after softmax, `blocks.{l}.attn.hook_attn_scores`
    the logits before it, -inf where a key is hidden; each stands for a tensor [batch, head, query,
    key]. `l` is the number in the module's name, or its place where these are not distinct; see
    `layers`. Kept by `watch(model, keep="weights")`.
    """

    def __init__(self, kept: Sequence[tuple[str, KeptCall]]) -> None:
        numbers = [re.search(r"(?:^|\.)(\d+)(?:\.|$)", name) for name, _ in kept]
        blocks = [int(number[1]) for number in numbers if number is not None]
        if len(set(blocks)) < len(kept):
            blocks = list(range(len(kept)))
        self.layers: Mapping[int, str] = {
            block: name for block, (name, _) in zip(blocks, kept, strict=True)
        }
        self._kept = {block: call for block, (_, call) in zip(blocks, kept, strict=True)}

    def __getitem__(self, name: str) -> LazyRows:
        match = re.fullmatch(rf"blocks\.(\d+)\.attn\.({PATTERN}|{SCORES})", str(name))
        if match is None or int(match[1]) not in self._kept:
            raise KeyError(self._absent(name))
        stage: Literal["softmax", "logits"] = "softmax" if match[2] == PATTERN else "logits"
        return LazyRows(self._kept[int(match[1])], stage)

    def __iter__(self) -> Iterator[str]:
        for block in self._kept:
            yield f"blocks.{block}.attn.{SCORES}"
            yield f"blocks.{block}.attn.{PATTERN}"

    def __len__(self) -> int:
        return 2 * len(self._kept)

    def __repr__(self) -> str:
        return f"LazyWeights(layers={len(self._kept)})"

    def matrices(self, sample: int = 0, *, most_tokens: int = MOST_TOKENS) -> list[Tensor]:
        """The whole weights of one text, layer by layer, each [1, H, Lq, Lk].

        The list is what BertViz' `head_view` and `model_view` take; an entry's `[0]` is what
        CircuitsVis' `attention_patterns` and attnview's `display` take.

        Raises ArgumentError for a text of more than `most_tokens` tokens, and ModelError where
        nothing was kept.
        """
        if not self._kept:
            raise ModelError(_NOTHING_KEPT)
        for call in self._kept.values():
            _check_size(call.shape, most_tokens)
        return [LazyRows(call, "softmax")[[sample]] for call in self._kept.values()]

    def _absent(self, name: object) -> str:
        if not self._kept:
            return _NOTHING_KEPT
        blocks = ", ".join(map(str, self._kept))
        return (
            f"No {name!r}: there are blocks.{{l}}.attn.{PATTERN} and blocks.{{l}}.attn.{SCORES} "
            f"for l in {blocks}."
        )


_NOTHING_KEPT = (
    "No weights were kept: watch with keep='weights', and read record().patterns before saving."
)


def _check_size(shape: tuple[int, int, int, int], most_tokens: int = MOST_TOKENS) -> None:
    tokens = max(shape[2:])
    if tokens > most_tokens:
        raise ArgumentError(
            f"A whole matrix is handed out for up to {most_tokens} tokens; this text has {tokens}. "
            "Ask for rows, as in patterns[name][0, head, 100:200], or pass a larger most_tokens to "
            "matrices()."
        )


def _four(index: Any) -> list[_Index]:
    """An index into four axes, the missing ones as whole slices."""
    parts = list(index) if isinstance(index, tuple) else [index]
    dots = [place for place, part in enumerate(parts) if part is Ellipsis]
    if len(parts) - len(dots) > 4 or len(dots) > 1:
        raise ArgumentError(f"There are four axes, {', '.join(_AXES)}; got {len(parts)} indices.")
    whole: list[_Index] = [slice(None)] * (4 - len(parts) + len(dots))
    at = dots[0] if dots else len(parts)
    return [*parts[:at], *whole, *parts[at + len(dots) :]]


def _places(part: _Index, size: int, axis: str, device: torch.device) -> Tensor:
    """The places along an axis that an index names: int64."""
    if isinstance(part, slice):
        return torch.arange(*part.indices(size), device=device)
    try:
        places = torch.as_tensor(part, device=device)
    except (RuntimeError, TypeError, ValueError):
        places = torch.empty(0)
    if places.dtype.is_floating_point or places.dtype == torch.bool or places.ndim > 1:
        raise ArgumentError(
            f"The {axis} axis takes an integer, a slice or a list of integers; got {part!r}."
        )
    places = places.reshape(-1).long()
    wrong = places[(places < -size) | (places >= size)]
    if len(wrong):
        raise ArgumentError(
            f"The {axis} axis has {size} places, {-size} to {size - 1}; got {int(wrong[0])}."
        )
    return places % size if size else places


def _taken(call: Logits, samples: Tensor, heads: Tensor) -> Logits:
    """The call of some samples and heads alone, each head with keys of its own."""
    bias = call.bias
    if isinstance(bias, ALiBi):
        bias = ALiBi(bias.slopes.detach()[heads])
    elif bias is not None:
        bias = _along(_along(bias, samples, 0), heads, 1)
    return Logits(
        query=call.query[samples][:, heads],
        key=call.key[samples][:, heads // call.group],
        parts=_parts_taken(call.parts, samples, heads),
        bias=bias,
        scale=call.scale,
        softcap=call.softcap,
    )


def _parts_copied(parts: MaskParts, copies: Copies) -> MaskParts:
    names = (*_PER_SAMPLE, "left", "right")
    return replace(parts, **{name: copies.of(getattr(parts, name)) for name in names})


_PER_SAMPLE = (
    "start",
    "first",
    "prefix",
    "key_lengths",
    "query_lengths",
    "key_visible",
    "query_ids",
    "key_ids",
    "query_positions",
    "key_positions",
    "ranges",
    "dense",
)


def _parts_taken(parts: MaskParts, samples: Tensor, heads: Tensor) -> MaskParts:
    changed: dict[str, Any] = {
        name: _along(getattr(parts, name), samples, 0) for name in _PER_SAMPLE
    }
    for name, axis in (("left", 0), ("right", 0)):
        changed[name] = _along(getattr(parts, name), heads, axis)
    for name in ("ranges", "dense"):
        changed[name] = _along(changed[name], heads, 1)
    return replace(parts, **changed)


def _along(value: Any, places: Tensor, axis: int) -> Any:
    """`value` at `places` of an axis, where it tells them apart; what is no tensor as it is."""
    if not isinstance(value, Tensor) or value.shape[axis] == 1:
        return value
    return value.index_select(axis, places)
