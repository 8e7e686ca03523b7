"""GPT-2: learned positions, biases everywhere."""

from __future__ import annotations

from multihead.cost.families.fields import Fields
from multihead.cost.model import FeedForward, Layer, Model
from multihead.cost.parts import Attention

MODEL_TYPES = ("gpt2",)


def read(fields: Fields, model_type: str) -> Model:
    """The description of a model of type "gpt2"."""
    fields = fields.with_defaults({"tie_word_embeddings": True})
    fields.refuse(add_cross_attention=False)
    width = fields.size("n_embd", "hidden_size")
    layer = Layer(
        Attention.of(width, fields.size("n_head", "num_attention_heads"), bias=True),
        FeedForward(width, fields.size_or("n_inner", 4 * width), False, True, "gelu"),
        norm="layer",
    )
    positions = fields.size("n_positions", "max_position_embeddings")
    return Model(
        layers=(layer,) * fields.size("n_layer", "num_hidden_layers"),
        vocab=fields.size("vocab_size"),
        tied=fields.flag("tie_word_embeddings"),
        positions=positions,
        norm="layer",
        trained_context=positions,
    )
