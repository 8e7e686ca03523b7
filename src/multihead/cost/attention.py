"""The arithmetic of attention itself: one head, one call, one layer's weights.

`pairs` is always a number of *visible* (query, key) pairs, as a mask's `visible_pairs` counts
them; `queries * keys` gives the dense convention, where hidden pairs are counted too.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from multihead.cost.checks import check_counts
from multihead.errors import ArgumentError

_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
}


def dtype_bytes(dtype: object) -> int:
    """Bytes of one element of `dtype`: a name such as "bfloat16", or a `torch.dtype`.

    Raises ArgumentError for a dtype that scores and caches are not kept in.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _BYTES:
        raise ArgumentError(
            f"dtype is {dtype!r}, but its size is not known here; use one of {', '.join(_BYTES)}."
        )
    return _BYTES[name]


def attention_parameters(
    embed_dim: int, heads: int, kv_heads: int | None = None, head_dim: int | None = None
) -> int:
    """Weights of the query, key, value and output projections, without biases.

    Plain multi-head attention (`kv_heads` equal to `heads`, `head_dim` equal to
    `embed_dim / heads`, the defaults) has 4 * embed_dim**2, whatever the number of heads.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    check_counts(embed_dim=embed_dim, heads=heads, kv_heads=kv_heads)
    if head_dim is None:
        if heads == 0 or embed_dim % heads:
            raise ArgumentError(
                f"embed_dim {embed_dim} is not a multiple of heads {heads}; "
                "say head_dim where a head is not embed_dim / heads wide."
            )
        head_dim = embed_dim // heads
    check_counts(head_dim=head_dim)
    return 2 * embed_dim * head_dim * (heads + kv_heads)


def score_products(pairs: int, head_dim: int) -> int:
    """Multiply-adds of Q K^T over `pairs` visible pairs."""
    check_counts(pairs=pairs, head_dim=head_dim)
    return pairs * head_dim


def value_products(pairs: int, value_dim: int) -> int:
    """Multiply-adds of P V over `pairs` visible pairs."""
    check_counts(pairs=pairs, value_dim=value_dim)
    return pairs * value_dim


def score_table_bytes(queries: int, keys: int, dtype: object, tables: int = 1) -> int:
    """Bytes of `tables` whole query x key score tables: what is never built here."""
    check_counts(queries=queries, keys=keys, tables=tables)
    return tables * queries * keys * dtype_bytes(dtype)


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """The cost of one forward attention call.

    `visible_pairs` is summed over every query head and batch row, so that a mask with a window
    per head or a length per row is counted exactly: `batch * heads * mask.visible_pairs(Lq, Lk)`
    where all of them see the same pairs.
    """

    score_products: int
    value_products: int
    exponentials: int
    input_bytes: int
    output_bytes: int
    score_table_bytes: int

    @classmethod
    def of_call(
        cls,
        *,
        batch: int,
        heads: int,
        kv_heads: int,
        query_length: int,
        key_length: int,
        head_dim: int,
        value_dim: int,
        visible_pairs: int,
        dtype: object,
    ) -> AttentionCost:
        """Count a call with query [B, H, Lq, D], key [B, Hkv, Lk, D] and value [B, Hkv, Lk, Dv].

        Raises ArgumentError for a negative size, or more visible pairs than the call has pairs.
        """
        check_counts(
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            query_length=query_length,
            key_length=key_length,
            head_dim=head_dim,
            value_dim=value_dim,
            visible_pairs=visible_pairs,
        )
        rows, keys = batch * heads * query_length, batch * kv_heads * key_length
        if visible_pairs > rows * key_length:
            raise ArgumentError(
                f"visible_pairs is {visible_pairs}, but the call has only {rows * key_length} "
                "pairs of a query and a key over all heads and batch rows."
            )
        size = dtype_bytes(dtype)
        return cls(
            score_products=score_products(visible_pairs, head_dim),
            value_products=value_products(visible_pairs, value_dim),
            exponentials=visible_pairs,
            input_bytes=size * (rows * head_dim + keys * (head_dim + value_dim)),
            output_bytes=size * rows * value_dim,
            score_table_bytes=score_table_bytes(query_length, key_length, dtype, batch * heads),
        )

    @property
    def flops(self) -> int:
        """Floating-point operations of the two matrix products: two per multiply-add."""
        return 2 * (self.score_products + self.value_products)

    @property
    def backward_flops(self) -> int:
        """Those of the backward pass, as fused kernels have it: Q K^T again, and four gradients.

        2.5 times the forward where keys and values are of one width; the gradient of the queries
        and that of the keys are as wide as keys, that of the weights and of the values as values.
        """
        return 2 * (3 * self.score_products + 2 * self.value_products)

    def as_dict(self) -> dict[str, int]:
        """All counts under their field names, and `flops`."""
        return {**asdict(self), "flops": self.flops}
