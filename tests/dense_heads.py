"""Statistics of heads from whole matrices in float64, written out as they are defined."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dense:
    """One call: who sees whom [B, Lq, Lk]; and for each query [B, Lq] whether it is real, its
    position and the columns of its text's first key and of the key before its own (-1 for none).
    """

    visible: Tensor
    real: Tensor
    position: Tensor
    first: Tensor
    previous: Tensor

    @property
    def texts(self) -> int:
        return int((self.real & (self.position == self.first)).sum())


def of_weights(
    weights: Tensor, logits: Tensor, qk: Tensor, call: Dense, sink: Tensor | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Each statistic of every query and the queries that count for it, [B, H, Lq] both.

    `weights` [B, H, Lq, Lk] are those of the softmax, `sink` [B, H, Lq] the weight of a learned
    sink; `logits` and `qk` the scores with and without softcap and bias.
    """
    visible = call.visible[:, None].expand(weights.shape)
    mass = weights.sum(-1)
    share = weights / mass.clamp(min=1e-300)[..., None]
    outcomes = weights if sink is None else torch.cat((weights, sink[..., None]), -1)
    logs = torch.where(outcomes > 0, outcomes, 1).log()
    entropy = -(outcomes * logs).sum(-1)
    count = call.visible.sum(-1)[:, None] + (sink is not None)
    column = torch.arange(weights.shape[-1])
    distance = (call.position[..., None] - column).abs()[:, None]
    real = call.real[:, None].expand(entropy.shape)

    def at(values: Tensor, columns: Tensor) -> Tensor:
        index = columns.clamp(min=0)[:, None, :, None].expand(*values.shape[:3], 1)
        return torch.where(columns[:, None] < 0, 0, values.gather(-1, index)[..., 0])

    sees_previous = at(visible.long(), call.previous) > 0
    several = real & (count > 1)
    return {
        "entropy": (entropy, real),
        "entropy_share": (entropy / count.clamp(min=2).double().log(), several),
        "max_weight": (weights.amax(-1), real),
        "mean_distance": ((share * distance).sum(-1), real),
        "sink_mass": (at(share, call.first), real),
        "participation": (1 / share.square().sum(-1).clamp(min=1e-300), real),
        "previous_token": (at(weights, call.previous), real & sees_previous),
        "first_key": (at(weights, call.first), real),
        "max_logit": (logits.masked_fill(~visible, -torch.inf).amax(-1), real),
        "max_qk": (qk.masked_fill(~visible, -torch.inf).amax(-1), real),
    }


def attend(
    query: Tensor,
    key: Tensor,
    call: Dense,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """`of_weights` of queries [B, H, Lq, D] and keys [B, Hkv, Lk, D], all in float64."""
    query, key = query.double(), key.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
    qk = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    logits = qk if softcap is None else softcap * torch.tanh(qk / softcap)
    logits = logits if bias is None else logits + bias.double()
    hidden = ~call.visible[:, None].expand(logits.shape)
    outcomes = logits.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        sink = sinks.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        outcomes = torch.cat((outcomes, sink), -1)
    weights = outcomes.softmax(-1).nan_to_num(0.0)
    columns = logits.shape[-1]
    sink_weight = None if sinks is None else weights[..., -1]
    return of_weights(weights[..., :columns], logits, qk, call, sink_weight)


def over_queries(rows: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Each statistic of each head, [H]: the mean over what counts, of logits the largest."""
    found = {}
    for name, (values, counted) in rows.items():
        if name.startswith("max_") and name != "max_weight":
            found[name] = values.masked_fill(~counted, -torch.inf).amax((0, 2))
        else:
            found[name] = values.masked_fill(~counted, 0).sum((0, 2)) / counted.sum((0, 2))
    return found
