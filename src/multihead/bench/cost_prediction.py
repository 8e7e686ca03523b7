"""Peak memory and time of a pass, from `multihead.cost` and what its pieces take at one length.

Operations and bytes are counted, not measured. What is measured, in the same process and the same
minutes, is a rate for each kind of work: products of each shape of matrix, attention's kernel at
one length, everything else by the token, one row's product with a large matrix, one query on a
large cache, and the calls of a step. A prediction is work over rate, summed over the parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from multihead import cost
from multihead.bench.cost_probe import COLD_LAYERS, DECODE, PREFILL, TRAIN, Shape
from multihead.integrations.cost_sources import describe
from multihead.models import LanguageModel

_INDEX_BYTES, _ANGLE_BYTES = 8, 4

Parts = dict[str, int]
Times = dict[str, float]


@dataclass(frozen=True)
class Work:
    """A pass to be predicted and measured.

    `tokens` are the prompt's ("prefill"), those in the cache ("decode"), or the batch's that one
    layer is trained on ("train").
    """

    kind: str
    tokens: int
    dtype: str
    shape: Shape

    @property
    def name(self) -> str:
        """What `--only` looks into."""
        return f"{self.kind}-{self.tokens}-{self.dtype}"

    @property
    def model(self) -> cost.Model:
        """What is counted: the model; one layer of it where that is trained."""
        with torch.device("meta"):
            whole = describe(LanguageModel(self.shape.model))
        assert isinstance(whole, cost.Model)
        if self.kind != TRAIN:
            return whole
        return cost.Model(whole.layers[:1], head=False, final_norm=False)

    @property
    def step(self) -> cost.Pass:
        """The pass that is counted."""
        if self.kind == DECODE:
            return cost.Pass(1, past=self.tokens)
        return cost.Pass(self.tokens, logit_rows=1 if self.kind == PREFILL else None)


def memory(work: Work) -> Parts:
    """Bytes at the peak of the pass, by part, beyond what Python and torch take."""
    model, size = work.model, cost.dtype_bytes(work.dtype)
    weights = cost.weight_bytes(model, work.dtype)
    if work.kind == DECODE:
        return {"weights": weights, "cache": _cache(work, model, work.tokens + 1)}
    if work.kind == PREFILL:
        working = _forward_bytes(work.tokens, model.layers[0], size)
        return {
            "weights": weights,
            "cache": _cache(work, model, work.tokens),
            "in a layer": working,
        }
    return {"weights": weights, **_training_parts(work.tokens, model, size)}


def _cache(work: Work, model: cost.Model, tokens: int) -> int:
    return cost.cache_bytes(model, tokens, dtype=work.dtype)


def _forward_bytes(tokens: int, layer: cost.Layer, size: int) -> int:
    """What a layer holds at inference when its feed-forward network ends, the widest moment.

    The stream before and after attention, what attention added to it, its norm, the gate and its
    partner (one tensor), their product and the output; and the angles of all layers, in four forms.
    """
    assert isinstance(layer.feed_forward, cost.FeedForward)
    numbers = 5 * layer.embed_dim + 3 * layer.feed_forward.ffn_dim
    angles = 3 * layer.attention.head_dim * _ANGLE_BYTES
    return tokens * (numbers * size + angles + _INDEX_BYTES)


def _training_parts(tokens: int, model: cost.Model, size: int) -> Parts:
    """One layer when the gradient reaches its gate, the widest moment from 1,000 tokens on.

    By then the product of gate and partner is given back, three gradients of its size are there,
    and of the weights' gradients the lower matrix's. Beside what autograd keeps stand the output,
    and the gradient that came in. The input is kept as the first norm's argument.
    """
    (layer,) = model.layers
    assert isinstance(layer.feed_forward, cost.FeedForward)
    ffn, stream = layer.feed_forward.ffn_dim, tokens * layer.embed_dim * size
    return {
        "gradients of weights": ffn * layer.embed_dim * size,
        "kept for backward": cost.activation_bytes(model, tokens, dtype=size_name(size)),
        "output and its gradient": 2 * stream,
        "in the layer's backward": (3 - 1) * tokens * ffn * size,
    }


def size_name(size: int) -> str:
    """A dtype whose elements have so many bytes."""
    return {8: "float64", 4: "float32", 2: "bfloat16"}[size]


def seconds(work: Work, pieces: Mapping[str, float]) -> Times:
    """Seconds of the pass by part, from the medians of its pieces."""
    if work.kind == DECODE:
        return _step_seconds(work, pieces)
    shape, model = work.shape, work.model
    calibration = shape.trained_calibration if work.kind == TRAIN else shape.calibration
    wanted = cost.forward(model, work.step)
    timed = cost.forward(model, cost.Pass(calibration))
    layers = len(model.layers)
    projections = layers * (pieces["qkv"] + pieces["o"])
    feed_forward = layers * (pieces["up"] + pieces["down"])
    found = {
        "projections": projections * wanted.projections / timed.projections,
        "attention": layers * pieces["attention"] * wanted.attention / timed.attention,
        "feed-forward": feed_forward * wanted.feed_forward / timed.feed_forward,
        "everything else": layers * pieces["others"] * work.tokens / calibration,
    }
    return found | ({"head": pieces["head"]} if work.kind == PREFILL else {})


def _step_seconds(work: Work, pieces: Mapping[str, float]) -> Times:
    """A step reads every weight once, and the cache; and it makes calls."""
    model, dtype = work.model, work.dtype
    layer = cost.Model(model.layers[:1], head=False)
    keys = cost.cache_bytes(layer, work.shape.cold_keys, dtype=dtype)
    return {
        "weights": pieces["products"] * len(model.layers) / COLD_LAYERS,
        "head": pieces["head"],
        "cache": pieces["keys"] * _cache(work, model, work.tokens + 1) / keys,
        "calls": pieces["calls"],
    }


def moved_bytes(work: Work) -> int:
    """What a step of decoding must read at least."""
    model = work.model
    return cost.weight_bytes(model, work.dtype) + _cache(work, model, work.tokens + 1)


def flops(work: Work) -> int:
    """Floating-point operations of the pass, over visible pairs."""
    counted = cost.forward(work.model, work.step).flops
    return counted + (cost.backward(work.model, work.step).flops if work.kind == TRAIN else 0)
