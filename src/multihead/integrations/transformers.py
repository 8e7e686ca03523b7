"""Hugging Face models on `multihead.attention`.

    from multihead.integrations.transformers import register, use

    register()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="multihead")
    previous = use(model)   # or so, on a model that exists already

What counts as right is the model's own "eager" implementation: the same logits, whatever the mask,
the cache or the padding. Rows of padding, whose values eager leaves meaningless, are zeros here.

Importing this module imports transformers, and raises MissingExtraError where it is absent or older
than 5.4.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BackendError, MaskError, ModelError
from ..masks import Causal, Dense, Mask, SlidingWindow
from ..ops.attention import AttentionResult, attention, attention_with_stats
from ..ops.key_values import KeyValues
from .deferred import Scaled
from .extras import import_extra
from .hf_masks import PreparedMask, mask_forward
from .hf_windows import head_window

NAME = "multihead"

Implementation = str | dict[str, Any] | None
"""What transformers calls an attention implementation: a name, or names per sub-model."""

_collector = import_extra("transformers.utils.output_capturing")._active_collector

_UNREAD = ("indices", "block_indices", "sinks")  # sparse key choices, per-query sinks


def register() -> None:
    """Make `attn_implementation="multihead"` known to transformers; again changes nothing."""
    transformers = import_extra("transformers")
    transformers.AttentionInterface.register(NAME, attention_forward)
    # Without a mask function of the same name transformers drops padding without a word.
    transformers.AttentionMaskInterface.register(NAME, mask_forward)


def use(model: nn.Module) -> Implementation:
    """Set a transformers model to multihead's attention; returns what it was set to before.

    Restore it with `model.set_attn_implementation(previous)`, or let `using` do both.

    Raises:
        ModelError: not a transformers model, or one that computes attention in its own way only.
    """
    register()
    transformers = import_extra("transformers")
    if not isinstance(model, transformers.PreTrainedModel):
        raise ModelError(
            f"{type(model).__name__} is not a transformers model, so it has no attention "
            "implementation to set."
        )
    previous = _implementation(model.config)
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        model.set_attn_implementation(previous)  # its parts, where they did change
        raise ModelError(
            f"{type(model).__name__} computes attention in its own code, without transformers' "
            "attention interface, and cannot be set to another implementation."
        )
    return previous


@contextmanager
def using(model: nn.Module) -> Iterator[None]:
    """`use(model)` for the length of a `with` block, undone on the way out, errors included."""
    previous = use(model)
    try:
        yield
    finally:
        model.set_attn_implementation(previous)  # type: ignore[operator]


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | PreparedMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function that transformers calls.

    `query` [B, H, Lq, D], `key` [B, Hkv, Lk, D], `value` [B, Hkv, Lk, Dv]. `attention_mask` comes
    from `mask_forward` and is then the whole mask, windows included; or it is the caller's own,
    [B|1, H|1, Lq, Lk], bool (True = may be attended) or float (added to the scores).
    `position_bias` is added too, `s_aux` [H] are sinks.

    Returns the output [B, Lq, H, Dv], and the weights [B, H, Lq, Lk] where they are asked for, by
    `output_attentions`, by the module's config or by a model that collects them; else None.

    Raises:
        BackendError: an argument that this implementation does not read.
        MaskError: an `attention_mask` of another kind.
    """
    _refuse(module, others)
    query, key, value = _same_batch(query, key, value)
    mask, bias = _mask_and_bias(attention_mask, position_bias)
    if attention_mask is None and _is_causal(module, is_causal, query, key):
        mask = SlidingWindow(sliding_window) if sliding_window else Causal()
    window = head_window(module)
    if window is not None:
        mask = window if mask is None else mask & window
    options: dict[str, Any] = {
        "mask": mask,
        "bias": bias,
        "scale": scaling,
        "softcap": softcap,
        "sinks": None if s_aux is None else s_aux.reshape(-1),
        "dropout_p": dropout,
    }
    if not (output_attentions or _collects_weights(module)):
        out = attention(query, *_held(key, value), **options)
        return out.transpose(1, 2).contiguous(), None
    result = attention_with_stats(query, *_held(key, value), stats=("lse",), **options)
    return result.out.transpose(1, 2).contiguous(), _weights(result, options["sinks"], query.dtype)


