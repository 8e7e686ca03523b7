"""The whole matrix of weights by its definition, which pieces and sums of it are compared with."""

from __future__ import annotations

import torch

import multihead as mh
from cases import Case


def dense(case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every stage of the whole matrix, in plain torch operations of `dtype`.

    Weights are made from lse, as the pieces are, and from the same lse in every dtype: how exact
    the forward pass' lse is stands in other tests.
    """
    query, key, _ = (x.to(dtype) for x in case.tensors(torch.float32))
    options = case.options(torch.float32)
    shape = (case.batch, case.heads, case.query_length, case.key_length)
    visible = torch.ones(shape, dtype=torch.bool)
    if case.mask is not None:
        visible = case.mask.to_dense(*shape[2:]).expand(shape)
    key = key.repeat_interleave(case.heads // case.kv_heads, dim=1)
    scale = case.head_dim**-0.5 if options["scale"] is None else options["scale"]
    scores = query @ key.mT * scale
    capped = scores if case.softcap is None else case.softcap * torch.tanh(scores / case.softcap)
    bias = options["bias"]
    if isinstance(bias, mh.ALiBi):
        rows = torch.arange(case.query_length) + case.key_length - case.query_length
        distance = (rows[:, None] - torch.arange(case.key_length)).abs()
        bias = -bias.slopes[:, None, None] * distance
    biased = capped if bias is None else capped + bias.to(dtype)
    if bias is not None:
        visible = visible & (bias != -torch.inf)
    lse = exact_lse(case).to(dtype)[..., None]
    weights = torch.exp(biased - lse).masked_fill(~visible, 0.0)
    return {
        "scores": scores, "capped": capped, "biased": biased, "softmax": weights,
        "visible": visible,
    }  # fmt: skip


def exact_lse(case: Case) -> torch.Tensor:
    """The definition's, in float64, rounded to float32."""
    tensors = case.tensors(torch.float64)
    return mh.attention_with_stats(
        *tensors, stats=("lse",), backend="reference", **case.options(torch.float64)
    ).lse.float()
