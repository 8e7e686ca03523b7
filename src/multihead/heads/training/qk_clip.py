"""QK-clip: scale down the weights that make queries and keys of heads with exploding logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...errors import ArgumentError, DtypeError, ModelError
from .diagnosis import StabilityReport
from .qk_layout import Layout, layout_of


@dataclass(frozen=True)
class Clipped:
    """One head whose weights were scaled.

    Attributes:
        layer: name of the attention module.
        head: the query head, from 0.
        max_qk: its largest `scale * q.k` before.
        gamma: `tau / max_qk`, what its logits were scaled by.
    """

    layer: str
    head: int
    max_qk: float
    gamma: float


@torch.no_grad()
def qk_clip(
    model: nn.Module,
    report: StabilityReport,
    *,
    tau: float = 100.0,
    masters: Mapping[nn.Parameter, Tensor] | None = None,
) -> tuple[Clipped, ...]:
    """Scale the queries and keys of each head whose `max_qk` is above tau, so that it would be tau.

        monitor = heads.stability(model)
        ...
        optimizer.step()
        heads.qk_clip(model, monitor.step())

    With gamma = min(1, tau / max_qk) a head's logits are scaled by gamma, through its weights, in
    place and biases too:

    * heads with keys of their own: sqrt(gamma) on the query's rows and on the key's;
    * grouped-query and multi-query heads, which share a key: gamma on the query's rows alone;
    * latent attention: sqrt(gamma) on the unrotated part of the query and of the key, gamma on the
      rotated part of the query; the rotated key, which all heads share, stays.

    All else keeps its bits: other heads, values, optimizer state. What later layers do with a
    clipped layer's new output is seen in the next step. Packed copies of weights (`prepack`)
    notice the change by themselves.

    A layer that normalizes queries and keys (qk_norm) is refused: the norm undoes any scale of the
    weights, and its gain is one for all heads, so that no head can be clipped alone. Such a
    layer bounds its logits itself, by `scale * head_dim` times its gains; regularize these.

    Args:
        model: as it was given to `stability`: layers are found by their names in it. Ours
            (`MultiHeadAttention`, `LatentAttention`), transformers models with projections like
            Llama's, Phi-3's, GPT-2's, BERT's, BART's and T5's, and DeepSeek's latent attention.
        report: of this step, over all rows. In data-parallel training give each rank
            `all_reduced(report)`, or the ranks' weights part.
        tau: the largest logit that is left alone; 100 in Kimi K2.
        masters: where parameters are copies in lower precision, the tensors that the optimizer
            steps, by parameter: these are scaled and copied to the parameters. Without it the
            parameters are scaled, with their rounding: in bfloat16 a gamma above 0.99 is lost.

    Returns:
        The heads that were scaled, in the model's order.

    Raises:
        ArgumentError: a report over some rows, whose maxima are lower bounds, a tau that is not
            above 0, or masters without one of a rounded parameter, or with one of another shape.
            Nothing is changed.
        ModelError: a head above tau in a layer that cannot be clipped (qk_norm, projections that
            are not known, replaced or sharded); or a max_qk that is not finite. Nothing is changed.

    Source: Kimi Team 2025, section 2.1.
    """
    tau = checked_tau(tau)
    if not isinstance(report, StabilityReport):
        hint = " The step was not looked at: build the monitor with every=1." * (report is None)
        raise DtypeError(
            f"report must be what monitor.step() returned; got {type(report).__name__}.{hint}"
        )
    if report.rows != "all":
        raise ArgumentError(
            f"qk_clip needs the maximum over all rows, but this report looked at {report.rows} of "
            "each call. Build the monitor with rows='all'."
        )
    model = getattr(model, "_orig_mod", model)
    clipped: list[Clipped] = []
    scaled: dict[tuple[int, int, int], _Scaled] = {}
    for place, name in enumerate(report.layers):
        counted = report.queries[place] > 0
        maxima = report.max_qk[place]
        if not all(map(math.isfinite, maxima[counted])):
            raise ModelError(
                f"{name or type(model).__name__} has a max_qk that is not finite: there is nothing "
                "to scale it by. Go back to a checkpoint from before, and clip from there on."
            )
        above = [int(head) for head in (counted & (maxima > tau)).nonzero()[0]]
        if not above:
            continue
        layout = layout_of(_layer(model, name), name, int(counted.nonzero()[0][-1]) + 1)
        for head in above:
            gamma = tau / float(maxima[head])
            clipped.append(Clipped(name, head, float(maxima[head]), gamma))
            _collect(scaled, layout, head, gamma)
    for part in scaled.values():
        part.check(masters)
    for part in scaled.values():
        part.apply(masters or {})
    return tuple(clipped)


def checked_tau(tau: float) -> float:
    """`tau` as a float; raises ArgumentError unless it is a finite number above 0."""
    if isinstance(tau, int | float) and not isinstance(tau, bool) and 0 < tau < math.inf:
        return float(tau)
    raise ArgumentError(f"tau must be a finite number above 0; got {tau!r}. Usual is 100.")


@dataclass(frozen=True, eq=False)
class _Scaled:
    """Some rows (columns, where `dim` is 1) of a parameter and their factor."""

    parameter: nn.Parameter
    dim: int
    begin: int
    length: int
    factor: float

    def check(self, masters: Mapping[nn.Parameter, Tensor] | None) -> None:
        """Raise ArgumentError for a master of another shape, or none of a rounded parameter."""
        if masters is None:
            return
        master = masters.get(self.parameter)
        if master is None:
            if self.parameter.dtype.itemsize < torch.float32.itemsize:
                raise ArgumentError(
                    f"masters has no tensor for a parameter of shape {list(self.parameter.shape)} "
                    f"and {self.parameter.dtype}, whose own numbers the optimizer's next step "
                    "would overwrite. Give one for each parameter of the clipped layers."
                )
        elif master.shape != self.parameter.shape:
            raise ArgumentError(
                f"masters must have the shapes of their parameters, {list(self.parameter.shape)} "
                f"for one of them; got {list(master.shape)}, perhaps a shard or a flat copy."
            )

    def apply(self, masters: Mapping[nn.Parameter, Tensor]) -> None:
        """Scale them in place."""
        master = masters.get(self.parameter)
        target = self.parameter if master is None else master
        rows = target.narrow(self.dim, self.begin, self.length)
        rows.mul_(self.factor)
        if master is not None:
            self.parameter.narrow(self.dim, self.begin, self.length).copy_(rows)


def _collect(
    scaled: dict[tuple[int, int, int], _Scaled], layout: Layout, head: int, gamma: float
) -> None:
    for part in layout.parts(head):
        factor = gamma**part.power
        for parameter, dim in part.parameters():
            key = id(parameter), part.begin, part.length
            known = scaled.get(key)
            # Layers that share a projection: the smaller factor bounds the logits of both.
            if known is None or factor < known.factor:
                scaled[key] = _Scaled(parameter, dim, part.begin, part.length, factor)


def _layer(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise ModelError(
            f"{type(model).__name__} has no module {name!r}, which the report names. Give qk_clip "
            "the model that the monitor was built for."
        ) from None
