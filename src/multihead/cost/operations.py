"""Operations of one pass through a model, by part.

A *product* is one multiply-add, two floating-point operations. Counted are the matrix products and
the exponentials of softmax; norms, activations, rotations and sums, whose number grows with
tokens x width alone, are not. Pairs of a query and a key are counted as *visible* (what the mask
lets each head see: what our kernels compute) or as *dense* (every query with every key: what a
path that multiplies first and masks afterwards computes, and what many counters report).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal

from multihead.cost.checks import check_choice, check_counts
from multihead.cost.latent import AnyAttention, LatentAttention
from multihead.cost.model import AnyFeedForward, Experts, Layer, Model
from multihead.cost.pairs import visible_pairs
from multihead.cost.parts import Projection
from multihead.errors import ArgumentError

Counting = Literal["visible", "dense"]


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass: `batch` rows, each of `queries` new tokens behind `past` that a cache holds.

    A prefill of N tokens is Pass(N), a step of decoding behind N tokens Pass(1, past=N).

    Attributes:
        queries, past, batch: as above.
        logit_rows: positions of each row whose logits are computed; None for all of them.
        pairs: visible pairs of one head of one row, in place of what the layers' own masks show:
            one number for every layer, or one a layer. `mask.visible_pairs(Lq, Lk)` counts them.
        source: tokens that the encoder of an encoder-decoder reads; None for as many as the keys.
            A pass with `past` reads what the cache holds of them.

    Raises:
        ArgumentError: a negative count, or more pairs or logits than there are.
    """

    queries: int
    past: int = 0
    batch: int = 1
    logit_rows: int | None = None
    pairs: int | tuple[int, ...] | None = None
    source: int | None = None

    def __post_init__(self) -> None:
        check_counts(queries=self.queries, past=self.past, batch=self.batch)
        check_counts(logit_rows=self.logits, source=self.source_tokens)
        if self.logits > self.queries:
            raise ArgumentError(
                f"logit_rows is {self.logits}, but each row has only {self.queries} queries."
            )
        given = self.pairs if isinstance(self.pairs, tuple) else (self.pairs or 0,)
        for pairs in given:
            check_counts(pairs=pairs)
            if pairs > self.queries * self.keys:
                raise ArgumentError(
                    f"pairs (visible_pairs of one head) is {pairs}, but one head of one row has "
                    f"only {self.queries} x {self.keys} = {self.queries * self.keys} pairs."
                )

    @property
    def keys(self) -> int:
        """Keys of each row: past and new tokens."""
        return self.past + self.queries

    @property
    def tokens(self) -> int:
        """New tokens of all rows."""
        return self.batch * self.queries

    @property
    def logits(self) -> int:
        """Positions of each row whose logits are computed."""
        return self.queries if self.logit_rows is None else self.logit_rows

    @property
    def source_tokens(self) -> int:
        """Tokens of each row's source, where the model has an encoder."""
        return self.keys if self.source is None else self.source


@dataclass(frozen=True, slots=True)
class Operations:
    """Products by part, and exponentials; `+` adds two, `n *` repeats one.

    `kv` is what makes keys and values together (latent attention); `other` is the pooler.
    """

    q: int = 0
    k: int = 0
    v: int = 0
    kv: int = 0
    o: int = 0
    scores: int = 0
    values: int = 0
    feed_forward: int = 0
    router: int = 0
    head: int = 0
    other: int = 0
    exponentials: int = 0

    @property
    def projections(self) -> int:
        """Products of the attention projections."""
        return self.q + self.k + self.v + self.kv + self.o

    @property
    def attention(self) -> int:
        """Products of Q K^T and P V."""
        return self.scores + self.values

    @property
    def total(self) -> int:
        """Products of all parts."""
        return self.projections + self.attention + self.feed_forward + self._rest

    @property
    def _rest(self) -> int:
        return self.router + self.head + self.other

    @property
    def flops(self) -> int:
        """Floating-point operations of the products: two each."""
        return 2 * self.total

    def __add__(self, other: Operations) -> Operations:
        return Operations(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )

    def __mul__(self, times: int) -> Operations:
        return Operations(**{part: times * count for part, count in asdict(self).items()})

    __rmul__ = __mul__

    def as_dict(self) -> dict[str, int]:
        """The parts under their names, `total` of the products, and `flops`."""
        return {**asdict(self), "total": self.total, "flops": self.flops}


def forward(model: Model, step: Pass, *, counting: Counting = "visible") -> Operations:
    """Operations of a forward pass through a model, its encoder and head included.

    Raises ArgumentError for a `step.pairs` that lists another number of layers.
    """
    check_choice("counting", counting, ("visible", "dense"))
    counted = _ends(model, step)
    for (layer, pairs), times in _kinds(model, step, counting):
        counted += times * _layer(layer, pairs, step)
    if model.source is not None and step.past == 0:
        source = Pass(step.source_tokens, batch=step.batch)
        counted += forward(model.source, source, counting=counting)
    return counted


