"""Windows of layers and of their single heads, as `multihead.cost` describes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .. import cost
from ..errors import ArgumentError
from ..masks import Window
from ..nn import MultiHeadAttention
from ..ops.split_key_values import UNBOUNDED
from .hf_windows import head_window


def window_fields(window: Window | None, heads: int) -> dict[str, Any]:
    """What the window of a layer of `heads` heads says, as fields of `cost.Attention`.

    A window without an end ahead is told as a causal model reads it: nothing ahead.

    Raises ArgumentError for a window without an end behind, ends ahead for single heads, or a
    tensor without numbers.
    """
    if window is None:
        return {}
    if window.left is None or isinstance(window.right, torch.Tensor):
        raise ArgumentError(
            "a window is counted where it has an end behind, and one ahead for all heads; got "
            f"{window}. Count its pairs with window.visible_pairs(queries, keys)."
        )
    fields: dict[str, Any] = {"window_ahead": window.right or 0, "keep_first": window.keep_first}
    if isinstance(window.left, torch.Tensor):
        return fields | {"head_windows": _of_heads(window.left, heads)}
    return fields | {"window": window.left + 1}


def as_causal(layer: cost.Layer) -> cost.Layer:
    """A layer of a causal model, whose windows show nothing ahead."""
    attention = layer.attention
    if not isinstance(attention, cost.Attention) or not attention.window_ahead:
        return layer
    return replace(layer, attention=replace(attention, window_ahead=0))


def check_ends_ahead(layer: nn.Module) -> None:
    """Raise ArgumentError where a layer that sees both ways has a window without an end ahead, or
    windows of single heads.
    """
    window = layer.window if isinstance(layer, MultiHeadAttention) else None
    if window is None:
        return
    if window.right is None or isinstance(window.left, torch.Tensor):
        raise ArgumentError(
            "in an encoder a window is counted where all heads have one with two ends; got "
            f"{window}. Count its pairs with window.visible_pairs(queries, keys)."
        )


def with_restricted_heads(described: cost.Model, module: nn.Module) -> cost.Model:
    """The description of a transformers model with the windows that its heads are restricted to.

    Raises ArgumentError for restricted heads of anything but a decoder, of latent attention, or
    that keep first tokens in a layer whose own window drops them.
    """
    for part in module.modules():
        window = head_window(part)
        if window is None or window.left is None:
            continue
        index = getattr(part, "layer_idx", None)
        if not described.causal or described.source is not None or index is None:
            raise ArgumentError(
                "windows of single heads are counted in decoders alone; got one in a "
                f"{type(part).__name__} of {type(module).__name__}."
            )
        attention = described.layers[index].attention
        windows: list[tuple[int | None, ...] | None] = [None] * len(described.layers)
        windows[index] = _narrowed(attention.window, window, attention.heads)
        described = cost.with_head_windows(described, windows, window.keep_first)
    return described


def _narrowed(own: int | None, window: Window, heads: int) -> tuple[int | None, ...]:
    """A window for each head, none wider than the layer's own."""
    assert window.left is not None
    of_heads = _of_heads(torch.as_tensor(window.left).reshape(-1), heads)
    if own is None:
        return of_heads
    if window.keep_first:
        raise ArgumentError(
            f"a layer whose own window is {own} drops the first {window.keep_first} keys that its "
            "restricted heads keep; that is not counted."
        )
    return tuple(own if size is None else min(own, size) for size in of_heads)


def _of_heads(left_h: torch.Tensor, heads: int) -> tuple[int | None, ...]:
    if left_h.is_meta:
        raise ArgumentError(
            "windows of single heads are numbers in a tensor, which has none on the meta device; "
            "describe the model without them, then see multihead.cost.with_head_windows."
        )
    sizes = [None if left >= UNBOUNDED else left + 1 for left in left_h.tolist()]
    return tuple(sizes * heads if len(sizes) == 1 else sizes)
