"""Scores of a model of which heads were pruned, each at its head's first number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from ...errors import ModelError
from ...integrations.attention_layers import AttentionLayer, attention_layers
from .probe_scores import Score, Scores


def by_first_numbers(scores: Scores, model: nn.Module) -> Scores:
    """The scores with NaN for heads that were pruned, layers without heads among the others.

    A model of which none was pruned, or whose heads cannot be told apart, keeps its scores.
    """
    try:
        layers = attention_layers(model)
    except ModelError:
        return scores
    known = {layer.name for layer in layers}
    if not (any(layer.pruned.heads for layer in layers) and known.issuperset(scores.layers)):
        return scores
    row_of = {name: row for row, name in enumerate(scores.layers)}
    rows = [row_of.get(layer.name) for layer in layers]
    return replace(
        scores,
        layers=tuple(layer.name for layer in layers),
        heads=tuple(layer.pruned.num_heads for layer in layers),
        by_role={name: _spread(score, layers, rows) for name, score in scores.by_role.items()},
    )


def _spread(score: Score, layers: Sequence[AttentionLayer], rows: Sequence[int | None]) -> Score:
    """A score's tables with each layer's heads at their first numbers, from its row if it ran."""
    widest = max(layer.pruned.num_heads for layer in layers)

    def at(found: np.ndarray[Any, Any], fill: float) -> Any:
        table = np.full((len(layers), widest), fill, dtype=found.dtype)
        for layer, row in zip(layers, rows, strict=True):
            if row is not None:
                table[layer.index, list(layer.heads)] = found[row, : len(layer.heads)]
        return table

    return replace(
        score,
        score=at(score.score, np.nan),
        control=at(score.control, np.nan),
        offset=None if score.offset is None else at(score.offset, 0),
    )