def backward(
    model: Model, step: Pass, *, counting: Counting = "visible", recompute: bool = True
) -> Operations:
    """Operations of the backward pass, what it recomputes included.

    A matrix product has two products of its size in the backward pass: one for each factor's
    gradient. Attention has four, and with `recompute` (as fused kernels do, which keep the
    log-sum-exp and no weights) Q K^T and the exponentials again: 2.5 times the forward where keys
    and values are of one width, instead of twice.
    """
    ahead = forward(model, step, counting=counting)
    twice = replace(2 * ahead, exponentials=0)
    if not recompute:
        return twice
    return twice + Operations(scores=ahead.scores, exponentials=ahead.exponentials)


def layer_pairs(model: Model, layer: Layer, step: Pass, counting: Counting = "visible") -> int:
    """Pairs of all heads of one row in the self-attention of a layer, by its own mask."""
    attention = layer.attention
    if counting == "dense":
        return attention.heads * step.queries * step.keys
    return sum(
        times
        * visible_pairs(
            step.queries,
            step.keys,
            causal=model.causal,
            window=window,
            window_ahead=attention.window_ahead,
            keep_first=attention.keep_first,
        )
        for window, times in Counter(attention.windows).items()
    )


def model_pairs(model: Model, step: Pass, counting: Counting = "visible") -> list[int]:
    """Pairs of all heads of one row in each layer.

    Raises ArgumentError for a `step.pairs` that lists another number of layers.
    """
    given = step.pairs
    if given is None or counting == "dense":
        found = {layer: layer_pairs(model, layer, step, counting) for layer in set(model.layers)}
        return [found[layer] for layer in model.layers]
    each = (given,) * len(model.layers) if isinstance(given, int) else given
    if len(each) != len(model.layers):
        raise ArgumentError(
            f"pairs lists {len(each)} layers, but the model has {len(model.layers)}; give one "
            "number for each, or one for all."
        )
    return [n * layer.attention.heads for n, layer in zip(each, model.layers, strict=True)]


def _kinds(model: Model, step: Pass, counting: Counting) -> list[tuple[tuple[Layer, int], int]]:
    found: dict[tuple[Layer, int], int] = {}
    for kind in zip(model.layers, model_pairs(model, step, counting), strict=True):
        found[kind] = found.get(kind, 0) + 1
    return list(found.items())


def _ends(model: Model, step: Pass) -> Operations:
    """The logits, and BERT's pooler on the first token of each row."""
    head = step.batch * step.logits * model.vocab * model.embed_dim if model.head else 0
    pooled = step.batch * model.embed_dim**2 if model.pooler and step.queries else 0
    return Operations(head=head, other=pooled)


def _layer(layer: Layer, pairs: int, step: Pass) -> Operations:
    counted = _attention(layer.attention, pairs, step, new=step.tokens)
    if layer.cross is not None:
        source = step.source_tokens
        new = 0 if step.past else step.batch * source
        pairs = layer.cross.heads * step.queries * source
        counted += _attention(layer.cross, pairs, step, new=new)
    return counted + _feed_forward(layer.feed_forward, step.tokens)


def _attention(attention: AnyAttention, pairs: int, step: Pass, *, new: int) -> Operations:
    """One attention that sees `pairs`, where `new` tokens' keys and values are made."""
    if isinstance(attention, LatentAttention):
        return _latent(attention, pairs, step)
    products = {"q": 0, "k": 0, "v": 0, "o": 0}
    for projection in attention.projections:
        tokens = new if projection.reads == "keys" else step.tokens
        products[projection.part] += tokens * projection.weights
    seen = step.batch * pairs
    return Operations(
        **products,
        scores=seen * attention.score_lanes,
        values=seen * attention.value_lanes,
        exponentials=_exponentials(attention, pairs, step),
    )


def _latent(attention: LatentAttention, pairs: int, step: Pass) -> Operations:
    form = attention.cheaper_form(step.queries, step.keys)
    products = {"q": 0, "kv": 0, "o": 0}
    for projection in attention.projections:
        products[projection.part] += step.tokens * projection.weights
    if form == "materialized":
        # Of every key, also of those that the cache holds as latents.
        products["kv"] += step.batch * step.past * attention.up_projection.weights
    score_lanes, value_lanes = attention.lanes(form)
    seen = step.batch * pairs
    return Operations(
        **products,
        scores=seen * score_lanes,
        values=seen * value_lanes,
        exponentials=_exponentials(attention, pairs, step),
    )


def _exponentials(attention: AnyAttention, pairs: int, step: Pass) -> int:
    sinks = attention.heads * step.queries if attention.sinks else 0
    return step.batch * (pairs + sinks)


def _feed_forward(described: AnyFeedForward, tokens: int) -> Operations:
    if not isinstance(described, Experts):
        return Operations(feed_forward=tokens * _weights(described.projections))
    visits = described.active * _weights(described.expert.projections)
    if described.shared is not None:
        visits += _weights(described.shared.projections)
    return Operations(feed_forward=tokens * visits, router=tokens * _weights(described.routers))


def _weights(projections: Sequence[Projection]) -> int:
    return sum(projection.weights for projection in projections)
