"""Which rows of which projection make the query and the key of a head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...errors import ModelError
from ...nn import LatentAttention, MultiHeadAttention
from ...ops.tracing import PLAIN

_NORMS = (
    "q_norm",
    "k_norm",
    "qk_norm",
    "q_layernorm",
    "k_layernorm",
    "query_layernorm",
    "key_layernorm",
)


@dataclass(frozen=True, eq=False)
class Part:
    """`length` outputs of a linear layer from `begin` on; scaled by gamma to the `power`."""

    projection: nn.Module
    begin: int
    length: int
    power: float

    def parameters(self) -> Iterator[tuple[nn.Parameter, int]]:
        """The weight and the bias, with the axis of the outputs."""
        weight, bias = (self.projection._parameters.get(name) for name in ("weight", "bias"))
        assert weight is not None
        yield weight, 0 if isinstance(self.projection, nn.Linear) else 1
        if bias is not None:
            yield bias, 0


@dataclass(frozen=True, eq=False)
class Layout:
    """The parts of every head of one attention layer."""

    parts: Callable[[int], tuple[Part, ...]]


def layout_of(layer: nn.Module, name: str, heads: int) -> Layout:
    """Where the queries and keys of the `heads` heads of a layer called `name` come from.

    Raises ModelError for a layer whose heads cannot be scaled through its weights.
    """
    label = f"{name} ({type(layer).__name__})" if name else type(layer).__name__
    _refuse_norms(layer, label)
    _refuse_clamps(layer, label)
    if isinstance(layer, MultiHeadAttention):
        layout, found = _ours(layer)
    elif isinstance(layer, LatentAttention):
        query = layer.q_proj if layer.query_latent_dim is None else layer.q_up_proj
        sizes = layer.nope_dim, layer.rope_dim, layer.value_dim
        layout, found = _latent(query, layer.kv_up_proj, *sizes), [query, layer.kv_up_proj]
    else:
        layout, found = _theirs(layer, label, heads)
    for projection in found:
        _check_plain(projection, label)
    return layout


def _ours(layer: MultiHeadAttention) -> tuple[Layout, list[nn.Module]]:
    sizes = layer.num_heads, layer.num_kv_heads, layer.head_dim
    if layer.context_dim is None:
        both = layer.qkv_proj
        return _split(both, both, sizes[0] * sizes[2], *sizes), [both]
    return _split(layer.q_proj, layer.kv_proj, 0, *sizes), [layer.q_proj, layer.kv_proj]


def _theirs(layer: Any, label: str, heads: int) -> tuple[Layout, list[nn.Module]]:
    """A transformers layer, known by the names of its projections."""
    if hasattr(layer, "kv_b_proj") and hasattr(layer, "qk_nope_head_dim"):
        query = layer.q_b_proj if hasattr(layer, "q_b_proj") else layer.q_proj
        sizes = layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.v_head_dim
        return _latent(query, layer.kv_b_proj, *sizes), [query, layer.kv_b_proj]
    for query_name, key_name in (("q_proj", "k_proj"), ("query", "key"), ("q", "k")):
        query, key = getattr(layer, query_name, None), getattr(layer, key_name, None)
        if isinstance(query, nn.Module) and isinstance(key, nn.Module):
            width, rest = divmod(_outputs(query, label), heads)
            kv_heads, key_rest = divmod(_outputs(key, label), max(1, width))
            stated = getattr(layer, "head_dim", width)
            if rest or key_rest or stated != width or heads % max(1, kv_heads):
                break
            return _split(query, key, 0, heads, kv_heads, width), [query, key]
    if hasattr(layer, "q_attn") and hasattr(layer, "c_attn"):  # GPT-2's cross-attention
        width = layer.head_dim
        found = [layer.q_attn, layer.c_attn]
        return _split(layer.q_attn, layer.c_attn, 0, heads, heads, width), found
    for both_name in ("qkv_proj", "c_attn"):  # Phi-3's and GPT-2's: queries, keys, values
        both = None if _is_interleaved(layer) else getattr(layer, both_name, None)
        if isinstance(both, nn.Module) and isinstance(getattr(layer, "head_dim", None), int):
            width = layer.head_dim
            kv_heads, rest = divmod(_outputs(both, label) - heads * width, 2 * width)
            if not rest and kv_heads and heads % kv_heads == 0:
                return _split(both, both, heads * width, heads, kv_heads, width), [both]
    raise ModelError(
        f"{label} cannot be clipped: which of its weights make the queries and keys of its {heads} "
        "heads is not known here. Known are projections like those of Llama, Phi-3, GPT-2, BERT, "
        "BART, T5 and DeepSeek, MultiHeadAttention and LatentAttention."
    )


def _is_interleaved(layer: Any) -> bool:
    """Whether queries, keys and values alternate: by shards (CodeGen), or by heads (GPTBigCode)."""
    return hasattr(layer, "mp_num") or getattr(layer, "multi_query", None) is False


def _split(
    query: nn.Module, key: nn.Module, key_begin: int, heads: int, kv_heads: int, width: int
) -> Layout:
    """Heads side by side in `query`, and from `key_begin` on in `key`."""

    def parts(head: int) -> tuple[Part, ...]:
        if kv_heads < heads:  # others read the same key
            return (Part(query, head * width, width, 1.0),)
        return (
            Part(query, head * width, width, 0.5),
            Part(key, key_begin + head * width, width, 0.5),
        )

    return Layout(parts)


def _latent(query: nn.Module, up: nn.Module, nope: int, rope: int, value: int) -> Layout:
    """Latent attention: the rotated key, which all heads share, is not theirs to scale."""

    def parts(head: int) -> tuple[Part, ...]:
        begin = head * (nope + rope)
        return (
            Part(query, begin, nope, 0.5),
            Part(query, begin + nope, rope, 1.0),
            Part(up, head * (nope + value), nope, 0.5),
        )

    return Layout(parts)


def _refuse_norms(layer: nn.Module, label: str) -> None:
    norms = [name for name in _NORMS if getattr(layer, name, None) is not None]
    # Latent attention norms its latents, before the heads are made from them.
    if not norms or isinstance(layer, LatentAttention):
        return
    raise ModelError(
        f"{label} cannot be clipped: its {norms[0]} normalizes queries and keys, which undoes any "
        "scale of the weights, and has one gain for all heads. It bounds the logits itself; if "
        "they are too large, regularize or lower the gain of the norm."
    )


def _refuse_clamps(layer: Any, label: str) -> None:
    bound = getattr(getattr(layer, "config", layer), "clip_qkv", None)
    if bound is not None:
        raise ModelError(
            f"{label} cannot be clipped: its clip_qkv of {bound:g} clamps queries and keys, so "
            "that logits do not follow the scale of the weights. It bounds the logits itself."
        )


def _outputs(projection: nn.Module, label: str) -> int:
    _check_plain(projection, label)
    weight = projection._parameters["weight"]
    assert weight is not None
    return weight.shape[0 if isinstance(projection, nn.Linear) else 1]


def _check_plain(projection: nn.Module, label: str) -> None:
    kind = type(projection).__name__
    linear = isinstance(projection, nn.Linear) or kind in ("Conv1D", "PackedConv1D")
    weight = projection._parameters.get("weight")
    if not linear or weight is None or any(projection.children()):
        raise ModelError(
            f"{label} cannot be clipped: its {kind} is no plain linear layer with a weight of its "
            "own (an adapter or a parametrization, perhaps). Merge it into the layer first."
        )
    if type(weight) not in PLAIN or not weight.is_floating_point():
        raise ModelError(
            f"{label} cannot be clipped: its weight is a {type(weight).__name__} in "
            f"{str(weight.dtype).removeprefix('torch.')}, sharded or quantized. Clip the whole "
            "weights, before they are sharded or quantized."
        )
