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

    `head` is one head's of self-attention, `layer` those of the heads and rows of an attention
    layer, `model` those of all of them: of an encoder-decoder, cross-attention's and the encoder's
    too. Nothing here builds them.
    """

    head: int
    layer: int
    model: int


def score_tables(model: Model, step: Pass, dtype: object) -> ScoreTables:
    """The tables of a pass; of the largest layer where layers differ."""
    layers = [step.batch * tables for tables in _layer_tables(model, step, dtype)]
    return ScoreTables(score_table_bytes(step.queries, step.keys, dtype), max(layers), sum(layers))


def _layer_tables(model: Model, step: Pass, dtype: object) -> list[int]:
    """Bytes of one row's tables in each attention."""
    queries, source = step.queries, step.source_tokens
    found = []
    for layer in model.layers:
        found.append(score_table_bytes(queries, step.keys, dtype, layer.attention.heads))
        if layer.cross is not None:
            found.append(score_table_bytes(queries, source, dtype, layer.cross.heads))
    if model.source is not None and step.past == 0:
        found += _layer_tables(model.source, Pass(source), dtype)
    return found
