"""The samples by which torch tests multi_head_attention_forward, run through ours.

Every sample brings a learned key and value beside the sequence's, which our layer does not have:
`attention` gets them appended, and the layer is held to torch without them. Half of the samples
drop out half of the weights, and only the number of these is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, multi_head_attention_forward

import multihead as mh
from close import assert_close

pytest.importorskip("expecttest", reason="torch's own samples need it")

# Of 192 samples in torch 2.13 half drop out.
SAMPLES, DROPPED_OUT = 192, 96
_NAMES = (
    "query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias",
    "bias_k", "bias_v", "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias",
)  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """One call, its arguments by torch's names."""

    arguments: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        return self.arguments[name]

    def torchs(self, dtype: torch.dtype, **changed: Any) -> Tensor:
        """What torch computes in `dtype`, [L, N, E] or [L, E]."""
        given = {**self.arguments, **changed, "need_weights": False}
        given = {name: it.to(dtype) if isinstance(it, Tensor) else it for name, it in given.items()}
        return multi_head_attention_forward(**given)[0]

    @property
    def projections(self) -> tuple[Tensor, ...]:
        """The weights of queries, keys and values."""
        if self.use_separate_proj_weight:
            return self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        return self.in_proj_weight.chunk(3)

    def bias(self, batch: int, extra_keys: int) -> Tensor | None:
        """The additive mask as [N|1, H|1, L, S + extra_keys]; the extra keys are seen by all."""
        mask = self.attn_mask
        if mask is None:
            return None
        mask = mask[None, None] if mask.ndim == 2 else mask.unflatten(0, (batch, self.num_heads))
        return nn.functional.pad(mask, (0, extra_keys))


def batched(x_lne: Tensor) -> Tensor:
    """[L, N, E] or [L, E] as [N, L, E]."""
    return x_lne[None] if x_lne.ndim == 2 else x_lne.transpose(0, 1)


@cache
def supported() -> list[Sample]:
    """Those without dropout."""
    from torch.testing._internal.common_methods_invocations import op_db

    name = "nn.functional.multi_head_attention_forward"
    (operator,) = (it for it in op_db if it.name == name)
    torch.manual_seed(0)
    every = [
        Sample({**dict(zip(_NAMES, (it.input, *it.args), strict=True)), **it.kwargs})
        for it in operator.sample_inputs("cpu", torch.float32, requires_grad=False)
    ]
    kept = [it for it in every if it.dropout_p == 0.0]
    assert len(every) >= SAMPLES
    assert len(every) - len(kept) == DROPPED_OUT
    return kept


def by_attention(sample: Sample) -> Tensor:
    """As torch computes it, with `attention` in the middle."""
    sequences = [batched(it) for it in (sample.query, sample.key, sample.value)]
    biases = sample.in_proj_bias.chunk(3)
    heads = []
    extras = (None, sample.bias_k, sample.bias_v)
    for x, weight, bias, extra in zip(sequences, sample.projections, biases, extras, strict=True):
        projected = linear(x, weight, bias)
        if extra is not None:
            batch, _, width = projected.shape
            projected = torch.cat((projected, extra.view(1, 1, width).expand(batch, 1, -1)), dim=1)
        heads.append(projected.unflatten(-1, (sample.num_heads, -1)).transpose(1, 2))
    bias = sample.bias(len(sequences[0]), 1)
    joined = mh.attention(*heads, bias=bias).transpose(1, 2).flatten(2)
    return linear(joined, sample.out_proj_weight, sample.out_proj_bias)


def by_layer(sample: Sample) -> Tensor:
    """The layer of a module with the sample's weights, which reads the key alone."""
    width = sample.embed_dim_to_check
    module = nn.MultiheadAttention(width, sample.num_heads)
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.cat(sample.projections))
        module.in_proj_bias.copy_(sample.in_proj_bias)
        module.out_proj.weight.copy_(sample.out_proj_weight)
        module.out_proj.bias.copy_(sample.out_proj_bias)
        layer = mh.MultiHeadAttention.from_torch(module, cross=True)
        query, context = batched(sample.query), batched(sample.key)
        return layer(query, context, bias=sample.bias(len(query), 0))


@pytest.mark.parametrize("compute", [by_attention, by_layer])
def test_outputs(compute: Any) -> None:
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for sample in supported():
        changed: dict[str, Any] = {}
        if compute is by_layer:
            changed = {"bias_k": None, "bias_v": None, "value": sample.key}
        exact, plain = (
            batched(sample.torchs(it, **changed)) for it in (torch.float64, torch.float32)
        )
        ours = compute(sample)
        assert ours.shape == exact.shape
        found.append((ours, exact, plain))
    # Of all samples: on a single one of a few numbers torch is exact by luck.
    columns = zip(*found, strict=True)
    assert_close(*(torch.cat([it.flatten() for it in column]) for column in columns))
