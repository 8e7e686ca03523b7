"""What a model is made of, as data: enough to build it, and nothing that changes while it runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from ..errors import ArgumentError
from ..nn.block import NormPlacement
from ..nn.checks import check_number, check_sizes
from ..nn.positions import RoPE
from ..nn.prune import Pruned

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Norm = Literal["rms", "rms_offset", "layer"]
AddedPositions = Literal["learned", "sinusoidal"]
PositionKind = Literal[AddedPositions, "alibi"]


@dataclass(frozen=True)
class BlockConfig:
    """One layer of a transformer.

    Attributes:
        embed_dim: width of the stream that the layer reads and adds to.
        num_heads: query heads.
        ffn_dim: width of the feed-forward network.
        num_kv_heads: key and value heads; by default `num_heads`.
        head_dim: width of a head; by default `embed_dim / num_heads`.
        scale: of the scores; by default `1 / sqrt(head_dim)`.
        window: how many of the newest keys a query sees, its own included; None is all.
        softcap: of the scores.
        sinks: a trained logit without a value beside each head's keys.
        rope: how queries and keys are turned; None leaves them as they are.
        qk_norm: normalize each head's queries and keys.
        qkv_bias, out_bias, ffn_bias: which projections have biases.
        activation: of the feed-forward network; "gelu_tanh" is its approximation by tanh.
        gated: whether a second projection multiplies the activation's output.
        norm: "rms", "rms_offset" (gains stored less 1, as in Gemma) or "layer".
        norm_eps: added to the mean square.
        norm_placement: as in `TransformerBlock`: "pre", "post" or "sandwich".
        context_dim: width of the sequence that a cross-attention between attention and feed-forward
            network reads; None is a layer without one.
        pruned: what the attention had before heads were taken out; `num_heads` and `num_kv_heads`
            count what is left. Made by `without_heads`. A cross-attention has what it had.

    Raises:
        ArgumentError: an activation, a norm or a placement that there is not, or heads that are
            not those that `pruned` leaves.
    """

    embed_dim: int
    num_heads: int
    ffn_dim: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    rope: RoPE | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    activation: Activation = "silu"
    gated: bool = True
    norm: Norm = "rms"
    norm_eps: float = 1e-5
    norm_placement: NormPlacement = "pre"
    context_dim: int | None = None
    pruned: Pruned | None = None

    def __post_init__(self) -> None:
        _check_choice("activation", self.activation, Activation)
        _check_choice("norm", self.norm, Norm)
        _check_choice("norm_placement", self.norm_placement, NormPlacement)
        if self.pruned is not None and self.num_heads != len(self.pruned.kept):
            raise ArgumentError(
                f"num_heads must count the {len(self.pruned.kept)} heads that pruned leaves; got "
                f"{self.num_heads}. BlockConfig(...).without_heads(...) sets both."
            )

    @property
    def kv_heads(self) -> int:
        """Key and value heads, the default filled in."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def width(self) -> int:
        """The width of a head, the default filled in."""
        heads = self.num_heads if self.pruned is None else self.pruned.num_heads
        return self.embed_dim // heads if self.head_dim is None else self.head_dim

    def without_heads(self, heads: Iterable[int]) -> BlockConfig:
        """The layer after `prune_heads(heads)`, by the numbers that heads had at first.

        Raises:
            ArgumentError: a head that there is not, or KV groups of unequal size.
        """
        pruned = (self.pruned or Pruned(self.num_heads, self.kv_heads)).without(heads)
        kv_heads = None if self.num_kv_heads is None else len(pruned.kept_kv)
        return replace(self, num_heads=len(pruned.kept), num_kv_heads=kv_heads, pruned=pruned)

    def whole(self) -> BlockConfig:
        """The layer before heads were taken out of it."""
        if self.pruned is None:
            return self
        kv_heads = None if self.num_kv_heads is None else self.pruned.num_kv_heads
        return replace(self, num_heads=self.pruned.num_heads, num_kv_heads=kv_heads, pruned=None)


