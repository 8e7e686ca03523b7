"""What one forward pass of a plain decoder over a context costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from multihead.cost.attention import (
    score_products,
    score_table_bytes,
    value_products,
)
from multihead.cost.checks import check_counts
from multihead.cost.decoder import DecoderConfig
from multihead.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Report:
    """Exact counts for one sequence of `context` tokens through every layer.

    `products_*` are multiply-adds. `visible_pairs` is per head: every head of a plain decoder
    has the same mask. `score_table_bytes_*` is the context x context table that is never built,
    for one head, for the heads of one layer and for the whole model.
    """

    context: int
    visible_pairs: int
    dtype: str
    parameters_embeddings: int
    parameters_attention: int
    parameters_feed_forward: int
    parameters_norms: int
    parameters_head: int
    parameters_total: int
    products_projections: int
    products_scores: int
    products_values: int
    products_feed_forward: int
    products_head: int
    products_total: int
    exponentials: int
    kv_cache_bytes: int
    score_table_bytes_head: int
    score_table_bytes_layer: int
    score_table_bytes_model: int

    @classmethod
    def of_decoder(
        cls,
        config: DecoderConfig,
        context: int,
        *,
        visible_pairs: int,
        dtype: object,
        logit_rows: int | None = None,
    ) -> Report:
        """Count a forward pass.

        `visible_pairs` is what the mask lets one head see: `context * (context + 1) // 2` for a
        causal one. `dtype` (a name or a `torch.dtype`) is that of scores and cache. `logit_rows`
        is the number of positions whose logits are computed: all of them unless given.

        Raises ArgumentError for negative counts and for more pairs than `context ** 2`.
        """
        rows = context if logit_rows is None else logit_rows
        check_counts(context=context, visible_pairs=visible_pairs, logit_rows=rows)
        if visible_pairs > context * context:
            raise ArgumentError(
                f"visible_pairs is {visible_pairs}, but one head has only "
                f"{context} x {context} = {context * context} pairs."
            )
        layers = config.layers
        attention = layers * config.layer_attention_parameters
        feed_forward = layers * config.layer_feed_forward_parameters
        model_pairs = layers * config.heads * visible_pairs
        products = {
            "products_projections": context * attention,
            "products_scores": score_products(model_pairs, config.head_dim),
            "products_values": value_products(model_pairs, config.head_dim),
            "products_feed_forward": context * feed_forward,
            "products_head": rows * config.vocab * config.embed_dim,
        }
        table = score_table_bytes(context, context, dtype)
        return cls(
            context=context,
            visible_pairs=visible_pairs,
            dtype=str(dtype).removeprefix("torch."),
            parameters_embeddings=config.embedding_parameters,
            parameters_attention=attention,
            parameters_feed_forward=feed_forward,
            parameters_norms=config.norm_parameters,
            parameters_head=config.head_parameters,
            parameters_total=config.parameters,
            **products,
            products_total=sum(products.values()),
            exponentials=model_pairs,
            kv_cache_bytes=config.kv_cache_bytes(context, dtype),
            score_table_bytes_head=table,
            score_table_bytes_layer=config.heads * table,
            score_table_bytes_model=layers * config.heads * table,
        )

    def as_dict(self) -> dict[str, int | str]:
        """All fields, flat, under their own names."""
        return asdict(self)
