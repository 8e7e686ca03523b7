"""Inspections made without a model, for the tests of the report: a head is a softmax of our choice.

Shape suffixes: l layer, h head, q query, k key.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from multihead.heads.inspecting.inspection import Inspection, Links, Sinks, TokenView

TEXT = (
    "The cat that chased the mouse sat on the mat because it was tired .\n "
    "A head is one softmax over all keys ; many heads are many rankings ,"
)
WORDS = TEXT.split(" ")
TOP, LINKS, BINS, STRIP_BINS = 8, 5, 64, 128


def made_up(length: int = 211, layers: int = 30, heads: int = 9, **changes: Any) -> Inspection:
    """An inspection with dense softmaxes behind it; `changes` are fields of its own.

    Heads differ as real ones do: some look at key 0, some at the token before, some at the token
    after the last occurrence of the same word, some nearby, some everywhere.
    """
    random = np.random.default_rng(7)
    words = random.integers(0, len(WORDS), length)
    tokens = [(" " if index else "") + WORDS[word] for index, word in enumerate(words)]
    weights_lhqk = np.stack(
        [
            np.stack([_softmax(words, layer, head, random) for head in range(heads)])
            for layer in range(layers)
        ]
    )
    return replace(_collect(tokens, weights_lhqk, index=length - 11), **changes)


def of_size(length: int, layers: int = 30, heads: int = 9) -> Inspection:
    """An inspection of `length` tokens with arrays of the right shapes and no meaning."""
    made = made_up(149, layers, heads)
    random = np.random.default_rng(11)
    maps = random.uniform(size=(2, layers, heads, BINS, BINS)).astype(np.float32)
    maps[..., np.isnan(_pooled_uniform(BINS))] = np.nan
    sink_strips = random.uniform(size=(layers, heads, BINS, 8)).astype(np.float32)
    shape = (layers, heads, STRIP_BINS)
    links = (17, layers, heads, LINKS)
    return replace(
        made,
        tokens=[f" token{index % 997}" for index in range(length)],
        maps={"mass": maps[0], "peak": maps[1], "uniform": _pooled_uniform(BINS)},
        sinks=Sinks(columns=np.arange(8), mean=sink_strips.mean(axis=2), strips=sink_strips),
        strips={name: random.uniform(size=shape).astype(np.float32) for name in made.strips},
        received=random.uniform(size=shape).astype(np.float32),
        links=Links(
            rows=np.linspace(10, length - 1, 17).astype(int),
            keys=random.integers(0, 10, links),
            weights=random.uniform(size=links).astype(np.float32),
        ),
    )


def _softmax(words: Any, layer: int, head: int, random: np.random.Generator) -> Any:
    length = len(words)
    query, key = np.arange(length)[:, None], np.arange(length)[None]
    logits_qk = random.normal(0, 0.7, (length, length))
    kind = random.integers(0, 6)
    if kind in (0, 1):
        logits_qk[:, 0] += 5 + random.uniform(0, 4)
    elif kind == 2:
        logits_qk += np.where(key == query - 1, 4 + layer / 10, 0) + np.where(key == 0, 5, 0)
    elif kind == 3:
        after = np.concatenate([[-1], words[:-1]])
        logits_qk += np.where(after[None] == words[:, None], 5.0, 0) + np.where(key == 0, 4, 0)
    elif kind == 4:
        logits_qk -= (query - key) / (2 + 3 * head)
    if layer % 3 == 1:
        logits_qk[:, 5] += 3.0
    logits_qk[key > query] = -np.inf
    weights_qk = np.exp(logits_qk - logits_qk.max(axis=1, keepdims=True))
    return weights_qk / weights_qk.sum(axis=1, keepdims=True)


def edges(length: int, bins: int) -> list[int]:
    """Borders of `bins` ranges of positions."""
    return [index * length // bins for index in range(bins + 1)]


def _over_bins(values: Any, borders: list[int], axis: int) -> Any:
    sizes = np.diff(borders)
    shape = [1] * values.ndim
    shape[axis] = len(sizes)
    return np.add.reduceat(values, borders[:-1], axis=axis) / sizes.reshape(shape)


def _pooled_uniform(length: int) -> Any:
    bins = min(BINS, length)
    borders = edges(length, bins)
    weights_qk = np.tril(np.ones((length, length))) / np.arange(1, length + 1)[:, None]
    return _pool(weights_qk, borders)


def _pool(weights_qk: Any, borders: list[int]) -> Any:
    rows = _over_bins(weights_qk, borders, axis=-2)
    cells = np.add.reduceat(rows, borders[:-1], axis=-1)
    cells[..., np.triu(np.ones(cells.shape[-2:], dtype=bool), 1)] = np.nan
    return cells.astype(np.float32)


def _collect(tokens: list[str], weights_lhqk: Any, index: int) -> Inspection:
    layers, heads, length, _ = weights_lhqk.shape
    bins, strip_bins = min(BINS, length), min(STRIP_BINS, length)
    borders = edges(length, bins)
    position = np.arange(length)
    logs = np.log(weights_lhqk, where=weights_lhqk > 0, out=np.zeros_like(weights_lhqk))
    entropy = -(weights_lhqk * logs).sum(-1)
    distance = (weights_lhqk * np.abs(position[:, None] - position)).sum(-1)
    strongest = weights_lhqk.max(-1)
    sink = weights_lhqk[..., 0]
    share = entropy[..., 1:] / np.log(position[1:] + 1)
    previous = np.stack([weights_lhqk[:, :, row, row - 1] for row in range(1, length)], axis=-1)
    rows = {
        "entropy": entropy, "max_weight": strongest, "mean_distance": distance, "sink_mass": sink,
    }  # fmt: skip
    statistics = {
        "entropy": entropy.mean(-1),
        "entropy_share": share.mean(-1),
        "max_weight": strongest.mean(-1),
        "max_logit": 10 + 3 * strongest.mean(-1),
        "max_qk": 10 + 3 * strongest.mean(-1),
        "mean_distance": distance.mean(-1),
        "sink_mass": sink.mean(-1),
        "participation": (1 / (weights_lhqk**2).sum(-1)).mean(-1),
        "previous_token": previous.mean(-1),
        "first_key": sink.mean(-1),
    }
    seen = length - position
    received = weights_lhqk.sum(-2) / seen
    columns = np.flatnonzero((received[..., : length // 2] > 0.05).any((0, 1)))
    columns = np.sort(columns[np.argsort(-received[..., columns].mean((0, 1)))][:8])
    peak = np.maximum.reduceat(weights_lhqk, borders[:-1], axis=-2)
    peak = np.maximum.reduceat(peak, borders[:-1], axis=-1)
    mass = _pool(weights_lhqk, borders)
    peak = np.where(np.isnan(mass), np.nan, peak).astype(np.float32)
    sampled = np.unique(np.append(np.linspace(2, length - 1, 16).astype(int), index))
    token_lhk = weights_lhqk[:, :, index, : index + 1]
    keys, weights = _top(token_lhk, TOP)
    mean_keys, mean_weights = _top(token_lhk.mean(1), TOP)
    links = [_top(weights_lhqk[:, :, row], LINKS) for row in sampled]
    return Inspection(
        provenance=_provenance(length),
        cost=_cost(length, layers, heads),
        tokens=tokens,
        layers=layers,
        heads=heads,
        kv_heads=heads // 3 if heads % 3 == 0 else heads,
        statistics={name: value.astype(np.float32) for name, value in statistics.items()},
        strips={
            name: _over_bins(value, edges(length, strip_bins), -1).astype(np.float32)
            for name, value in rows.items()
        },
        token=TokenView(
            index=index, text=tokens[index], top_keys=keys, top_weights=weights,
            mean_top_keys=mean_keys, mean_top_weights=mean_weights,
        ),
        maps={"mass": mass, "peak": peak, "uniform": _pooled_uniform(length)},
        sinks=Sinks(
            columns=columns,
            mean=weights_lhqk[..., columns].mean(2).astype(np.float32),
            strips=_over_bins(weights_lhqk[..., columns], borders, 2).astype(np.float32),
        ),
        received=_over_bins(received, edges(length, strip_bins), -1).astype(np.float32),
        links=Links(
            rows=sampled,
            keys=np.stack([keys for keys, _ in links]),
            weights=np.stack([weights for _, weights in links]),
        ),
    )  # fmt: skip


def _top(weights: Any, number: int) -> tuple[Any, Any]:
    keys = np.argsort(-weights, axis=-1, kind="stable")[..., :number]
    return keys, np.take_along_axis(weights, keys, axis=-1).astype(np.float32)


def _provenance(length: int) -> dict[str, Any]:
    return {
        "model": "made-up-135M", "file": "/home/someone/made-up.gguf", "quantization": "Q4_1",
        "dtype": "float32", "backend": "native", "instruction_set": "AVX-512",
        "processor": "a processor", "threads": 2, "tokens": length, "start_token": "none added",
        "chat_template": "not applied", "text": "made up", "seconds": 12.3,
        "forward_seconds": 4.5, "peak_rss_bytes": 1_234_567_890, "versions": "torch 2.13.0",
        "dense_error_max": 3.1e-7, "dense_error_rows": 17, "dense_error_baseline": 2.9e-7,
    }  # fmt: skip


def _cost(length: int, layers: int, heads: int) -> dict[str, Any]:
    table = 4 * length * length
    return {
        "context": length, "visible_pairs": length * (length + 1) // 2, "dtype": "float32",
        "parameters_embeddings": 28_311_552, "parameters_attention": 26_542_080,
        "parameters_feed_forward": 79_626_240, "parameters_norms": 35_136, "parameters_head": 0,
        "parameters_total": 134_515_008, "products_projections": length * 26_542_080,
        "products_scores": 1_000_000, "products_values": 1_000_000,
        "products_feed_forward": length * 79_626_240, "products_head": 28_311_552,
        "products_total": length * 106_168_320 + 30_311_552, "exponentials": 1_000_000,
        "kv_cache_bytes": 46_080 * length, "score_table_bytes_head": table,
        "score_table_bytes_layer": heads * table, "score_table_bytes_model": layers * heads * table,
    }  # fmt: skip
