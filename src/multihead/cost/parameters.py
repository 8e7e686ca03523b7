"""Parameters by part: all of them, and those that one token visits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from multihead.cost.latent import AnyAttention
from multihead.cost.model import AnyFeedForward, Experts, FeedForward, Layer, Model
from multihead.cost.parts import Projection, norm_parameters


@dataclass(frozen=True, slots=True)
class Parameters:
    """Counts by part; `+` adds two, `n *` repeats one.

    `kv` is what makes keys and values together, as latent attention does; the projections' biases
    are in `biases`, those of the feed-forward in `feed_forward`. `other` holds sinks, tables of
    score biases, and the pooler.
    """

    embeddings: int = 0
    positions: int = 0
    q: int = 0
    k: int = 0
    v: int = 0
    kv: int = 0
    o: int = 0
    biases: int = 0
    norms: int = 0
    feed_forward: int = 0
    router: int = 0
    head: int = 0
    other: int = 0

    @property
    def attention(self) -> int:
        """The attention projections, biases included."""
        return self.q + self.k + self.v + self.kv + self.o + self.biases

    @property
    def total(self) -> int:
        """All parts."""
        return sum(asdict(self).values())

    def __add__(self, other: Parameters) -> Parameters:
        mine, theirs = asdict(self), asdict(other)
        return Parameters(**{part: count + theirs[part] for part, count in mine.items()})

    def __mul__(self, times: int) -> Parameters:
        return Parameters(**{part: times * count for part, count in asdict(self).items()})

    __rmul__ = __mul__

    def as_dict(self) -> dict[str, int]:
        """The parts under their names, and `total`."""
        return {**asdict(self), "total": self.total}


def parameters_of(
    described: Model | Layer | AnyAttention | AnyFeedForward, *, active: bool = False
) -> Parameters:
    """Parameters of a model or of a part of one, each counted once.

    With `active`, only those that a token is multiplied with or has looked up: of the experts
    those that it visits. Tables of embeddings and a tied head are counted whole.
    """
    if isinstance(described, Model):
        return _of_model(described, active)
    if isinstance(described, Layer):
        return _of_layer(described, active)
    if isinstance(described, FeedForward | Experts):
        return _of_feed_forward(described, active)
    return _of_attention(described)


def _of_model(model: Model, active: bool) -> Parameters:
    width = model.embed_dim
    norms = norm_parameters(model.norm, width) * (model.embedding_norm + model.final_norm)
    vocab = model.vocab * width
    own = Parameters(
        embeddings=0 if model.shared else vocab,
        positions=(model.positions + model.types) * width,
        norms=norms,
        head=(0 if model.tied or not model.head else vocab)
        + (model.vocab if model.head_bias else 0),
        other=width * (width + 1) if model.pooler else 0,
    )
    counted = own
    for layer, times in counted_layers(model.layers):
        counted += times * _of_layer(layer, active)
    return counted if model.source is None else counted + _of_model(model.source, active)


def counted_layers(layers: Iterable[Layer]) -> list[tuple[Layer, int]]:
    """Layers that differ, in order of appearance, and how many there are of each."""
    found: dict[Layer, int] = {}
    for layer in layers:
        found[layer] = found.get(layer, 0) + 1
    return list(found.items())


def _of_layer(layer: Layer, active: bool) -> Parameters:
    norms = layer.norms * norm_parameters(layer.norm, layer.embed_dim)
    counted = Parameters(norms=norms) + _of_feed_forward(layer.feed_forward, active)
    for attention in layer.attentions:
        counted += _of_attention(attention)
    return counted


def _of_attention(attention: AnyAttention) -> Parameters:
    weights = {"q": 0, "k": 0, "v": 0, "kv": 0, "o": 0}
    for projection in attention.projections:
        weights[projection.part] += projection.weights
    return Parameters(
        **weights,
        biases=sum(projection.biases for projection in attention.projections),
        norms=attention.norm_parameters,
        other=attention.other_parameters,
    )


def _of_feed_forward(described: AnyFeedForward, active: bool) -> Parameters:
    if isinstance(described, FeedForward):
        return Parameters(feed_forward=_whole(described.projections))
    visited = described.active if active else described.count
    feed_forward = visited * _whole(described.expert.projections)
    if described.shared is not None:
        feed_forward += _whole(described.shared.projections)
    return Parameters(feed_forward=feed_forward, router=_whole(described.routers))


def _whole(projections: Iterable[Projection]) -> int:
    return sum(projection.weights + projection.biases for projection in projections)
