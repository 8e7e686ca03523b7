"""What every head writes: reading is not writing.

A head gives to a query the sum over keys of a weight times W_O v of the key. So beside each weight
stands its contribution, the length of that vector, and its direct logit attribution, the vector's
share in a token's logit: both are the weight times one number per key, hence exact at any length.
A weight may be large where what it writes is next to nothing; and neither says what would be lost
without the head, since later layers read what it writes.

Kobayashi et al. 2020 weigh weights by norms; Elhage et al. 2021 read logits of single heads.

Shape suffixes: l layer, h head, q query row, k key, v width of a value, c width of the stream, t
token of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ArgumentError, ModelError
from ...ops.weights import weights_at
from ..forward import one_text, run
from .places import Rows, Tokens, integers
from .writing_record import (
    Unembedding,
    WritingLayer,
    WritingRecorder,
    last_norm,
    unembedding,
)

# Numbers formed at a time where W_O v of every key is: 4M float32 are 16 MiB.
_BLOCK_ELEMENTS = 1 << 22


@dataclass(frozen=True, eq=False)
class WrittenTokens:
    """Tokens whose logits a head raises most: int64 [k], and by how much [k], largest first.

    `values` are against the mean over the vocabulary: what raises all logits alike changes nothing.
    """

    tokens: Tensor
    values: Tensor


@dataclass(frozen=True, eq=False)
class Writing:
    """What the heads of a model write on one text; everything is computed when it is asked for.

    Memory: q, k, v and the output of every layer, O(length); results have the rows asked for.
    Results are float32 (float64 for a float64 model). `rows` are queries: an int, a slice, integers
    or an integer tensor; negative ones count from the end. `layer` and `head` count from 0; heads
    keep the numbers that they had before any were pruned, and those that are gone write nothing.

    Where a norm stands behind the output projection (Gemma 2), "writes" means what enters the
    stream: the norm at the scale that the row really had, which is linear. Logits are read through
    the last norm in the same way, and before a softcap of the logits.

    Attributes:
        layers: the attention modules by name, in the order in which they run.
        heads: heads of each layer, those that were pruned among them.
        error: the largest difference between what the heads and the bias of a layer sum to and what
            its output projection gave, as a share of the row's size.
    """

    layers: tuple[str, ...]
    heads: tuple[int, ...]
    error: float
    _kept: tuple[WritingLayer, ...] = field(repr=False)
    _unembedding: Unembedding | str = field(repr=False)

    def weights(self, layer: int, rows: Rows) -> Tensor:
        """The attention weights of these queries: [H, rows, Lk]."""
        kept = self._layer(layer)
        index = kept.places(rows)
        keys = torch.arange(kept.problem.key_length, device=index.device)
        with torch.no_grad():
            return kept.at_first_numbers(weights_at(kept.problem, kept.lse[None], index, keys)[0])

    def value_norms(self, layer: int) -> Tensor:
        """How long W_O v of each key is, before its weight: [H, Lk].

        Behind a norm, for a query at which that norm has the scale 1.
        """
        kept = self._layer(layer)
        weight_hvc, value_gkv = _weight(kept), kept.problem.value[0].to(kept.heads.dtype)
        norms_hk = value_gkv.new_empty(len(weight_hvc), value_gkv.shape[1])
        step = max(1, _BLOCK_ELEMENTS // weight_hvc.shape[2])
        for head, weight_vc in enumerate(weight_hvc):
            value_kv = value_gkv[head // kept.problem.group]
            for start in range(0, len(value_kv), step):
                keys = slice(start, start + step)
                written_kc = value_kv[keys] @ weight_vc
                norms_hk[head, keys] = torch.linalg.vector_norm(written_kc, dim=-1)
        return kept.at_first_numbers(norms_hk)

    def contributions(self, layer: int, rows: Rows) -> Tensor:
        """The length of what each head writes for each key, the norm of p W_O v: [H, rows, Lk]."""
        kept = self._layer(layer)
        shares_hqk = self.weights(layer, rows) * self.value_norms(layer)[:, None]
        if kept.norm is None:
            return shares_hqk
        index = kept.places(rows)
        return shares_hqk * kept.norm.scale[index, None].abs()

    def outputs(self, layer: int, rows: Rows) -> Tensor:
        """What each head writes to the stream: [H, rows, C].

        Over heads, and with `bias`, they sum to what the layer's attention writes.
        """
        kept = self._layer(layer)
        index = kept.places(rows)
        return kept.at_first_numbers(kept.heads[:, index] @ _weight(kept) * _scale(kept, index))

    def bias(self, layer: int, rows: Rows) -> Tensor:
        """What the layer's attention writes beside its heads: [rows, C]."""
        kept = self._layer(layer)
        index = kept.places(rows)
        assert kept.weight is not None
        bias_qc = kept.heads.new_zeros(len(index), kept.weight.shape[-1])
        if kept.bias is not None:
            bias_qc = bias_qc + kept.bias
        return bias_qc if kept.norm is None else kept.norm.linear(bias_qc, index) + kept.norm.bias

    def attribution(self, tokens: Tokens, rows: Rows, *, against: Tokens | None = None) -> Tensor:
        """Direct logit attribution: what each head adds to the logits of `tokens`, [L, H, rows, T].

        With `against`, one token or as many as `tokens`, to the difference of the two logits. A
        layer with fewer heads than another ends in NaN.

        Raises:
            ArgumentError: tokens outside of the vocabulary, or rows outside of the text.
            ModelError: a model whose logits are not the sum of what is written; says why.
        """
        direction_tc = self._direction(tokens, against)
        final = self._final()
        index = final.places(rows)
        shape = (len(self._kept), max(self.heads), len(index), len(direction_tc))
        found_lhqt = direction_tc.new_full(shape, torch.nan)
        scale_q1 = final.norm.scale[index, None]
        for place, kept in enumerate(self._kept):
            read_hvt = _weight(kept) @ direction_tc.mT
            heads_hqt = kept.heads[:, index] @ read_hvt * _scale(kept, index)
            added_hqt = kept.at_first_numbers(heads_hqt * scale_q1)
            found_lhqt[place, : len(added_hqt)] = added_hqt
        return found_lhqt

    def bias_attribution(
        self, tokens: Tokens, rows: Rows, *, against: Tokens | None = None
    ) -> Tensor:
        """As `attribution`, what `bias` of each layer adds to the logits: [L, rows, T]."""
        direction_tc = self._direction(tokens, against)
        final = self._final()
        index = final.places(rows)
        parts = [self.bias(layer, index) @ direction_tc.mT for layer in range(len(self._kept))]
        return torch.stack(parts) * final.norm.scale[index, None]

    def key_attribution(
        self, layer: int, token: int, rows: Rows, *, against: int | None = None
    ) -> Tensor:
        """`attribution` of one layer and token, by the key that it comes from: [H, rows, Lk]."""
        kept = self._layer(layer)
        direction_c = self._direction(token, against)[0]
        final = self._final()
        index = final.places(rows)
        read_hv = _weight(kept) @ direction_c
        value_gkv = kept.problem.value[0].to(kept.heads.dtype)
        value_hkv = value_gkv.repeat_interleave(kept.problem.group, 0)
        number_hk = (value_hkv @ read_hv[..., None])[..., 0]
        scale_q1 = final.norm.scale[index, None] * _scale(kept, index)
        return self.weights(layer, index) * kept.at_first_numbers(number_hk)[:, None] * scale_q1

    def strongest(
        self, token: int, row: int, *, against: int | None = None, k: int = 10
    ) -> list[tuple[int, int, float]]:
        """Layer, head and attribution of the `k` heads that add most to one token's logit.

        Raises ArgumentError for a negative k, and as `attribution` does.
        """
        if k < 0:
            raise ArgumentError(f"k must be 0 or more heads; got {k}.")
        added_lh = self.attribution(token, row, against=against)[..., 0, 0].nan_to_num(-torch.inf)
        for place, kept in enumerate(self._kept):
            added_lh[place, list(kept.before.heads)] = -torch.inf
        values, places = added_lh.flatten().topk(min(k, sum(len(it.heads) for it in self._kept)))
        widest = added_lh.shape[1]
        return [
            (place // widest, place % widest, value)
            for place, value in zip(places.tolist(), values.tolist(), strict=True)
        ]

    def vocabulary(self, layer: int, head: int, rows: Rows) -> Tensor:
        """What one head adds to the logits of every token: [rows, V]."""
        final = self._final()
        written_qc = self.outputs(layer, rows)[self._head(layer, head)]
        index = final.places(rows)
        return final.norm.linear(written_qc, index) @ final.weight.to(written_qc.dtype).mT

    def top_tokens(
        self, layer: int, head: int, rows: Rows = slice(None), *, k: int = 10
    ) -> WrittenTokens:
        """The `k` tokens whose logits a head raises most, in the mean over `rows`."""
        final = self._final()
        size = len(final.weight)
        if not 1 <= k <= size:
            raise ArgumentError(f"k must be from 1 to {size}, the size of the vocabulary; got {k}.")
        index = final.places(rows)
        if not len(index):
            raise ArgumentError("rows must hold at least one query, to take the mean over.")
        written_qc = self.outputs(layer, index)[self._head(layer, head)]
        mean_c = final.norm.linear(written_qc, index).mean(0)
        logits_t = final.weight.to(mean_c.dtype) @ mean_c
        values, tokens = (logits_t - logits_t.mean()).topk(k)
        return WrittenTokens(tokens, values)

    def logits(self, rows: Rows) -> Tensor:
        """The model's logits before a softcap: [rows, V], for attributions to be held against.

        What heads and biases of attention don't account for comes from embeddings, feed-forwards,
        and the biases of the last norm and the head.
        """
        final = self._final()
        hidden_qc = final.hidden[final.places(rows)].to(final.norm.scale.dtype)
        logits_qt = hidden_qc @ final.weight.to(hidden_qc.dtype).mT
        return logits_qt if final.bias is None else logits_qt + final.bias

    def _direction(self, tokens: Tokens, against: Tokens | None) -> Tensor:
        """The direction in the stream along which the logits grow, at scale 1: [T, C]."""
        final = self._final()
        row_tc = self._unembedded(tokens, "tokens")
        if against is not None:
            other_tc = self._unembedded(against, "against")
            if len(other_tc) not in (1, len(row_tc)):
                raise ArgumentError(
                    f"against must be one token, or one for each of the {len(row_tc)} tokens; got "
                    f"{len(other_tc)}."
                )
            row_tc = row_tc - other_tc
        return final.norm.backward(row_tc)

    def _unembedded(self, tokens: Tokens, name: str) -> Tensor:
        final = self._final()
        index, size = integers(tokens), len(final.weight)
        if index is None or not len(index) or int(index.min()) < 0 or int(index.max()) >= size:
            raise ArgumentError(
                f"{name} must be tokens from 0 to {size - 1}; got {tokens!r}. A tokenizer turns a "
                "text into tokens."
            )
        return final.weight[index].to(final.norm.gain.dtype)

    def _final(self) -> Unembedding:
        reasons = [layer.adds for layer in self._kept if layer.adds is not None]
        if isinstance(self._unembedding, str):
            reasons.append(self._unembedding)
        if reasons:
            raise ModelError(
                f"Logits of this model are not the sum of what its heads write: {reasons[0]}. "
                "weights(), contributions() and outputs() hold all the same."
            )
        assert isinstance(self._unembedding, Unembedding)
        return self._unembedding

    def _layer(self, layer: int) -> WritingLayer:
        if not 0 <= layer < len(self._kept):
            raise ArgumentError(f"layer must be from 0 to {len(self._kept) - 1}; got {layer}.")
        return self._kept[layer]

    def _head(self, layer: int, head: int) -> int:
        if not 0 <= head < self.heads[layer]:
            raise ArgumentError(
                f"head must be from 0 to {self.heads[layer] - 1} in layer {layer}; got {head}."
            )
        if head in self._kept[layer].before.heads:
            raise ArgumentError(f"head {head} of layer {layer} was pruned, and writes nothing.")
        return head


def writing(model: nn.Module, input_ids: Tensor | Sequence[int]) -> Writing:
    """Run a model once over one text and keep what is needed to tell what its heads write.

    `model` is a transformers model or one of ours. `input_ids` are the tokens of one text, [L] or
    [1, L].

    That heads add up to what a layer writes is checked on the way, and so is that logits are a sum
    of what is written: where they are not (post-norm models such as BERT, models that scale their
    stream), attributions are refused with the reason, and contributions stay.

    Raises:
        ArgumentError: input_ids that are no tokens of one text of this model.
        ModelError: a model that cannot be run so, or whose heads do not meet one output projection.
    """
    token_ids = one_text(model, input_ids)
    recorder = WritingRecorder(model, token_ids.shape[1])
    with torch.inference_mode(), recorder.hooks(), last_norm(model) as kept:
        result: Any = run(model, token_ids, recorder, head=True)
        dtype = recorder.kept[0].problem.compute_dtype
        final = unembedding(model, kept, getattr(result, "logits", result), dtype)
    layers = recorder.kept
    return Writing(
        layers=tuple(layer.name for layer in layers),
        heads=tuple(layer.before.num_heads for layer in layers),
        error=max(layer.error for layer in layers),
        _kept=tuple(layers),
        _unembedding=final,
    )


def _weight(kept: WritingLayer) -> Tensor:
    """What each head's values meet on their way to the stream, at scale 1: [H, Dv, C]."""
    assert kept.weight is not None
    if kept.norm is None:
        return kept.weight
    return kept.norm.unscaled(kept.weight)


def _scale(kept: WritingLayer, index: Tensor) -> Tensor | float:
    """The scale of each row's norm behind the projection, [rows, 1]."""
    return 1.0 if kept.norm is None else kept.norm.scale[index, None]
