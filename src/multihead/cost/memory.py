"""Bytes of weights, and of the score tables that nobody builds here."""

from __future__ import annotations

from dataclasses import dataclass

from multihead.cost.attention import dtype_bytes, score_table_bytes
from multihead.cost.model import Model
from multihead.cost.operations import Pass
from multihead.cost.parameters import parameters_of


def weight_bytes(model: Model, dtype: object) -> int:
    """Bytes of all parameters in one dtype."""
    return parameters_of(model).total * dtype_bytes(dtype)


@dataclass(frozen=True, slots=True)
class ScoreTables:
    """Bytes of the queries x keys tables that attention would need if it built them.

    `head` is one head's, `layer` those of the heads and rows of a layer, `model` those of all
    layers. Nothing here builds them.
    """

    head: int
    layer: int
    model: int


def score_tables(model: Model, step: Pass, dtype: object) -> ScoreTables:
    """The tables of a pass; of the layer with the most heads where layers differ."""
    heads = [layer.attention.heads for layer in model.layers]
    head = score_table_bytes(step.queries, step.keys, dtype)
    return ScoreTables(head, step.batch * max(heads) * head, step.batch * sum(heads) * head)
