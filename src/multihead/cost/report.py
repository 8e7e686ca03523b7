"""Everything that is counted of one model in one setting, as one document of plain values."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, get_args

from multihead.cost.attention import dtype_bytes
from multihead.cost.cache import CacheKind, cache_bytes
from multihead.cost.checks import check_choice, check_counts, check_sizes
from multihead.cost.crossover import crossover
from multihead.cost.device import Device
from multihead.cost.estimate import Estimate, estimate
from multihead.cost.fit import largest_batch, largest_context, largest_training_batch
from multihead.cost.latent import LatentAttention
from multihead.cost.memory import score_tables, weight_bytes
from multihead.cost.model import Experts, Layer, Model
from multihead.cost.operations import Pass, backward, forward, model_pairs
from multihead.cost.parameters import parameters_of
from multihead.cost.parts import Attention
from multihead.cost.training import training_memory
from multihead.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Setting:
    """How a model is used: what its costs depend on beside itself.

    Attributes:
        context: tokens of each row; decoding adds the last of them.
        batch: rows.
        dtype: of weights, activations, scores and cache.
        cache: what keeps keys and values.
        device: whose limits give times; None gives none.
        memory: bytes to fit into; None asks for nothing.

    Raises:
        ArgumentError: a size below 1, or an unknown dtype or kind of cache.
    """

    context: int
    batch: int = 1
    dtype: str = "bfloat16"
    cache: CacheKind = "growing"
    device: Device | None = None
    memory: int | None = None

    def __post_init__(self) -> None:
        check_sizes(context=self.context, batch=self.batch)
        dtype_bytes(self.dtype)
        check_choice("cache", self.cache, get_args(CacheKind))
        if self.memory is not None:
            check_counts(memory=self.memory)
        if self.device is not None:
            self.device.check_dtype(self.dtype)

    @property
    def prefill(self) -> Pass:
        """All tokens at once, and the logits of the last."""
        return Pass(self.context, batch=self.batch, logit_rows=1)

    @property
    def decode(self) -> Pass:
        """The last token alone, behind all others."""
        return Pass(1, past=self.context - 1, batch=self.batch, source=self.context)

    @property
    def training(self) -> Pass:
        """All tokens, and all logits."""
        return Pass(self.context, batch=self.batch)

    @property
    def cache_dtype(self) -> str:
        """What the cache's numbers are read as."""
        return "int8" if self.cache == "int8" else self.dtype


def report(model: Model, setting: Setting) -> dict[str, Any]:
    """All counts by part. Bytes, operations and tokens are integers, times are in seconds.

    `visible_pairs` are those of all heads of one row, layer by layer.

    Decoding and the caches are None for an encoder, training for an encoder-decoder.
    """
    prefill = forward(model, setting.prefill)
    return {
        "model": outline(model),
        "setting": setting_document(setting),
        "parameters": parameters_of(model).as_dict(),
        "active_parameters": parameters_of(model, active=True).as_dict(),
        "prefill": {
            "visible_pairs": model_pairs(model, setting.prefill),
            "operations": prefill.as_dict(),
            "dense_operations": forward(model, setting.prefill, counting="dense").as_dict(),
            "estimate": _estimate(model, setting.prefill, setting, None).as_dict(),
        },
        "decode": _decode(model, setting),
        "training": _training(model, setting),
        "memory": _memory(model, setting),
        "crossover": {
            "projections": crossover(model),
            "rest": crossover(model, "rest"),
        },
    }


def measures(model: Model, setting: Setting) -> dict[str, int | float | None]:
    """The figures that variants of a model are compared by, flat.

    Those of the cache and of decoding are None where the setting's cache does not hold the model.
    """
    prefill = forward(model, setting.prefill)
    ahead = _estimate(model, setting.prefill, setting, None)
    kept = _kept(model, setting, setting.cache) if model.causal else None
    step = None if kept is None else _decode_estimate(model, setting)
    found: dict[str, int | float | None] = {
        "parameters": parameters_of(model).total,
        "attention_parameters": parameters_of(model).attention,
        "prefill_products": prefill.total,
        "projection_products": prefill.projections,
        "attention_products": prefill.attention,
        "exponentials": prefill.exponentials,
        "score_table_bytes": score_tables(model, setting.prefill, setting.dtype).model,
        "kv_cache_bytes": kept,
        "decode_products": None if step is None else step.flops // 2,
        "decode_bytes": None if step is None else step.bytes,
        "decode_intensity": None if step is None else step.intensity,
    }
    if setting.device is not None:
        found["prefill_seconds"] = ahead.seconds
        found["decode_seconds"] = None if step is None else step.seconds
    if setting.memory is not None and model.causal:
        found["largest_context"] = None if kept is None else _largest_context(model, setting)
        found["largest_batch"] = None if kept is None else _largest_batch(model, setting)
    return found


