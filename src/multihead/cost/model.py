"""What a model is made of, as plain integers: feed-forwards, layers, and the whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from multihead.cost.checks import check_choice, check_counts, check_sizes
from multihead.cost.latent import AnyAttention
from multihead.cost.parts import Attention, Norm, Projection
from multihead.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Two matrices around an activation, or three where a gate multiplies it.

    `activation` changes what is kept for the backward pass and nothing else.

    Raises ArgumentError for a size below 1.
    """

    embed_dim: int
    ffn_dim: int
    gated: bool = True
    bias: bool = False
    activation: str = "silu"

    def __post_init__(self) -> None:
        check_sizes(embed_dim=self.embed_dim, ffn_dim=self.ffn_dim)

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Gate (if any), up and down."""
        up = Projection("feed_forward", self.embed_dim, self.ffn_dim, self.bias)
        down = Projection("feed_forward", self.ffn_dim, self.embed_dim, self.bias)
        return (up, up, down) if self.gated else (up, down)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: a router sends each token to `active` of `count` feed-forwards.

    Attributes:
        expert: what each of them is.
        count, active: how many there are, and how many a token visits.
        shared: a feed-forward that every token visits beside them.
        router_bias: whether the router has a bias.
        shared_gate: whether a gate of one output weighs the shared one (Qwen2-MoE).

    Raises:
        ArgumentError: more active experts than there are, a gate without a shared expert, or a
            shared expert of another width.
    """

    expert: FeedForward
    count: int
    active: int
    shared: FeedForward | None = None
    router_bias: bool = False
    shared_gate: bool = False

    def __post_init__(self) -> None:
        check_sizes(count=self.count, active=self.active)
        if self.active > self.count:
            raise ArgumentError(
                f"active is {self.active}, but there are only {self.count} experts (count)."
            )
        if self.shared_gate and self.shared is None:
            raise ArgumentError("shared_gate weighs a shared expert, but shared is None.")
        if self.shared is not None and self.shared.embed_dim != self.expert.embed_dim:
            raise ArgumentError(
                f"the shared expert reads a width of {self.shared.embed_dim}, the others "
                f"{self.expert.embed_dim}; they must be one."
            )

    @property
    def embed_dim(self) -> int:
        """Width of the stream."""
        return self.expert.embed_dim

    @property
    def routers(self) -> tuple[Projection, ...]:
        """What scores the experts, and the shared one's gate."""
        router = Projection("router", self.embed_dim, self.count, self.router_bias)
        return (router, Projection("router", self.embed_dim, 1)) if self.shared_gate else (router,)


AnyFeedForward = FeedForward | Experts


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: attention, perhaps a cross-attention, feed-forward, and norms around them.

    Attributes:
        norms: how many norms over the model's width it has: 2 is usual, 4 where what each part
            adds is normalized too, 1 where both parts read one norm.

    Raises:
        ArgumentError: parts of different width.
    """

    attention: AnyAttention
    feed_forward: AnyFeedForward
    cross: Attention | None = None
    norms: int = 2
    norm: Norm = "rms"

    def __post_init__(self) -> None:
        check_counts(norms=self.norms)
        check_choice("norm", self.norm, get_args(Norm))
        widths = {
            part.embed_dim for part in (self.attention, self.feed_forward, self.cross) if part
        }
        if len(widths) > 1:
            raise ArgumentError(
                f"the parts of a layer read one stream of one embed_dim; got {sorted(widths)}."
            )

    @property
    def embed_dim(self) -> int:
        """Width of the stream."""
        return self.attention.embed_dim

    @property
    def attentions(self) -> tuple[AnyAttention, ...]:
        """The self-attention, and the cross-attention if there is one."""
        return (self.attention,) if self.cross is None else (self.attention, self.cross)


@dataclass(frozen=True, slots=True)
class Model:
    """A transformer: embeddings below, layers, norm and head above.

    Attributes:
        layers: one description a layer, the lowest first; they may differ.
        vocab: rows of the table of embeddings; 0 for none, as for a single layer.
        causal: a decoder, whose tokens see no later ones; False for an encoder.
        head: logits over the vocabulary; `tied` where its matrix is the embeddings'.
        head_bias: a bias of the logits.
        capped_logits: whether a tanh caps the logits (Gemma 2); it changes what is kept for the
            backward pass and nothing else.
        positions: rows of a learned table of positions.
        types: rows of a table of segments.
        embedding_norm, final_norm: norms of what enters and leaves the layers.
        norm: what these norms train.
        pooler: a square matrix with bias on the first token (BERT).
        source: the encoder that the cross-attentions read.
        shared: whether the encoder's embeddings are this model's.
        trained_context: the tokens that the model was made for, where its config tells.
        name: what it is called in tables.

    Raises:
        ArgumentError: no layers, layers of different width, a tied head without embeddings, or
            cross-attentions without a source.
    """

    layers: tuple[Layer, ...]
    vocab: int = 0
    causal: bool = True
    head: bool = True
    tied: bool = False
    head_bias: bool = False
    capped_logits: bool = False
    positions: int = 0
    types: int = 0
    embedding_norm: bool = False
    final_norm: bool = True
    norm: Norm = "rms"
    pooler: bool = False
    source: Model | None = None
    shared: bool = False
    trained_context: int | None = None
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        check_counts(vocab=self.vocab, positions=self.positions, types=self.types)
        check_choice("norm", self.norm, get_args(Norm))
        if not self.layers:
            raise ArgumentError("layers must hold at least one Layer.")
        widths = {layer.embed_dim for layer in self.layers}
        if len(widths) > 1:
            raise ArgumentError(
                f"all layers read one stream of one embed_dim; got {sorted(widths)}."
            )
        if self.head and self.tied and not self.vocab:
            raise ArgumentError("a tied head is the embeddings' matrix, but vocab is 0.")
        crosses = any(layer.cross is not None for layer in self.layers)
        if crosses != (self.source is not None):
            raise ArgumentError(
                "layers with a cross-attention read the encoder given as source=, and only they "
                f"do; got {'no source' if crosses else 'a source that no layer reads'}."
            )

    @property
    def embed_dim(self) -> int:
        """Width of the stream."""
        return self.layers[0].embed_dim
