"""Tables of a model of which heads were pruned: by first numbers, with gaps where heads are gone.

Shape suffixes: h head, m sampled row, k key or column, r row bin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...integrations.attention_layers import attention_layers
from ...models.checkpoints.pruned import FIELD
from ...nn import Pruned
from .capture import Layer, Sweep


def pruned_heads(model: Any) -> tuple[Pruned, ...] | None:
    """What each layer of a transformers model has lost; None for a model that is whole."""
    if not getattr(model.config, FIELD, None):
        return None
    return tuple(layer.pruned for layer in attention_layers(model))


def with_gaps(found: Sequence[Layer], pruned: Sequence[Pruned]) -> list[Layer]:
    """Layers as if all heads were there: `found` are those that have some.

    A head that is gone has NaN for statistics, strips and maps, no keys and no weight.
    """
    present = iter(found)
    layers: list[Layer] = []
    for record in pruned:
        layer = next(present) if record.kept else _without_heads(found[0])
        layers.append(_spread(layer, record))
    return layers


def _without_heads(like: Layer) -> Layer:
    """A layer of no heads, for the same text as another one."""
    none = slice(0, 0)
    sweep = like.sweep
    return replace(
        like,
        statistics={name: value[none] for name, value in like.statistics.items()},
        strips={name: value[none] for name, value in like.strips.items()},
        link_keys=like.link_keys[:, none],
        link_weights=like.link_weights[:, none],
        token_keys=like.token_keys[none],
        token_weights=like.token_weights[none],
        mean_keys=torch.full_like(like.mean_keys, -1),
        mean_weights=torch.zeros_like(like.mean_weights),
        error=None,
        sweep=None if sweep is None else _sweep_without_heads(sweep),
    )


def _sweep_without_heads(sweep: Sweep) -> Sweep:
    none = slice(0, 0)
    return replace(
        sweep,
        mass=sweep.mass[none],
        peak=sweep.peak[none],
        uniform=sweep.uniform[:1],
        received=sweep.received[none],
        mean=sweep.mean[none],
        candidates=sweep.candidates[none],
        strips=sweep.strips[none, :, none],
    )


def _spread(layer: Layer, record: Pruned) -> Layer:
    """The layer's heads at their first numbers."""
    sweep = layer.sweep

    def at(value: Tensor, fill: float, axis: int = 0) -> Tensor:
        shape = [*value.shape]
        shape[axis] = record.num_heads
        index = torch.tensor(record.kept, dtype=torch.long, device=value.device)
        return value.new_full(shape, fill).index_copy_(axis, index, value)

    nan = float("nan")
    return replace(
        layer,
        statistics={name: at(value, nan) for name, value in layer.statistics.items()},
        strips={name: at(value, nan) for name, value in layer.strips.items()},
        link_keys=at(layer.link_keys, -1, 1),
        link_weights=at(layer.link_weights, 0, 1),
        token_keys=at(layer.token_keys, -1),
        token_weights=at(layer.token_weights, 0),
        sweep=sweep
        and replace(
            sweep,
            mass=at(sweep.mass, nan),
            peak=at(sweep.peak, nan),
            received=at(sweep.received, nan),
            mean=at(sweep.mean, 0),
            strips=at(sweep.strips, 0),
        ),
    )