def outline(model: Model) -> dict[str, Any]:
    """The model's sizes in a few words: one entry for each kind of layer that they tell apart."""
    return {
        "name": model.name,
        "causal": model.causal,
        "layers": len(model.layers),
        "embed_dim": model.embed_dim,
        "vocab": model.vocab,
        "tied": model.head and model.tied,
        "trained_context": model.trained_context,
        "kinds": _kinds(model),
        "encoder": None if model.source is None else outline(model.source),
    }


def _kinds(model: Model) -> list[dict[str, Any]]:
    counts = Counter(tuple(_kind(layer).items()) for layer in model.layers)
    return [{"layers": count, **dict(kind)} for kind, count in counts.items()]


def _kind(layer: Layer) -> dict[str, Any]:
    attention, ffn = layer.attention, layer.feed_forward
    latent = attention if isinstance(attention, LatentAttention) else None
    experts = ffn if isinstance(ffn, Experts) else None
    dense = ffn.expert if isinstance(ffn, Experts) else ffn
    return {
        "attention": attention.kind,
        "heads": attention.heads,
        "kv_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "value_dim": attention.value_dim,
        "window": attention.window,
        "window_ahead": attention.window_ahead,
        "head_windows": attention.head_windows if isinstance(attention, Attention) else None,
        "latent_dim": latent and latent.latent_dim,
        "rope_dim": latent and latent.rope_dim,
        "cross_attention": layer.cross is not None,
        "ffn_dim": dense.ffn_dim,
        "gated": dense.gated,
        "experts": experts and experts.count,
        "active_experts": experts and experts.active,
    }


def setting_document(setting: Setting) -> dict[str, Any]:
    """A setting as plain values."""
    device = setting.device
    return {
        "context": setting.context,
        "batch": setting.batch,
        "dtype": setting.dtype,
        "cache": setting.cache,
        "memory": setting.memory,
        "device": None if device is None else {**asdict(device), "ridge": device.ridge},
    }


def _estimate(model: Model, step: Pass, setting: Setting, cache_dtype: str | None) -> Estimate:
    return estimate(
        model, step, dtype=setting.dtype, cache_dtype=cache_dtype, device=setting.device
    )


def _decode_estimate(model: Model, setting: Setting) -> Estimate | None:
    if not model.causal:
        return None
    return _estimate(model, setting.decode, setting, setting.cache_dtype)


def _decode(model: Model, setting: Setting) -> dict[str, Any] | None:
    step = _decode_estimate(model, setting)
    if step is None:
        return None
    return {
        "operations": forward(model, setting.decode).as_dict(),
        "estimate": step.as_dict(),
    }


def _training(model: Model, setting: Setting) -> dict[str, Any] | None:
    if model.source is not None:
        return None
    options: dict[str, Any] = {"batch": setting.batch, "dtype": setting.dtype}
    kept = training_memory(model, setting.context, **options)
    less = training_memory(model, setting.context, checkpointing=True, **options)
    return {
        "forward": forward(model, setting.training).as_dict(),
        "backward": backward(model, setting.training).as_dict(),
        "memory": kept.as_dict(),
        "memory_checkpointed": less.as_dict(),
    }


def _memory(model: Model, setting: Setting) -> dict[str, Any]:
    found: dict[str, Any] = {
        "weights": weight_bytes(model, setting.dtype),
        "cache": None,
        "cache_token": None,
        "caches": None,
        "score_tables": asdict(score_tables(model, setting.prefill, setting.dtype)),
        "fit": None,
    }
    if setting.memory is not None:
        found["fit"] = {
            "context": _largest_context(model, setting),
            "batch": _largest_batch(model, setting),
            "training_batch": _largest_training_batch(model, setting),
        }
    if not model.causal:
        return found
    found["cache"] = cache_bytes(
        model,
        setting.context,
        batch=setting.batch,
        dtype=setting.dtype,
        kind=setting.cache,
    )
    found["caches"] = {kind: _kept(model, setting, kind) for kind in get_args(CacheKind)}
    found["cache_token"] = cache_bytes(model, 1, dtype=setting.dtype, source=0)
    return found


def _kept(model: Model, setting: Setting, kind: CacheKind) -> int | None:
    """Filled bytes of a kind of cache; None for latents in int8, which no cache holds."""
    try:
        return cache_bytes(
            model, setting.context, batch=setting.batch, dtype=setting.dtype, kind=kind
        )
    except ArgumentError:
        return None


def _largest_context(model: Model, setting: Setting) -> int | None:
    assert setting.memory is not None
    return largest_context(
        model, setting.memory, batch=setting.batch, dtype=setting.dtype, kind=setting.cache
    )


def _largest_batch(model: Model, setting: Setting) -> int | None:
    assert setting.memory is not None
    return largest_batch(
        model, setting.memory, setting.context, dtype=setting.dtype, kind=setting.cache
    )


def _largest_training_batch(model: Model, setting: Setting) -> int | None:
    assert setting.memory is not None
    if model.source is not None:
        return None
    return largest_training_batch(model, setting.memory, setting.context, dtype=setting.dtype)
