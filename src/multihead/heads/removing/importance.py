"""What would be lost without a head: estimated by gradients, measured by leaving it out.

Shape suffixes: b batch (examples), l length, h head, d width of a head's output, c all heads'
widths together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import ArgumentError, ModelError
from ...integrations.attention_layers import AttentionLayer, Head, attention_layers
from ..loss import Loss, as_batches, evaluating, example_losses, mean_loss, next_token_loss
from .ablation import Change, ablate, changing

FloatTable = np.ndarray[Any, np.dtype[np.float64]]

UnitKind = Literal["head", "kv_group"]
Progress = Callable[[int, int], None]
"""Called with what is done and what there is to do."""


@dataclass(frozen=True)
class Unit:
    """What is scored and removed together: a head, or the heads that read one KV head.

    Attributes:
        layer: number of the layer.
        number: of the head or of the KV head, as it was before any were pruned.
        heads: the query heads.
    """

    layer: int
    number: int
    heads: tuple[int, ...]

    @property
    def addresses(self) -> frozenset[Head]:
        """The heads as pairs (layer, head)."""
        return frozenset((self.layer, head) for head in self.heads)


@dataclass(frozen=True, eq=False)
class Importance:
    """A score for each unit of a model; larger is to be kept.

    Attributes:
        method: "gate gradient", "leave one out" or "random".
        kind: what a unit is.
        units: in the order of layers and numbers.
        scores: float64 [units].
        examples: how many the scores are means over; 0 for random ones.
    """

    method: str
    kind: UnitKind
    units: tuple[Unit, ...]
    scores: FloatTable
    examples: int

    def table(self) -> FloatTable:
        """The scores as [layers, numbers], NaN where a layer has no such unit."""
        layers = 1 + max(unit.layer for unit in self.units)
        table = np.full((layers, 1 + max(unit.number for unit in self.units)), np.nan)
        for unit, score in zip(self.units, self.scores, strict=True):
            table[unit.layer, unit.number] = score
        return table

    def order(self) -> tuple[Unit, ...]:
        """The units, the least important first; equal ones in their own order."""
        return tuple(self.units[place] for place in np.argsort(self.scores, kind="stable"))

    def least(self, count: int) -> set[Head]:
        """The heads of the `count` least important units, as pairs (layer, head).

        Raises:
            ArgumentError: fewer than none, or more than there are.
        """
        if not 0 <= count <= len(self.units):
            raise ArgumentError(f"count must be from 0 to {len(self.units)} units; got {count}.")
        return {address for unit in self.order()[:count] for address in unit.addresses}

    def normalized(self) -> Importance:
        """Every layer's scores divided by the root of the sum of their squares.

        Layers then compete by how unequal their heads are, not by the size of their gradients.
        Which of the two orders loses less when heads are removed is the model's own; try both.

        Source: Molchanov et al. 2017; Michel et al. 2019.
        """
        layer_of = np.array([unit.layer for unit in self.units])
        sizes = np.sqrt(np.bincount(layer_of, weights=self.scores**2))[layer_of]
        return replace(self, scores=self.scores / np.where(sizes == 0, 1.0, sizes))


def head_units(model: nn.Module, kind: UnitKind = "head") -> tuple[Unit, ...]:
    """What can be removed of a model: its heads, or its KV groups.

    Under grouped queries a KV group is the unit of pruning; without them a group is one head.

    Raises:
        ArgumentError: another kind.
        ModelError: a model whose heads cannot be told apart, or that has none left.
    """
    units = tuple(unit for layer in attention_layers(model) for unit in _units(layer, kind))
    if not units:
        raise ModelError(f"{type(model).__name__} has no head left: all of them were pruned.")
    return units


def gate_gradient(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    kind: UnitKind = "head",
    loss: Loss = next_token_loss,
    progress: Progress | None = None,
) -> Importance:
    """The mean over examples of |dL / d gate|, a gate of 1 on what each unit writes.

    The gate of a head multiplies its output in one example, [B, H]; the derivative is
    `<out_h, dL/d out_h>`, summed over the example's tokens, and its absolute value is taken for
    each example. The gate of a KV group is on all of its heads. One forward and one backward pass,
    without gradients of parameters; memory is linear in the length.

    It is a first-order estimate of what a small change of the gate does, not of removal:
    `leave_one_out` measures that. `.normalized()` compares heads within their layers.

    Args:
        model: as `ablate` takes it; run in eval mode.
        batches: what `loss` takes, one or several. Token ids [B, L] for the default; an example is
            a row.
        kind: "head" or "kv_group".
        loss: returns the loss of each example, [B].
        progress: called after each batch.

    Raises:
        ArgumentError: no batch, a loss that is not one number an example, or another kind.
        ModelError: a model whose heads cannot be told apart or that has none left, or one that the
            default loss does not fit.

    Source: Michel et al. 2019, section 4.
    """
    layers = attention_layers(model)
    units = head_units(model, kind)
    batches = as_batches(batches)
    totals = np.zeros(len(units))
    examples = 0
    with evaluating(model), _frozen(model):
        for done, batch in enumerate(batches, 1):
            gates, size = _gate_gradients(model, layers, batch, loss)
            for place, unit in enumerate(units):
                if unit.layer not in gates:
                    continue
                heads = layers[unit.layer].heads
                columns = [heads.index(head) for head in unit.heads]
                totals[place] += float(gates[unit.layer][:, columns].sum(1).abs().sum())
            examples += size
            if progress is not None:
                progress(done, len(batches))
    if not examples:
        raise ArgumentError("batches must hold at least one batch; got none.")
    return Importance("gate gradient", kind, units, totals / examples, examples)


def leave_one_out(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    kind: UnitKind = "head",
    loss: Loss = next_token_loss,
    progress: Progress | None = None,
) -> Importance:
    """The loss without each unit less the loss with all of them, by running the model without it.

    One forward pass a unit and a batch: the measurement that `gate_gradient` estimates, of one
    unit at a time. Arguments and errors are those of `gate_gradient`; `progress` is called after
    each unit.
    """
    units = head_units(model, kind)
    batches = as_batches(batches)
    whole = mean_loss(model, batches, loss)
    scores = np.zeros(len(units))
    for place, unit in enumerate(units):
        with ablate(model, unit.addresses):
            scores[place] = mean_loss(model, batches, loss) - whole
        if progress is not None:
            progress(place + 1, len(units))
    with torch.no_grad(), evaluating(model):
        examples = sum(len(example_losses(loss, model, batch)) for batch in batches)
    return Importance("leave one out", kind, units, scores, examples)


def random_importance(model: nn.Module, seed: int, *, kind: UnitKind = "head") -> Importance:
    """Scores drawn at random: the control that every other order must beat."""
    units = head_units(model, kind)
    scores = np.random.default_rng(seed).permutation(len(units)).astype(np.float64)
    return Importance("random", kind, units, scores, 0)


def removal_curve(
    model: nn.Module,
    batches: Iterable[Any],
    importance: Importance,
    counts: Sequence[int],
    *,
    loss: Loss = next_token_loss,
    progress: Progress | None = None,
) -> list[float]:
    """The loss after so many of the least important units are removed (by zeros), each of `counts`.

    Give it other examples than those that the importance was taken over. Errors are those of
    `ablate` and `mean_loss`; `progress` is called after each count.
    """
    batches = as_batches(batches)
    found = []
    for done, count in enumerate(counts, 1):
        with ablate(model, importance.least(count)):
            found.append(mean_loss(model, batches, loss))
        if progress is not None:
            progress(done, len(counts))
    return found


def rank_correlation(first: Importance, second: Importance) -> float:
    """Spearman's correlation of two orders of the same units, -1 to 1; equal scores share a rank.

    NaN where one of them gives every unit the same score.

    Raises:
        ArgumentError: scores of different units.
    """
    if first.units != second.units:
        raise ArgumentError(
            f"both must score the same units; got {len(first.units)} of kind {first.kind!r} and "
            f"{len(second.units)} of kind {second.kind!r}."
        )
    ranks = np.stack((_ranks(first.scores), _ranks(second.scores)))
    centered = ranks - ranks.mean(1, keepdims=True)
    size = float(np.sqrt((centered**2).sum(1).prod()))
    return float((centered[0] * centered[1]).sum() / size) if size else float("nan")


def _ranks(scores: FloatTable) -> FloatTable:
    """The rank of each score from 0; equal scores have the mean of their ranks."""
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ends = counts.cumsum()
    means: FloatTable = ends - (counts + 1) / 2
    return means[places]


def _units(layer: AttentionLayer, kind: UnitKind) -> list[Unit]:
    if kind not in get_args(UnitKind):
        raise ArgumentError(f"kind must be 'head' or 'kv_group'; got {kind!r}.")
    if kind == "head":
        return [Unit(layer.index, head, (head,)) for head in layer.heads]
    group = layer.pruned.group
    return [
        Unit(layer.index, kv, tuple(head for head in layer.heads if head // group == kv))
        for kv in layer.pruned.kept_kv
    ]


def _gate_gradients(
    model: nn.Module, layers: Sequence[AttentionLayer], batch: Any, loss: Loss
) -> tuple[dict[int, Tensor], int]:
    """By layer, dL/d gate of each example and head, float64 [B, H]; and the number of examples."""
    gates: dict[int, Tensor] = {}

    def gate(layer: AttentionLayer) -> Change:
        def keep(x_blc: Tensor) -> Tensor:
            # With frozen parameters nothing below the first layer has a history.
            x_blc = x_blc if x_blc.requires_grad else x_blc.detach().requires_grad_()
            outputs_blc = x_blc.detach()

            def add(gradient_blc: Tensor) -> None:
                product_blc = outputs_blc.double() * gradient_blc.double()
                by_head = (len(product_blc), -1, len(layer.heads), layer.value_dim)
                sums_bh = product_blc.view(by_head).sum((1, 3)).cpu()
                gates[layer.index] = (
                    gates[layer.index] + sums_bh if layer.index in gates else sums_bh
                )

            x_blc.register_hook(add)
            return x_blc

        return keep

    changes = {layer.index: gate(layer) for layer in layers if layer.heads}
    with torch.inference_mode(False), torch.enable_grad(), changing(layers, changes):
        losses_b = example_losses(loss, model, batch)
        losses_b.sum().backward()
    for found in gates.values():
        if len(found) != len(losses_b):
            raise ArgumentError(
                f"loss returned {len(losses_b)} numbers for a batch of {len(found)} examples; it "
                "must return one for each."
            )
    return gates, len(losses_b)


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No parameter takes a gradient inside the block."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
