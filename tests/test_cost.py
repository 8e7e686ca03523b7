"""The arithmetic of `multihead.cost`, to the digit."""

from __future__ import annotations

import ast
import itertools
import sys
from pathlib import Path

import pytest

import multihead.cost
from multihead.cost import (
    Attention,
    AttentionCost,
    FeedForward,
    Layer,
    Model,
    attention_parameters,
    dtype_bytes,
    parameters_of,
    score_products,
    score_table_bytes,
    summary,
    value_products,
)
from multihead.errors import ArgumentError

SMALL = Model(
    (Layer(Attention(22, 4, 2, 5, 5), FeedForward(22, 17)),) * 3,
    vocab=101,
)


@pytest.mark.parametrize(
    ("tokens", "products", "table_bytes"),
    [
        (1024, 134217728, 2097152),
        (8192, 8589934592, 134217728),
        (32768, 137438953472, 2147483648),
        (131072, 2199023255552, 34359738368),
    ],
)
def test_one_head_of_128(tokens: int, products: int, table_bytes: int) -> None:
    assert score_products(tokens * tokens, 128) == products
    assert value_products(tokens * tokens, 128) == products
    assert score_table_bytes(tokens, tokens, "float16") == table_bytes
    assert score_table_bytes(tokens, tokens, "float16", 7) == 7 * table_bytes


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 32])
def test_plain_attention_has_4_d_squared_whatever_the_heads(heads: int) -> None:
    assert attention_parameters(512, heads) == 4 * 512 * 512


def test_grouped_and_free_head_width() -> None:
    assert attention_parameters(576, 9, 3) == 2 * 576 * 576 + 2 * 576 * 3 * 64
    assert attention_parameters(22, 4, 2, 5) == 22 * 20 + 2 * 22 * 10 + 20 * 22
    with pytest.raises(ArgumentError, match="head_dim"):
        attention_parameters(22, 4)


def test_untied_parameters_equal_the_matrices_listed_one_by_one() -> None:
    d, q, kv, f, v = 22, 20, 10, 17, 101
    layer = [(d, q), (d, kv), (d, kv), (q, d), (d, f), (d, f), (f, d), (d, 1), (d, 1)]
    assert parameters_of(SMALL).total == sum(
        a * b for a, b in [(v, d), *itertools.chain(*[layer] * 3), (d, 1), (d, v)]
    )


def test_summary() -> None:
    tokens, pairs = 13, 13 * 14 // 2
    counts = summary(SMALL, tokens, dtype="bfloat16")
    assert counts["visible_pairs"] == pairs
    assert counts["products_projections"] == 3 * 13 * (2 * 22 * 20 + 2 * 22 * 10)
    assert counts["products_scores"] == counts["products_values"] == 3 * 4 * pairs * 5
    assert counts["products_feed_forward"] == 3 * 13 * 3 * 22 * 17
    assert counts["products_head"] == 13 * 22 * 101
    assert counts["exponentials"] == 3 * 4 * pairs
    assert counts["kv_cache_bytes"] == 2 * 3 * 2 * 5 * 13 * 2
    assert counts["score_table_bytes_head"] == 13 * 13 * 2
    assert counts["score_table_bytes_layer"] == 4 * 13 * 13 * 2
    assert counts["score_table_bytes_model"] == 3 * 4 * 13 * 13 * 2
    for kind in ("parameters", "products"):
        parts = [v for k, v in counts.items() if k.startswith(kind) and not k.endswith("_total")]
        assert counts[f"{kind}_total"] == sum(int(part) for part in parts)
    assert counts["parameters_total"] == parameters_of(SMALL).total
    assert summary(SMALL, tokens, dtype="bfloat16", visible_pairs=40)["exponentials"] == 12 * 40


def test_logits_of_the_last_row_alone() -> None:
    whole = summary(SMALL, 13, dtype="float32")
    last = summary(SMALL, 13, dtype="float32", logit_rows=1)
    assert int(whole["products_total"]) - int(last["products_total"]) == 12 * 22 * 101


# Case A21: queries, keys, a rule that says whether query i sees key j, pairs seen.
A21 = [
    (16, 16, lambda i, j: True, 256),
    (16, 16, lambda i, j: j <= i, 136),
    (4, 10, lambda i, j: j <= i + 6, 34),
    (16, 16, lambda i, j: i - 2 <= j <= i, 45),
    (1, 10, lambda i, j: j <= i + 9, 10),
]


@pytest.mark.parametrize(("queries", "keys", "sees", "pairs"), A21)
def test_flops_of_visible_pairs(queries, keys, sees, pairs) -> None:  # type: ignore[no-untyped-def]
    brute = [(i, j) for i in range(queries) for j in range(keys) if sees(i, j)]
    assert len(brute) == pairs
    cost = AttentionCost.of_call(
        batch=1,
        heads=4,
        kv_heads=2,
        query_length=queries,
        key_length=keys,
        head_dim=8,
        value_dim=16,
        visible_pairs=4 * pairs,
        dtype="float32",
    )
    assert cost.flops == cost.as_dict()["flops"] == 2 * 4 * pairs * (8 + 16)
    assert cost.backward_flops == 2 * 4 * pairs * (3 * 8 + 2 * 16)
    assert cost.exponentials == 4 * pairs
    assert cost.input_bytes == 4 * (4 * queries * 8 + 2 * keys * (8 + 16))
    assert cost.output_bytes == 4 * 4 * queries * 16
    assert cost.score_table_bytes == 4 * 4 * queries * keys


def test_grouped_heads_change_bytes_not_flops() -> None:
    def call(kv_heads: int) -> AttentionCost:
        return AttentionCost.of_call(
            batch=3,
            heads=4,
            kv_heads=kv_heads,
            query_length=7,
            key_length=11,
            head_dim=8,
            value_dim=8,
            visible_pairs=3 * 4 * 77,
            dtype="bfloat16",
        )

    assert call(4).flops == call(1).flops
    assert call(4).input_bytes - call(1).input_bytes == 3 * 3 * 2 * 8 * 11 * 2


def test_counts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ArgumentError, match="visible_pairs"):
        summary(SMALL, 13, visible_pairs=170, dtype="float32")
    with pytest.raises(ArgumentError, match="queries"):
        summary(SMALL, -1, dtype="float32")
    with pytest.raises(ArgumentError, match="complex64"):
        dtype_bytes("complex64")
    with pytest.raises(ArgumentError, match="integer"):
        score_products(3.5, 8)  # type: ignore[arg-type]


def test_dtype_of_torch() -> None:
    torch = pytest.importorskip("torch")
    assert dtype_bytes(torch.bfloat16) == dtype_bytes("bfloat16") == 2


def test_cost_is_arithmetic_alone() -> None:
    folder = Path(multihead.cost.__file__).parent
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, path
                names = [node.module or ""]
            for name in names:
                ours = name == "multihead.errors" or name.startswith("multihead.cost")
                assert ours or name.split(".")[0] in sys.stdlib_module_names, (path, name)
