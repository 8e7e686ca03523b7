"""Bytes that one pass moves between memory and the processor, by part.

A lower bound: each tensor is read or written once, and what works on numbers one by one (norms,
rotations, activations, residual sums) is fused into a neighbor and moves nothing of its own. No
query x key table is moved. Kernels that tile for a small cache move more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from multihead.cost.attention import dtype_bytes
from multihead.cost.latent import LatentAttention
from multihead.cost.model import AnyFeedForward, Experts, FeedForward, Layer, Model
from multihead.cost.operations import Pass
from multihead.cost.parts import Attention, Projection


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes by part, `+` adds two and `n *` repeats one.

    `projections`, `feed_forward` and `head` hold their weights and what they read and write;
    `attention` the queries, the keys and values that they can see, and the output; `embeddings`
    the rows that are looked up. `head` is also the pooler.
    """

    embeddings: int = 0
    projections: int = 0
    attention: int = 0
    feed_forward: int = 0
    head: int = 0

    @property
    def total(self) -> int:
        """All parts."""
        return self.embeddings + self.projections + self.attention + self.feed_forward + self.head

    def __add__(self, other: Traffic) -> Traffic:
        mine, theirs = asdict(self), asdict(other)
        return Traffic(**{part: count + theirs[part] for part, count in mine.items()})

    def __mul__(self, times: int) -> Traffic:
        return Traffic(**{part: times * count for part, count in asdict(self).items()})

    __rmul__ = __mul__

    def as_dict(self) -> dict[str, int]:
        """The parts under their names, and `total`."""
        return {**asdict(self), "total": self.total}


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes of one number: of weights, of activations, and in the cache."""

    weights: int
    activations: int
    cache: int

    @classmethod
    def of(cls, dtype: object, weights: object = None, cache: object = None) -> Widths:
        """All in `dtype` but for those that are named apart."""
        return cls(
            dtype_bytes(dtype if weights is None else weights),
            dtype_bytes(dtype),
            dtype_bytes(dtype if cache is None else cache),
        )


def traffic(model: Model, step: Pass, widths: Widths) -> Traffic:
    """Bytes of a forward pass through a model, its encoder and head included."""
    width = model.embed_dim
    looked_up = step.tokens * width * widths.weights if model.vocab else 0
    moved = Traffic(embeddings=looked_up)
    if model.head:
        head = Projection("head", width, model.vocab, model.head_bias)
        moved += Traffic(head=_multiplied([head], step.batch * step.logits, widths))
    if model.pooler and step.queries:
        pooler = Projection("pooler", width, width, True)
        moved += Traffic(head=_multiplied([pooler], step.batch, widths))
    counted: dict[Layer, int] = {}
    for layer in model.layers:
        counted[layer] = counted.get(layer, 0) + 1
    for layer, times in counted.items():
        moved += times * _layer(layer, model.causal, step, widths)
    if model.source is not None and step.past == 0:
        moved += traffic(model.source, Pass(step.source_tokens, batch=step.batch), widths)
    return moved


def _layer(layer: Layer, causal: bool, step: Pass, widths: Widths) -> Traffic:
    attention = layer.attention
    if isinstance(attention, LatentAttention):
        moved = _latent(attention, step, _reached(attention.window, 0, step), widths)
    else:
        ahead = 0 if causal else attention.window_ahead
        keys = sum(_reached(window, ahead, step) for window in attention.kept_windows)
        moved = _attention(attention, step, keys, step.tokens, widths)
    if layer.cross is not None:
        source = step.source_tokens
        new = 0 if step.past else step.batch * source
        moved += _attention(layer.cross, step, layer.cross.kv_heads * source, new, widths)
    return moved + Traffic(feed_forward=_feed_forward(layer.feed_forward, step.tokens, widths))


def _reached(window: int | None, ahead: int, step: Pass) -> int:
    """Keys of a row that some query of the pass can see."""
    if not step.queries or window is None:
        return step.keys if step.queries else 0
    return min(step.keys, window - 1 + step.queries + ahead)


def _attention(attention: Attention, step: Pass, keys: int, new: int, widths: Widths) -> Traffic:
    """One attention, whose KV heads read `keys` keys and values of a row together."""
    read_by_queries = [p for p in attention.projections if p.reads == "queries"]
    read_by_keys = [p for p in attention.projections if p.reads == "keys"] if new else []
    projections = _multiplied(read_by_queries, step.tokens, widths)
    projections += _multiplied(read_by_keys, new, widths)
    lanes = attention.head_dim + attention.value_dim
    heads = step.tokens * attention.heads * lanes * widths.activations
    return Traffic(
        projections=projections, attention=heads + step.batch * keys * lanes * widths.cache
    )


def _latent(attention: LatentAttention, step: Pass, keys: int, widths: Widths) -> Traffic:
    form = attention.cheaper_form(step.queries, step.keys)
    score_lanes, value_lanes = attention.lanes(form)
    entries = step.batch * keys * attention.cached_numbers * widths.cache
    queries = step.tokens * attention.heads * (score_lanes + value_lanes) * widths.activations
    up = attention.up_projection
    others = [p for p in attention.projections if p != up]
    projections = _multiplied(others, step.tokens, widths) + up.weights * widths.weights
    if form == "absorbed":
        return Traffic(projections=projections, attention=queries + entries)
    # Latents are read, every head's keys and values are written, and read again by attention.
    made = step.batch * step.keys * up.outputs * widths.activations
    shared = step.batch * keys * attention.rope_dim * widths.activations
    return Traffic(projections=projections + entries + made, attention=queries + made + shared)


def _feed_forward(described: AnyFeedForward, tokens: int, widths: Widths) -> int:
    if isinstance(described, FeedForward):
        return _multiplied(described.projections, tokens, widths)
    moved = _multiplied(described.routers, tokens, widths)
    if described.shared is not None:
        moved += _multiplied(described.shared.projections, tokens, widths)
    return moved + _visited(described, tokens, widths)


def _visited(experts: Experts, tokens: int, widths: Widths) -> int:
    """Every visit's numbers, and the weights of as many experts as the visits can be of."""
    visits = tokens * experts.active
    read = min(visits, experts.count)
    projections = experts.expert.projections
    weights = sum(p.weights + p.biases for p in projections) * widths.weights
    numbers = sum(p.inputs + p.outputs for p in projections) * widths.activations
    return read * weights + visits * numbers


def _multiplied(projections: Iterable[Projection], tokens: int, widths: Widths) -> int:
    """Weights, inputs and outputs of matrices that `tokens` are multiplied with."""
    if not tokens:
        return 0
    return sum(
        (p.weights + p.biases) * widths.weights
        + tokens * (p.inputs + p.outputs) * widths.activations
        for p in projections
    )
