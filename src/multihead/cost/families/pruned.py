"""Heads that were taken out for good, as a config.json tells them: less of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from multihead.cost.families.fields import Fields
from multihead.cost.model import Layer, Model
from multihead.cost.parts import Attention
from multihead.errors import ArgumentError

FIELD = "multihead_pruned_heads"
"""By layer (a string, as keys of JSON are), the heads that are gone, by their first numbers."""


def without_pruned_heads(model: Model, fields: Fields) -> Model:
    """The description of a whole model without the heads that its config says are gone.

    Raises:
        ArgumentError: a field of another form, heads that there are not, or a layer that none of
            its heads is left to.
    """
    found = fields.get(FIELD)
    if not found:
        return model
    layers = list(model.layers)
    for index, gone in _numbers(found).items():
        if not 0 <= index < len(layers):
            raise ArgumentError(f"{FIELD} names layer {index}, but there are {len(layers)} layers.")
        layers[index] = _without(layers[index], gone, f"layer {index}")
    return replace(model, layers=tuple(layers))


def _without(layer: Layer, gone: set[int], name: str) -> Layer:
    whole = layer.attention
    if not isinstance(whole, Attention) or not gone <= set(range(whole.heads)):
        raise ArgumentError(f"{FIELD} names heads that {name} does not have: {sorted(gone)}.")
    group = whole.heads // whole.kv_heads
    kept = [head for head in range(whole.heads) if head not in gone]
    kv_heads = {head // group for head in kept}
    if not kept:
        raise ArgumentError(
            f"{FIELD} leaves {name} no head; a layer without attention is not counted."
        )
    if len({sum(head // group == kv for head in kept) for kv in kv_heads}) > 1:
        raise ArgumentError(f"{FIELD} leaves {name} KV groups of different size.")
    windows = whole.head_windows and tuple(whole.head_windows[head] for head in kept)
    left = replace(whole, heads=len(kept), kv_heads=len(kv_heads), head_windows=windows)
    return replace(layer, attention=left)


def _numbers(found: object) -> dict[int, set[int]]:
    try:
        if not isinstance(found, Mapping):
            raise TypeError(f"a {type(found).__name__}")
        return {int(layer): {int(head) for head in heads} for layer, heads in found.items()}
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f'{FIELD} must be of the form {{"3": [1, 5]}}, heads by layer; got {error}.'
        ) from error
