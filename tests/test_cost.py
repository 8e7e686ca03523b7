"""The arithmetic of `multihead.cost`, to the digit."""

from __future__ import annotations

import itertools
import subprocess
import sys
from types import SimpleNamespace

import pytest

from multihead.cost import (
    AttentionCost,
    DecoderConfig,
    Report,
    attention_parameters,
    dtype_bytes,
    score_products,
    score_table_bytes,
    value_products,
)
from multihead.errors import ArgumentError

SMOLLM2 = DecoderConfig(
    layers=30,
    embed_dim=576,
    heads=9,
    kv_heads=3,
    head_dim=64,
    ffn_dim=1536,
    vocab=49152,
    tied=True,
)
SMALL = DecoderConfig(
    layers=3, embed_dim=22, heads=4, kv_heads=2, head_dim=5, ffn_dim=17, vocab=101, tied=False
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


def test_smollm2_parameters() -> None:
    assert SMOLLM2.parameters == 134515008
    assert SMOLLM2.embedding_parameters == 49152 * 576
    assert SMOLLM2.head_parameters == 0


def test_untied_parameters_equal_the_matrices_listed_one_by_one() -> None:
    d, q, kv, f, v = 22, 20, 10, 17, 101
    layer = [(d, q), (d, kv), (d, kv), (q, d), (d, f), (d, f), (f, d), (d, 1), (d, 1)]
    assert SMALL.parameters == sum(
        a * b for a, b in [(v, d), *itertools.chain(*[layer] * 3), (d, 1), (d, v)]
    )


def test_report_parts() -> None:
    tokens, pairs = 13, 13 * 14 // 2
    report = Report.of_decoder(SMALL, tokens, visible_pairs=pairs, dtype="bfloat16")
    assert report.products_projections == 3 * 13 * (2 * 22 * 20 + 2 * 22 * 10)
    assert report.products_scores == report.products_values == 3 * 4 * pairs * 5
    assert report.products_feed_forward == 3 * 13 * 3 * 22 * 17
    assert report.products_head == 13 * 22 * 101
    assert report.exponentials == 3 * 4 * pairs
    assert report.kv_cache_bytes == 2 * 3 * 2 * 5 * 13 * 2
    assert report.score_table_bytes_head == 13 * 13 * 2
    assert report.score_table_bytes_layer == 4 * report.score_table_bytes_head
    assert report.score_table_bytes_model == 3 * report.score_table_bytes_layer

    flat = report.as_dict()
    assert all(isinstance(value, (int, str)) for value in flat.values())
    for kind in ("parameters", "products"):
        parts = [v for k, v in flat.items() if k.startswith(kind) and not k.endswith("_total")]
        assert flat[f"{kind}_total"] == sum(int(part) for part in parts)
    assert flat["parameters_total"] == SMALL.parameters


def test_logits_of_the_last_row_alone() -> None:
    whole = Report.of_decoder(SMALL, 13, visible_pairs=91, dtype="float32")
    last = Report.of_decoder(SMALL, 13, visible_pairs=91, dtype="float32", logit_rows=1)
    assert whole.products_total - last.products_total == 12 * 22 * 101


def test_kv_cache_depends_on_the_kv_width_alone() -> None:
    def plain(heads: int) -> DecoderConfig:
        return DecoderConfig(2, 64, heads, heads, 64 // heads, 128, 11, True)

    sizes = {plain(heads).kv_cache_bytes(19, "float16") for heads in (1, 2, 4, 8, 16)}
    assert sizes == {2 * 2 * 64 * 19 * 2}
    assert SMOLLM2.kv_cache_bytes(2048, "float32") == 2 * 30 * 192 * 2048 * 4
    assert SMOLLM2.kv_cache_bytes(2048, "int8") * 4 == SMOLLM2.kv_cache_bytes(2048, "float32")


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


def llama(**changes: object) -> SimpleNamespace:
    sizes: dict[str, object] = {
        "model_type": "llama",
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    }
    return SimpleNamespace(**{k: v for k, v in (sizes | changes).items() if v != "absent"})


def test_from_transformers() -> None:
    assert DecoderConfig.from_transformers(llama()) == SMOLLM2
    assert DecoderConfig.from_transformers(llama(head_dim=None)) == SMOLLM2
    assert DecoderConfig.from_transformers(llama(head_dim=32)).head_dim == 32
    assert DecoderConfig.from_transformers(llama(num_key_value_heads="absent")).kv_heads == 9


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gemma2"}, "gemma2"),
        ({"attention_bias": True}, "attention_bias"),
        ({"intermediate_size": "absent"}, "intermediate_size"),
        ({"num_attention_heads": 10}, "kv_heads"),
        ({"num_hidden_layers": 0}, "layers"),
    ],
)
def test_a_config_that_would_be_counted_wrongly_is_refused(
    changes: dict[str, object], named: str
) -> None:
    with pytest.raises(ArgumentError, match=named):
        DecoderConfig.from_transformers(llama(**changes))


def test_counts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ArgumentError, match="visible_pairs"):
        Report.of_decoder(SMALL, 13, visible_pairs=170, dtype="float32")
    with pytest.raises(ArgumentError, match="context"):
        Report.of_decoder(SMALL, -1, visible_pairs=0, dtype="float32")
    with pytest.raises(ArgumentError, match="complex64"):
        dtype_bytes("complex64")
    with pytest.raises(ArgumentError, match="integer"):
        score_products(3.5, 8)  # type: ignore[arg-type]


def test_dtype_of_torch() -> None:
    torch = pytest.importorskip("torch")
    assert dtype_bytes(torch.bfloat16) == dtype_bytes("bfloat16") == 2


def test_cost_needs_no_transformers() -> None:
    code = "import sys, multihead.cost; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