@dataclass(frozen=True)
class LanguageModelConfig:
    """A decoder: embeddings and positions below, layers, norm and vocabulary above.

    Attributes:
        vocab_size: number of tokens.
        layers: one description a layer, the lowest first; `(block,) * 30` for thirty alike.
        positions: what is added to the embeddings ("learned", "sinusoidal") or to the scores
            ("alibi"). None where the layers' `rope` does it.
        max_positions: how many positions a learned table has; of other kinds what the model was
            trained for, None if nobody says.
        position_offset: the row of a learned table that position 0 reads.
        embedding_scale: a factor on the token embeddings.
        embedding_norm: normalize what enters the first layer.
        final_norm: normalize what leaves the last layer.
        tied: whether the head's matrix is that of the embeddings.
        head_bias: whether the logits have a bias.
        logit_softcap: c > 0 turns a logit x into `c * tanh(x / c)`.

    Raises:
        ArgumentError: no layers, layers of different width, positions that there are not, a
            learned table without a size, or a number out of range.
    """

    vocab_size: int
    layers: tuple[BlockConfig, ...]
    positions: PositionKind | None = None
    max_positions: int | None = None
    position_offset: int = 0
    embedding_scale: float | None = None
    embedding_norm: bool = False
    final_norm: bool = True
    tied: bool = True
    head_bias: bool = False
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        _check(self, PositionKind)
        check_number("logit_softcap", self.logit_softcap, "Leave it out for no cap.")
        if self.logit_softcap is not None and self.logit_softcap <= 0:
            raise ArgumentError(f"logit_softcap must be above 0; got {self.logit_softcap}.")
        if self.positions == "alibi" and len({it.whole().num_heads for it in self.layers}) > 1:
            raise ArgumentError(
                "positions='alibi' gives every head its slope, so all layers must have the same "
                "num_heads."
            )

    @property
    def embed_dim(self) -> int:
        """Width of the stream."""
        return self.layers[0].embed_dim


@dataclass(frozen=True)
class EncoderConfig:
    """An encoder: every token sees every other.

    Attributes:
        vocab_size: number of tokens.
        layers: one description a layer, the lowest first.
        positions: "learned" or "sinusoidal" are added to the embeddings; None where the layers'
            `rope` does it.
        max_positions, position_offset, embedding_scale, embedding_norm, final_norm: as in
            `LanguageModelConfig`.
        num_types: kinds of segments, whose embeddings are added to the tokens'; 0 for none.
        pooler: a linear layer and tanh on the first token, `Encoder.pool`.

    Raises:
        ArgumentError: no layers, layers of different width or with a window, positions that there
            are not, a learned table without a size, or a number out of range.
    """

    vocab_size: int
    layers: tuple[BlockConfig, ...]
    positions: AddedPositions | None = None
    max_positions: int | None = None
    position_offset: int = 0
    embedding_scale: float | None = None
    embedding_norm: bool = False
    final_norm: bool = False
    num_types: int = 0
    pooler: bool = False

    def __post_init__(self) -> None:
        _check(self, AddedPositions)
        if any(layer.window is not None for layer in self.layers):
            raise ArgumentError(
                "a layer's window is causal, but an encoder sees both ways. Leave it out, and give "
                "a call mask=multihead.Window(left, right)."
            )

    @property
    def embed_dim(self) -> int:
        """Width of the stream."""
        return self.layers[0].embed_dim


@dataclass(frozen=True)
class EncoderDecoderConfig:
    """An encoder, and a decoder whose layers read it by cross-attention.

    Attributes:
        source: the encoder.
        target: the decoder; its layers' `context_dim` is the encoder's width.
        shared: whether the encoder's embeddings are the decoder's.
        start_token: what a decoded sequence starts with.

    Raises:
        ArgumentError: a decoder's layer that does not read the encoder, or one vocabulary shared
            by two sizes.
    """

    source: EncoderConfig
    target: LanguageModelConfig
    shared: bool = False
    start_token: int | None = None

    def __post_init__(self) -> None:
        width = self.source.embed_dim
        for index, layer in enumerate(self.target.layers):
            if layer.context_dim != width:
                raise ArgumentError(
                    f"layer {index} of the target must have context_dim={width}, the width of the "
                    f"source; got {layer.context_dim}."
                )
        ours = (self.source.vocab_size, width)
        theirs = (self.target.vocab_size, self.target.embed_dim)
        if self.shared and ours != theirs:
            raise ArgumentError(
                f"shared=True is one table of embeddings, but source has {ours} (tokens, width) "
                f"and target {theirs}."
            )


def _check(config: LanguageModelConfig | EncoderConfig, kinds: object) -> None:
    if isinstance(config.layers, BlockConfig):
        raise ArgumentError("layers must be several BlockConfigs; for one write (block,).")
    if not config.layers:
        raise ArgumentError("layers must hold at least one BlockConfig.")
    widths = {layer.embed_dim for layer in config.layers}
    if len(widths) > 1:
        raise ArgumentError(f"all layers must have one embed_dim; got {sorted(widths)}.")
    check_sizes(vocab_size=config.vocab_size)
    if config.positions is not None:
        remedy = " Rotary positions are the layers': BlockConfig(..., rope=RoPE())."
        _check_choice("positions", config.positions, kinds, remedy)
    if config.positions == "learned" and config.max_positions is None:
        raise ArgumentError("positions='learned' is a table; say how long with max_positions=.")
    if config.position_offset < 0:
        raise ArgumentError(f"position_offset must be 0 or above; got {config.position_offset}.")


def _check_choice(name: str, choice: object, kinds: Any, remedy: str = "") -> None:
    if choice not in get_args(kinds):
        names = ", ".join(map(repr, get_args(kinds)))
        raise ArgumentError(f"{name} must be one of {names}; got {choice!r}.{remedy}")
