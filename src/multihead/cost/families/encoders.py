"""Encoders: BERT, RoBERTa and ModernBERT, without the heads of their tasks."""

from __future__ import annotations

from dataclasses import replace

from multihead.cost.families.fields import FULL, SLIDING, Fields
from multihead.cost.model import FeedForward, Layer, Model
from multihead.cost.parts import Attention, Norm

MODEL_TYPES = ("bert", "roberta", "modernbert")


def read(fields: Fields, model_type: str) -> Model:
    """The description of an encoder as `AutoModel` builds it: BERT's pooler, but no logits."""
    return _modernbert(fields) if model_type == "modernbert" else _bert(fields, model_type)


def _bert(fields: Fields, model_type: str) -> Model:
    fields.refuse(is_decoder=False, add_cross_attention=False)
    width = fields.size("hidden_size")
    layer = Layer(
        Attention.of(width, fields.size("num_attention_heads"), bias=True),
        FeedForward(width, fields.size("intermediate_size"), False, True, "gelu"),
        norm="layer",
    )
    positions = fields.size("max_position_embeddings")
    return Model(
        layers=(layer,) * fields.size("num_hidden_layers"),
        vocab=fields.size("vocab_size"),
        causal=False,
        head=False,
        positions=positions,
        types=fields.size_or("type_vocab_size", 2),
        embedding_norm=True,
        final_norm=False,
        norm="layer",
        pooler=True,
        # RoBERTa's first positions are those of padding.
        trained_context=positions - 2 if model_type == "roberta" else positions,
    )


def _modernbert(fields: Fields) -> Model:
    width, bias = fields.size("hidden_size"), fields.flag("attention_bias")
    norm: Norm = "layer" if fields.flag("norm_bias") else "layer_unbiased"
    layers = fields.size("num_hidden_layers")
    every = fields.size_or("global_attn_every_n_layers", 3)
    types = fields.layer_types(layers) or [SLIDING if i % every else FULL for i in range(layers)]
    reach = fields.size_or("local_attention", 128) // 2

    def layer(index: int) -> Layer:
        plain = Attention.of(width, fields.size("num_attention_heads"), bias=bias, rotary=True)
        local = replace(plain, window=reach + 1, window_ahead=reach)
        return Layer(
            local if types[index] == SLIDING else plain,
            FeedForward(
                width,
                fields.size("intermediate_size"),
                bias=fields.flag("mlp_bias"),
                activation="gelu",
            ),
            # The embeddings' norm is the first layer's.
            norms=1 if index == 0 else 2,
            norm=norm,
        )

    return Model(
        layers=tuple(layer(index) for index in range(layers)),
        vocab=fields.size("vocab_size"),
        causal=False,
        head=False,
        embedding_norm=True,
        norm=norm,
        trained_context=fields.size_or_none("max_position_embeddings"),
    )
