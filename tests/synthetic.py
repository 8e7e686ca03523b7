"""A made-up inspection with the shapes of a real one, drawn from a fixed seed."""

from __future__ import annotations

import numpy as np

from multihead.cost import Attention, FeedForward, Layer, Model, summary
from multihead.heads.inspecting.inspection import Inspection, Links, TokenView

TEXT = "The cat that chased the mouse sat on the mat because it was tired"
SENTENCE = [" " * (place > 0) + word for place, word in enumerate(TEXT.split())]


def top(weights: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and weights of the largest `count` entries of the last axis, largest first."""
    keys = np.argsort(-weights, axis=-1, kind="stable")[..., :count]
    return keys, np.take_along_axis(weights, keys, axis=-1).astype(np.float32)


def weights_over(rng: np.random.Generator, *shape: int) -> np.ndarray:
    logits = rng.normal(size=shape) * 2
    logits[..., 0] += 3
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def inspection(
    *,
    layers: int = 30,
    heads: int = 9,
    kv_heads: int | None = None,
    tokens: list[str] | None = None,
    index: int | None = None,
    seed: int = 0,
) -> Inspection:
    """An inspection of `tokens` (a sentence unless given) with plausible random numbers."""
    rng = np.random.default_rng(seed)
    kv_heads = kv_heads or (3 if heads % 3 == 0 else 1)
    tokens = list(SENTENCE if tokens is None else tokens)
    length = len(tokens)
    index = length - 3 if index is None else index
    kept = min(8, index + 1)
    at_token = weights_over(rng, layers, heads, index + 1)
    keys, values = top(at_token, kept)
    mean_keys, mean_values = top(at_token.mean(1), kept)
    rows = list(range(max(1, length - 5), length))
    links = [top(weights_over(rng, layers, heads, row + 1), min(5, row + 1)) for row in rows]
    width = max(pair[0].shape[-1] for pair in links)

    def padded(parts: list[np.ndarray], fill: float) -> np.ndarray:
        return np.stack(
            [
                np.pad(p, ((0, 0), (0, 0), (0, width - p.shape[-1])), constant_values=fill)
                for p in parts
            ]
        )

    shares = {
        name: rng.beta(0.8, 1.5, size=(layers, heads)).astype(np.float32)
        for name in ("entropy_share", "max_weight", "sink_mass", "first_key", "previous_token")
    }
    sizes = {
        name: np.exp(rng.normal(size=(layers, heads)) + shift).astype(np.float32)
        for name, shift in (
            ("entropy", 0.3),
            ("max_logit", 2.0),
            ("max_qk", 2.0),
            ("mean_distance", 4.0),
            ("participation", 2.0),
        )
    }
    width = 64 * heads
    layer = Layer(Attention.of(width, heads, kv_heads), FeedForward(width, 170 * heads))
    model = Model((layer,) * layers, vocab=49152, tied=True)
    cost = summary(model, length, dtype="float32", logit_rows=1)
    return Inspection(
        provenance={
            "model": "SmolLM2-135M-Instruct",
            "file": "smollm2.gguf",
            "quantization": "Q4_1",
            "dtype": "float32",
            "backend": "native",
            "instruction_set": "avx512",
            "processor": "A Processor at 2.1 GHz",
            "threads": 2,
            "tokens": length,
            "start_token": "none added",
            "chat_template": "not applied",
            "text": "the built-in sentence",
            "seconds": 21.34,
            "forward_seconds": 7.1,
            "peak_rss_bytes": 1_420_000_000,
            "versions": "multihead 0.1.0, torch 2.13.0, Python 3.11.7",
            "dense_error_max": 3.1e-7,
            "dense_error_rows": 16,
            "dense_error_baseline": 4.2e-7,
        },
        cost=cost,
        tokens=tokens,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        statistics={**shares, **sizes},
        token=TokenView(
            index=index,
            text=tokens[index],
            top_keys=keys,
            top_weights=values,
            mean_top_keys=mean_keys,
            mean_top_weights=mean_values,
        ),
        links=Links(
            rows=np.array(rows),
            keys=padded([pair[0] for pair in links], -1),
            weights=padded([pair[1] for pair in links], 0.0),
        ),
        strips={},
        maps={},
        sinks=None,
        received=None,
    )
