"""Descriptions for `multihead.cost` from modules that exist: ours, or transformers models.

A description is checked against what it describes: its parameters are those of the module, or it
is refused. A wrong count would look like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial, singledispatch

from torch import nn

from .. import cost
from ..cost.parts import Norm, norm_parameters
from ..errors import ArgumentError, DtypeError
from ..models import Encoder, EncoderDecoder, LanguageModel
from ..models.blocks import OffsetRMSNorm
from ..nn import (
    FeedForward,
    GatedFeedForward,
    LatentAttention,
    LearnedPositions,
    MultiHeadAttention,
    TransformerBlock,
)
from .cost_windows import as_causal, check_ends_ahead, window_fields, with_restricted_heads

Description = cost.Model | cost.Layer | cost.AnyAttention | cost.FeedForward


def describe(module: nn.Module) -> Description:
    """What `module` is made of, for `multihead.cost`: its parameters are counted alike.

    `MultiHeadAttention` and `LatentAttention` give a `cost.Attention` or `cost.LatentAttention`, a
    feed-forward network its `cost.FeedForward`, a `TransformerBlock` a `cost.Layer`, and
    `LanguageModel`, `Encoder` and `EncoderDecoder` a `cost.Model`, as does a model of transformers,
    which is read by its config. It may lie on the meta device: no numbers are read, but for the
    windows of single heads (`multihead.heads.restrict`).

        with torch.device("meta"):
            model = LanguageModel(config)
        cost.parameters_of(describe(model)).total

    A layer by itself does not tell whether its model is causal: a window of it without an end ahead
    is described as a causal model reads it.

    Raises:
        ArgumentError: a part that descriptions have no word for, or a module whose parameters are
            not those of its description, such as one with adapters.
        DtypeError: a module of another kind.
    """
    described = _described(module)
    counted = cost.parameters_of(described).total
    found = sum(parameter.numel() for parameter in module.parameters())
    if counted != found:
        raise ArgumentError(
            f"{type(module).__name__} has {found:,} parameters, but a whole model of its sizes has "
            f"{counted:,}. It is a part of one, or was changed (adapters, another head): describe "
            "the whole model as it was made."
        )
    return described


@singledispatch
def _described(module: object) -> Description:
    config = getattr(module, "config", None)
    if not isinstance(module, nn.Module) or getattr(config, "model_type", None) is None:
        kinds = "MultiHeadAttention, TransformerBlock, LanguageModel"
        raise DtypeError(
            f"module must be a layer or a model of multihead ({kinds} and the like) or of "
            f"transformers; got {type(module).__name__}."
        )
    return _of_transformers(module, config)


@_described.register
def _(module: MultiHeadAttention) -> cost.Attention:
    if module.context_dim is None:
        q_bias = kv_bias = module.qkv_proj.bias is not None
    else:
        q_bias, kv_bias = module.q_proj.bias is not None, module.kv_proj.bias is not None
    return cost.Attention(
        embed_dim=module.embed_dim,
        heads=module.num_heads,
        kv_heads=module.num_kv_heads,
        head_dim=module.head_dim,
        value_dim=module.value_dim,
        context_dim=module.context_dim,
        q_bias=q_bias,
        k_bias=kv_bias,
        v_bias=kv_bias,
        o_bias=module.out_proj.bias is not None,
        qk_norm=_size(module.q_norm) + _size(module.k_norm),
        sinks=module.sinks is not None,
        **window_fields(module.window, module.num_heads),
        rotary_dim=0 if module.rope is None else module.rope.width(module.head_dim),
    )


@_described.register
def _(module: LatentAttention) -> cost.LatentAttention:
    return cost.LatentAttention(
        embed_dim=module.embed_dim,
        heads=module.num_heads,
        latent_dim=module.latent_dim,
        nope_dim=module.nope_dim,
        rope_dim=module.rope_dim,
        value_dim=module.value_dim,
        query_latent_dim=module.query_latent_dim,
        latent_bias=module.kv_down_proj.bias is not None,
        o_bias=module.out_proj.bias is not None,
    )


@_described.register
def _(module: FeedForward) -> cost.FeedForward:
    up = module.up_proj
    return cost.FeedForward(
        module.embed_dim,
        up.out_features,
        gated=False,
        bias=up.bias is not None,
        activation=_activation(module.activation),
    )


@_described.register
def _(module: GatedFeedForward) -> cost.FeedForward:
    both = module.gate_up_proj
    return cost.FeedForward(
        module.embed_dim,
        both.out_features // 2,
        gated=True,
        bias=both.bias is not None,
        activation=_activation(module.activation),
    )


@_described.register
def _(module: TransformerBlock) -> cost.Layer:
    if not isinstance(module.feed_forward, FeedForward | GatedFeedForward):
        raise ArgumentError(
            "feed_forward must be a FeedForward or a GatedFeedForward to be counted; got "
            f"{type(module.feed_forward).__name__}."
        )
    attention, feed_forward = _described(module.attention), _described(module.feed_forward)
    assert isinstance(attention, cost.Attention | cost.LatentAttention)
    assert isinstance(feed_forward, cost.FeedForward)
    cross = None if module.cross_attention is None else _described(module.cross_attention)
    assert cross is None or isinstance(cross, cost.Attention)
    norms = list(_norms(module))
    return cost.Layer(
        attention, feed_forward, cross, norms=len(norms), norm=_norm(norms[0], attention.embed_dim)
    )


@_described.register
def _(module: LanguageModel) -> cost.Model:
    if any(block.cross_attention is not None for block in module.blocks):
        raise ArgumentError(
            "a LanguageModel with cross-attentions is counted together with the encoder that it "
            "reads: describe the EncoderDecoder."
        )
    return _decoder(module, None)


@_described.register
def _(module: EncoderDecoder) -> cost.Model:
    source = _described(module.encoder)
    assert isinstance(source, cost.Model)
    return replace(_decoder(module.decoder, source), shared=module.config.shared)


@_described.register
def _(module: Encoder) -> cost.Model:
    config = module.config
    for part in module.blocks.modules():
        check_ends_ahead(part)
    return cost.Model(
        layers=_layers(module.blocks),
        vocab=config.vocab_size,
        causal=False,
        head=False,
        positions=_rows(module.positions),
        types=config.num_types,
        embedding_norm=config.embedding_norm,
        final_norm=config.final_norm,
        norm=_norm_of_model(module),
        pooler=config.pooler,
        trained_context=config.max_positions,
    )


def _decoder(module: LanguageModel, source: cost.Model | None) -> cost.Model:
    config = module.config
    return cost.Model(
        layers=tuple(map(as_causal, _layers(module.blocks))),
        vocab=config.vocab_size,
        tied=config.tied,
        head_bias=config.head_bias,
        capped_logits=config.logit_softcap is not None,
        positions=_rows(module.positions),
        embedding_norm=config.embedding_norm,
        final_norm=config.final_norm,
        norm=_norm_of_model(module),
        source=source,
        trained_context=config.max_positions,
    )


def _layers(blocks: nn.ModuleList) -> tuple[cost.Layer, ...]:
    found = [_described(block) for block in blocks]
    assert all(isinstance(layer, cost.Layer) for layer in found)
    return tuple(found)  # type: ignore[arg-type]


def _rows(positions: nn.Module | None) -> int:
    return positions.num_positions if isinstance(positions, LearnedPositions) else 0


def _norms(module: TransformerBlock) -> Iterator[nn.Module]:
    """The norms of a block over its width, in order."""
    for name, child in module.named_children():
        if name.endswith("_norm"):
            yield child


def _norm_of_model(module: LanguageModel | Encoder) -> Norm:
    own = module.norm if module.embedding_norm is None else module.embedding_norm
    return "rms" if own is None else _norm(own, module.config.embed_dim)


def _norm(norm: nn.Module, width: int) -> Norm:
    """What a norm trains, from its parameters: a gain, a gain and a bias, or nothing."""
    unbiased: Norm = "rms_offset" if isinstance(norm, OffsetRMSNorm) else "rms"
    if isinstance(norm, nn.LayerNorm):
        unbiased = "layer_unbiased"
    kinds: tuple[Norm, ...] = ("none", unbiased, "layer")
    size = _size(norm)
    for kind in kinds:
        if size == norm_parameters(kind, width):
            return kind
    raise ArgumentError(
        f"a norm over {width} lanes is counted with no parameters, {width} gains, or as many gains "
        f"and biases; {type(norm).__name__} has {size} parameters."
    )


def _activation(activation: object) -> str:
    """Its name in torch.nn.functional, such as "silu"."""
    while isinstance(activation, partial):  # GELU's approximation by tanh keeps what GELU keeps
        activation = activation.func
    name = getattr(activation, "__name__", type(activation).__name__)
    return name.lower()


def _size(module: nn.Module | None) -> int:
    return 0 if module is None else sum(parameter.numel() for parameter in module.parameters())


def _of_transformers(module: nn.Module, config: object) -> cost.Model:
    """By its config, less the head and the pooler where the module has none."""
    described = cost.from_transformers(config, name=type(module).__name__)
    embeddings_out = getattr(module, "get_output_embeddings", lambda: None)()
    if described.head and embeddings_out is None:
        described = replace(described, head=False, head_bias=False, tied=False)
    described = with_restricted_heads(described, module)
    without_pooler = replace(described, pooler=False)
    if cost.parameters_of(without_pooler).total == _size(module):
        return without_pooler
    return described
