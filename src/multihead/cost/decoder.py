"""The shape of a plain decoder, and its parameters by part.

Plain means Llama-like: token embeddings, then layers of RMSNorm, query / key / value / output
projections without biases, RMSNorm and a gated feed-forward (three matrices), then a final norm
and the head that gives logits, which may share the embeddings' matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from multihead.cost.attention import attention_parameters, dtype_bytes
from multihead.cost.checks import check_counts
from multihead.errors import ArgumentError

_PLAIN_MODEL_TYPES = ("llama", "mistral")
_BIAS_ATTRIBUTES = ("attention_bias", "mlp_bias")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The sizes that decide what a plain decoder costs.

    Raises ArgumentError for a size below 1, or query heads that KV heads cannot share evenly.
    """

    layers: int
    embed_dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab: int
    tied: bool

    def __post_init__(self) -> None:
        sizes = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "tied"}
        check_counts(**sizes)
        for name, value in sizes.items():
            if value == 0:
                raise ArgumentError(f"{name} must be 1 or more, got 0.")
        if self.heads % self.kv_heads:
            raise ArgumentError(
                f"heads is {self.heads} and kv_heads is {self.kv_heads}: each KV head serves a "
                "group of query heads, so kv_heads must divide heads."
            )

    @classmethod
    def from_transformers(cls, config: object) -> DecoderConfig:
        """Read a `LlamaConfig` or anything with the same attributes; transformers is not imported.

        Raises ArgumentError where the arithmetic would be wrong: a missing size, biases, or a
        `model_type` known to have other parts.
        """
        model_type = getattr(config, "model_type", None)
        if model_type and model_type not in _PLAIN_MODEL_TYPES:
            raise ArgumentError(
                f"The arithmetic of a plain decoder does not cover a model of type {model_type!r}; "
                f"it covers {' and '.join(_PLAIN_MODEL_TYPES)}."
            )
        for name in _BIAS_ATTRIBUTES:
            if getattr(config, name, False):
                raise ArgumentError(
                    f"The arithmetic of a plain decoder has no biases, but {name} is set."
                )
        heads = _size(config, "num_attention_heads")
        embed_dim = _size(config, "hidden_size")
        return cls(
            layers=_size(config, "num_hidden_layers"),
            embed_dim=embed_dim,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or embed_dim // heads,
            ffn_dim=_size(config, "intermediate_size"),
            vocab=_size(config, "vocab_size"),
            tied=bool(getattr(config, "tie_word_embeddings", False)),
        )

    @property
    def embedding_parameters(self) -> int:
        """The table of token embeddings; the head's too, where they are tied."""
        return self.vocab * self.embed_dim

    @property
    def layer_attention_parameters(self) -> int:
        """The four projections of one layer."""
        return attention_parameters(self.embed_dim, self.heads, self.kv_heads, self.head_dim)

    @property
    def layer_feed_forward_parameters(self) -> int:
        """Gate, up and down matrices of one layer."""
        return 3 * self.embed_dim * self.ffn_dim

    @property
    def norm_parameters(self) -> int:
        """Gains of two norms per layer and the final one."""
        return (2 * self.layers + 1) * self.embed_dim

    @property
    def head_parameters(self) -> int:
        """The matrix that gives logits; 0 where it is the embeddings' own."""
        return 0 if self.tied else self.vocab * self.embed_dim

    @property
    def parameters(self) -> int:
        """All parameters, each counted once."""
        return (
            self.embedding_parameters
            + self.layers * (self.layer_attention_parameters + self.layer_feed_forward_parameters)
            + self.norm_parameters
            + self.head_parameters
        )

    def kv_cache_bytes(self, context: int, dtype: object) -> int:
        """Bytes of the keys and values of `context` tokens in every layer, for one sequence.

        Depends on `kv_heads * head_dim`: at a fixed width it is the same for any number of heads.
        """
        check_counts(context=context)
        return 2 * self.layers * self.kv_heads * self.head_dim * context * dtype_bytes(dtype)


def _size(config: object, name: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int):
        raise ArgumentError(
            f"The config has no {name}, so this is not a plain decoder whose cost can be counted."
        )
    return value
