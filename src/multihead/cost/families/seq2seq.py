"""Encoder-decoders: BART and T5."""

from __future__ import annotations

from dataclasses import replace

from multihead.cost.families.fields import Fields
from multihead.cost.model import FeedForward, Layer, Model
from multihead.cost.parts import Attention

MODEL_TYPES = ("bart", "t5")


def read(fields: Fields, model_type: str) -> Model:
    """The description of an encoder-decoder; its encoder is the model's `source`."""
    fields = fields.with_defaults({"tie_word_embeddings": True})
    return _t5(fields) if model_type == "t5" else _bart(fields)


def _bart(fields: Fields) -> Model:
    fields.refuse(tie_word_embeddings=True)  # untied, each stack has a table of its own
    width, vocab = fields.size("d_model"), fields.size("vocab_size")
    positions = fields.size("max_position_embeddings")

    def parts(side: str) -> tuple[Attention, FeedForward]:
        attention = Attention.of(width, fields.size(f"{side}_attention_heads"), bias=True)
        ffn = FeedForward(width, fields.size(f"{side}_ffn_dim"), gated=False, bias=True)
        return attention, ffn

    source = Model(
        layers=(Layer(*parts("encoder"), norm="layer"),) * fields.size("encoder_layers"),
        vocab=vocab,
        causal=False,
        head=False,
        positions=positions + 2,  # the first two rows are those of padding
        embedding_norm=True,
        final_norm=False,
        norm="layer",
        trained_context=positions,
    )
    attention, ffn = parts("decoder")
    cross = replace(attention, context_dim=width)
    target = Layer(attention, ffn, cross=cross, norms=3, norm="layer")
    return replace(
        source,
        layers=(target,) * fields.size("decoder_layers"),
        causal=True,
        head=True,
        tied=True,
        source=source,
        shared=True,
    )


def _t5(fields: Fields) -> Model:
    width, heads = fields.size("d_model"), fields.size("num_heads")
    attention = Attention.of(width, heads, head_dim=fields.size("d_kv"))
    ffn = FeedForward(
        width,
        fields.size("d_ff"),
        gated=str(fields.get("feed_forward_proj", "relu")).startswith("gated"),
    )
    # One table of score biases a stack, which the first layer holds and all add.
    biased = replace(
        attention, bias_table=fields.size_or("relative_attention_num_buckets", 32) * heads
    )
    layers = fields.size("num_layers")

    def stack(cross: Attention | None, count: int) -> tuple[Layer, ...]:
        norms = 2 if cross is None else 3
        plain = Layer(attention, ffn, cross=cross, norms=norms)
        return (replace(plain, attention=biased), *[plain] * (count - 1))

    source = Model(stack(None, layers), fields.size("vocab_size"), causal=False, head=False)
    return Model(
        layers=stack(
            replace(attention, context_dim=width), fields.size_or("num_decoder_layers", layers)
        ),
        vocab=source.vocab,
        tied=fields.flag("tie_word_embeddings"),
        source=source,
        shared=True,
    )
