"""One real model, one text: what every head does, at any length and without an N x N matrix.

Shape suffixes of the arrays: L layers, H heads, N tokens, P = min(64, N) map bins,
S = min(128, N) strip bins, K = min(8, N) keys, M sampled queries.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...cost import from_transformers, summary
from ...errors import ArgumentError, InputError, ModelError
from ...machine import processor_name
from ...ops.backends import native
from .. import text as texts
from ..forward import position_count
from ..running import observing, set_to_multihead
from ..watching.statistics import STATISTICS
from .capture import STRIPS, Call, Capture, Layer, Sweep
from .gaps import pruned_heads, with_gaps

if TYPE_CHECKING:
    from ...integrations import ModelFacts

Array = np.ndarray[Any, np.dtype[Any]]

MAX_TOKENS = 2048
SINK_SHARE = 0.05
MOST_SINKS = 8


@dataclass(frozen=True, eq=False)
class TokenView:
    """What one token reads: the strongest keys of every head, and of the mean of a layer's heads.

    `top_keys` and `top_weights` are [L, H, K], strongest first; `mean_top_keys` and
    `mean_top_weights` [L, K]. A column of -1 (and weight 0) stands for no key.
    """

    index: int
    text: str
    top_keys: Array
    top_weights: Array
    mean_top_keys: Array
    mean_top_weights: Array


@dataclass(frozen=True, eq=False)
class Links:
    """The five strongest keys of a few queries in every head.

    `rows` int [M], the chosen token among them; `keys` and `weights` [M, L, H, 5], -1 and 0 where
    a query sees fewer keys.
    """

    rows: Array
    keys: Array
    weights: Array


@dataclass(frozen=True, eq=False)
class Sinks:
    """Keys that take much from everyone: at most 8, ascending.

    Of the keys that at least half of the queries can see, those whose mean weight over all
    queries is above 0.05 in some head, the largest by the mean over heads. `columns` int [S_],
    `mean` [L, H, S_], and `strips` [L, H, P, S_], the mean weight by bin of queries; in a layer
    where 256 other keys receive more than a sink, its mean throughout.
    """

    columns: Array
    mean: Array
    strips: Array


@dataclass(frozen=True, eq=False)
class Inspection:
    """All that terminal, JSON and page show. Arrays are float32 or int64.

    * `provenance`: model, file, dtype, backend, tokens, times, measured error against float64;
      `instruction_set` is that of the native kernels for this dtype, None where another backend
      served
    * `cost`: the fields of `multihead.cost.summary`; empty for a model that it does not cover,
      such as one with a layer whose heads were all pruned
    * `tokens`: the text of each token [N]
    * `statistics`: [L, H] each; names and meanings in `multihead.heads.watching.statistics`
    * `strips`: [L, H, S] each, the statistics of single queries averaged over bins of queries
    * `token`, `links`: the strongest keys of a few queries
    * `maps`: "mass" and "peak" [L, H, P, P] as `attention_map` gives them, NaN where the mask hides
      every pair, and "uniform" [P, P], the mass of a head without preferences (where layers have
      different masks, under the one that shows most)
    * heads that were pruned are there by their first numbers, with NaN, no keys and no weight
    * `sinks`, and `received` [L, H, S]: the mean weight that keys receive from the queries that
      can see them, averaged over bins of keys

    `maps` is empty and `sinks` and `received` are None where no report was asked for: they need
    one more pass over all pairs.
    """

    provenance: dict[str, str | int | float | None]
    cost: dict[str, int | str]
    tokens: list[str]
    layers: int
    heads: int
    kv_heads: int
    statistics: dict[str, Array]
    strips: dict[str, Array]
    token: TokenView
    links: Links
    maps: dict[str, Array]
    sinks: Sinks | None
    received: Array | None

    def to_json(self) -> dict[str, Any]:
        """Everything but maps and strips as JSON values, numbers to six digits."""
        document = {
            "provenance": self.provenance,
            "cost": self.cost,
            "tokens": self.tokens,
            "layers": self.layers,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "statistics": self.statistics,
            "token": vars(self.token),
            "links": vars(self.links),
        }
        if self.sinks is not None:
            document["sinks"] = {"columns": self.sinks.columns, "mean": self.sinks.mean}
        return {name: _json(value) for name, value in document.items()}


def inspect_model(
    model: Any,
    tokenizer: Any,
    *,
    text: str | Path | None = None,
    token: str | int | None = None,
    max_tokens: int | None = None,
    report: bool = False,
    facts: ModelFacts | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Inspection:
    """Run a transformers language model once over a text and keep what every head does.

    Args:
        model: a decoder from transformers. Its layers run once; no logits are computed.
        tokenizer: its tokenizer.
        text: a text, the path of a UTF-8 file, or None for a built-in sentence that Python's own
            documentation follows.
        token: the token whose reading is shown: its text (the last one like it), or its index,
            negative from the end. None is the last " it" (of the sentence, in the built-in text),
            or the last token where there is none.
        max_tokens: the text is cut to so many tokens; to 2048 unless given, or as many positions as
            the model has.
        report: also make maps, sinks and what each key receives, for the report.
        facts: where the model came from, for the provenance.
        progress: called with the number of layers done and that of all.

    Raises:
        InputError: a text, a token or a number of tokens that cannot be used.
        ModelError: a model that cannot be inspected.
    """
    began = time.perf_counter()
    config = _checked_config(model)
    positions = position_count(model)
    if max_tokens is None:
        max_tokens = min(MAX_TOKENS, positions or MAX_TOKENS)
    _check_max_tokens(max_tokens, positions)
    chosen_text = _text(text)
    tokens = texts.tokenize(tokenizer, chosen_text, max_tokens)
    index = texts.choose_token(tokens, token)
    pruned = pruned_heads(model)
    capture = Capture(
        len(tokens.ids),
        index,
        layers=config.num_hidden_layers,
        maps=report,
        unequal=pruned is not None,
        progress=progress,
    )
    forward_began = time.perf_counter()
    with ExitStack() as stack:
        set_to_multihead(model, stack)
        stack.enter_context(torch.inference_mode())
        stack.enter_context(observing(capture))
        input_ids = torch.tensor([tokens.ids], device=model.device)
        was_training = model.training
        model.eval()
        stack.callback(model.train, was_training)
        model.base_model(input_ids=input_ids, use_cache=False)
    forward_seconds = time.perf_counter() - forward_began - capture.seconds
    first, layers = capture.first, capture.layers
    if first is None:
        raise ModelError(f"{type(model).__name__} ran without a call of attention to inspect.")
    if pruned is not None:
        layers = with_gaps(layers, pruned)
    sweeps = [layer.sweep for layer in layers if layer.sweep is not None]
    inspection = Inspection(
        provenance={
            **_provenance(first, layers, model, facts),
            "tokens": len(tokens.ids),
            "start_token": tokens.start_token or "none added",
            "chat_template": "not applied",
            "text": chosen_text.source,
            "seconds": 0.0,
            "forward_seconds": forward_seconds,
            "peak_rss_bytes": _peak_rss_bytes(),
        },
        cost=_cost(config, len(tokens.ids), model.dtype),
        tokens=tokens.pieces,
        layers=len(layers),
        heads=first.heads if pruned is None else pruned[0].num_heads,
        kv_heads=first.kv_heads if pruned is None else pruned[0].num_kv_heads,
        statistics={
            name: _stack([layer.statistics[name] for layer in layers]).astype(np.float32)
            for name in STATISTICS
        },
        strips={name: _stack([layer.strips[name] for layer in layers]) for name in STRIPS},
        token=_token_view(layers, index, tokens.pieces[index]),
        links=Links(
            rows=np.array(capture.rows),
            keys=_stack([layer.link_keys for layer in layers], axis=1),
            weights=_stack([layer.link_weights for layer in layers], axis=1),
        ),
        maps=_maps(sweeps),
        sinks=_sinks(sweeps) if sweeps else None,
        received=_stack([it.received for it in sweeps]) if sweeps else None,
    )
    inspection.provenance["seconds"] = time.perf_counter() - began
    return inspection


def _checked_config(model: Any) -> Any:
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "base_model"):
        raise ModelError(
            f"{type(model).__name__} is not a transformers model; only these can be inspected. "
            "multihead.watch also takes modules with multihead.MultiHeadAttention layers."
        )
    config = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{type(model).__name__} is an encoder with a decoder; an inspection reads one text "
            "with one stack of layers. Pass its encoder, or use multihead.watch."
        )
    return config


def _check_max_tokens(max_tokens: int, positions: int | None) -> None:
    if max_tokens < 2:
        raise InputError(f"max_tokens is {max_tokens}; at least 2 tokens are needed.")
    if positions is not None and max_tokens > positions:
        raise InputError(
            f"{max_tokens:,} tokens were asked for, but the model has {positions:,} positions. "
            f"Ask for {positions:,} or fewer."
        )


def _text(text: str | Path | None) -> texts.Text:
    if text is None:
        return texts.built_in()
    return texts.from_file(text) if isinstance(text, Path) else texts.from_prompt(text)


def _provenance(
    first: Call, layers: list[Layer], model: Any, facts: ModelFacts | None
) -> dict[str, str | int | float | None]:
    from ... import __version__

    errors = [layer.error for layer in layers if layer.error is not None]
    baselines = [error.baseline for error in errors if error.baseline is not None]
    return {
        "model": facts.name if facts else type(model).__name__,
        "file": facts.file if facts else None,
        "quantization": facts.quantization if facts else None,
        "dtype": str(model.dtype).removeprefix("torch."),
        "backend": first.backend,
        "instruction_set": (
            native.instruction_set(first.dtype) if first.backend == native.NAME else None
        ),
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "versions": (
            f"multihead {__version__}, torch {torch.__version__}, "
            f"transformers {sys.modules['transformers'].__version__}, "
            f"Python {platform.python_version()}"
        ),
        "dense_error_max": max(error.ours for error in errors),
        "dense_error_rows": sum(error.rows for error in errors),
        "dense_error_baseline": max(baselines) if len(baselines) == len(errors) else None,
    }


def _cost(config: Any, tokens: int, dtype: torch.dtype) -> dict[str, int | str]:
    try:
        described = from_transformers(config)
    except ArgumentError:
        return {}
    return summary(described, tokens, dtype=dtype, logit_rows=0)


def _token_view(layers: list[Layer], index: int, text: str) -> TokenView:
    keys = _stack([layer.token_keys for layer in layers])
    shown = max(1, int((keys >= 0).sum(-1).max()))
    return TokenView(
        index=index,
        text=text,
        top_keys=keys[..., :shown],
        top_weights=_stack([layer.token_weights for layer in layers])[..., :shown],
        mean_top_keys=_stack([layer.mean_keys for layer in layers])[..., :shown],
        mean_top_weights=_stack([layer.mean_weights for layer in layers])[..., :shown],
    )


def _maps(sweeps: list[Sweep]) -> dict[str, Array]:
    if not sweeps:
        return {}
    uniforms = [uniform for sweep in sweeps for uniform in sweep.uniform]
    widest = max(uniforms, key=lambda uniform: int(uniform.isfinite().sum()))
    return {
        "mass": _stack([sweep.mass for sweep in sweeps]),
        "peak": _stack([sweep.peak for sweep in sweeps]),
        "uniform": widest.numpy(),
    }


def _sinks(sweeps: list[Sweep]) -> Sinks:
    mean_lhk = torch.stack([sweep.mean for sweep in sweeps])
    strong = {
        int(column)
        for sweep in sweeps
        for column in sweep.candidates
        if bool((sweep.mean[:, column] > SINK_SHARE).any())
    }
    ranked = sorted(strong, key=lambda column: -float(mean_lhk[..., column].mean()))
    columns = sorted(ranked[:MOST_SINKS])
    strips = []
    for sweep in sweeps:
        strip_hrs = sweep.mean[:, None, columns].repeat(1, sweep.strips.shape[1], 1)
        for place, column in enumerate(columns):
            kept = torch.nonzero(sweep.candidates == column)
            if len(kept):
                strip_hrs[..., place] = sweep.strips[..., int(kept)]
        strips.append(strip_hrs)
    return Sinks(
        columns=np.array(columns, dtype=np.int64),
        mean=mean_lhk[..., columns].numpy(),
        strips=_stack(strips),
    )


def _stack(tensors: list[Tensor], axis: int = 0) -> Array:
    return torch.stack(tensors, axis).cpu().numpy()


def _peak_rss_bytes() -> int | None:
    """The largest resident size that this process has had; None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _json(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _json(value.tolist())
    if isinstance(value, dict):
        return {name: _json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_json(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