def _refuse(module: nn.Module, others: dict[str, Any]) -> None:
    for name in _UNREAD:
        if others.get(name) is not None:
            raise BackendError(
                f"{type(module).__name__} passes {name!r}, which multihead does not read; leaving "
                "it out would change the result. Use attn_implementation='eager' for this model."
            )


def _mask_and_bias(
    attention_mask: Tensor | PreparedMask | None, position_bias: Tensor | None
) -> tuple[Mask | None, Tensor | None]:
    if attention_mask is None:
        return None, position_bias
    if isinstance(attention_mask, PreparedMask):
        return attention_mask.mask, position_bias
    if isinstance(attention_mask, Tensor) and attention_mask.dtype == torch.bool:
        return Dense(attention_mask), position_bias
    if isinstance(attention_mask, Tensor) and attention_mask.is_floating_point():
        both = attention_mask if position_bias is None else position_bias + attention_mask
        return None, both
    kind = attention_mask.dtype if isinstance(attention_mask, Tensor) else type(attention_mask)
    raise MaskError(
        f"attention_mask must be bool (True = may be attended) or float (added to the scores) "
        f"where it has four dimensions; got {kind}."
    )


def _is_causal(module: nn.Module, stated: bool | None, query: Tensor, key: Tensor) -> bool:
    """Whether a call without any mask is causal: where it says so and each query has its key.

    Models that prepare masks always bring one, so this is a layer called by itself, or an encoder
    or a cross-attention, which need not say that they are not causal.
    """
    causal = getattr(module, "is_causal", False) if stated is None else stated
    return bool(causal) and query.shape[-2] == key.shape[-2]


def _weights(result: AttentionResult, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The whole matrix of weights, [B, H, Lq, Lk] in `dtype`.

    Each is e^(s - lse), off by the rounding of lse, which all outcomes of a row share: dividing by
    their sum, a sink's share included, takes it out again, so that rows sum to 1 as softmax's do.
    """
    weights: Tensor = result.weights(slice(None), slice(None))
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks[:, None].to(total.dtype) - result.lse).exp()[..., None]
    return (weights / total.masked_fill(total == 0, 1)).to(dtype)


def _collects_weights(module: nn.Module) -> bool:
    """Whether the weights are asked for without this call being told.

    Some layers (GPT-2's) keep `output_attentions` to themselves; the model then still has a
    collector in place, which gathers what the layers return.
    """
    if getattr(getattr(module, "config", None), "output_attentions", False):
        return True
    compiling = torch.compiler.is_compiling()
    collected = _collector.global_var if compiling else _collector.get()
    return any(name.endswith("attentions") for name in collected or ())


def _same_batch(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Learned queries may come once for the whole batch."""
    if query.shape[0] == 1 and key.shape[0] > 1:
        query = query.expand(key.shape[0], -1, -1, -1)
    return query, key, value


def _held(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | tuple[KeyValues]:
    """Key and value as attention takes them: int8 that nothing has written out yet as it lies."""
    if not isinstance(key, Scaled) or not isinstance(value, Scaled):
        return key, value
    if key.is_written or value.is_written:
        return key.written(), value.written()
    return (
        KeyValues(
            key=key.numbers,
            value=value.numbers,
            key_scale=key.scale,
            value_scale=value.scale,
        ),
    )


def _implementation(config: Any) -> Implementation:
    """What brings `config` and its parts back, given to `set_attn_implementation`."""
    parts = {
        name: _implementation(part)
        for name in config.sub_configs
        if (part := getattr(config, name, None)) is not None
    }
    own: str | None = config._attn_implementation
    return own if all(part == own for part in parts.values()) else {"": own, **parts}
