"""One pass in one flat table: what an inspection's header, page and JSON show."""

from __future__ import annotations

from multihead.cost.cache import cache_bytes
from multihead.cost.memory import score_tables
from multihead.cost.model import Model
from multihead.cost.operations import Pass, forward, model_pairs
from multihead.cost.parameters import parameters_of


def summary(
    model: Model,
    context: int,
    *,
    dtype: object,
    visible_pairs: int | tuple[int, ...] | None = None,
    logit_rows: int | None = None,
) -> dict[str, int | str]:
    """Counts for one sequence of `context` tokens through every layer.

    Args:
        dtype: of scores and cache, a name or a `torch.dtype`.
        visible_pairs: what one head sees, in every layer or in each of them; by default what the
            layers' own masks show.
        logit_rows: positions whose logits are computed; all of them unless given.

    Returns:
        `parameters_*` and `products_*` (multiply-adds) by part, the exponentials, the pairs of one
        head (their mean, rounded down), the cache of a decoder, 0 for an encoder, and
        `score_table_bytes_*`: the tables that are never built, of one head, of a layer and of the
        whole model.

    Raises:
        ArgumentError: negative counts, or more pairs than `context ** 2`.
    """
    step = Pass(context, pairs=visible_pairs, logit_rows=logit_rows)
    counted, parameters = forward(model, step), parameters_of(model)
    heads = sum(layer.attention.heads for layer in model.layers)
    seen = sum(model_pairs(model, step))
    tables = score_tables(model, step, dtype)
    return {
        "context": context,
        "visible_pairs": seen // heads,
        "dtype": str(dtype).removeprefix("torch."),
        "parameters_embeddings": parameters.embeddings + parameters.positions,
        "parameters_attention": parameters.attention + parameters.other,
        "parameters_feed_forward": parameters.feed_forward + parameters.router,
        "parameters_norms": parameters.norms,
        "parameters_head": parameters.head,
        "parameters_total": parameters.total,
        "products_projections": counted.projections,
        "products_scores": counted.scores,
        "products_values": counted.values,
        "products_feed_forward": counted.feed_forward + counted.router,
        "products_head": counted.head + counted.other,
        "products_total": counted.total,
        "exponentials": counted.exponentials,
        "kv_cache_bytes": cache_bytes(model, context, dtype=dtype) if model.causal else 0,
        "score_table_bytes_head": tables.head,
        "score_table_bytes_layer": tables.layer,
        "score_table_bytes_model": tables.model,
    }
