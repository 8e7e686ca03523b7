"""Seeing the attention calls of transformers models that compute them by other kernels.

The model's own attention function runs and its result is what the model gets; beside it the call is
shown as multihead would have described it.

Importing this module imports transformers, and raises MissingExtraError where it is absent or older
than 5.4.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..masks import Causal, Dense, KeyPadding, Mask, SlidingWindow
from ..ops.problem import Problem, describe
from .extras import import_extra
from .transformers import NAME

Show = Callable[[nn.Module, Problem], None]

# Their masks are rules or tensors that say who sees whom; others (flex_attention's) are not read.
_PADDING_ALONE = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
_READ = ("eager", "sdpa", *_PADDING_ALONE)


@contextmanager
def beside(model: nn.Module, show: Show) -> Iterator[None]:
    """Inside the block, show each call of the attention functions that models in `model` use.

    Calls that multihead itself computes are left to the observer slot. The functions are put back
    at the end, errors included.

    Raises:
        ModelError: an attention implementation whose calls cannot be read.
    """
    modeling = import_extra("transformers.modeling_utils")
    functions = modeling.ALL_ATTENTION_FUNCTIONS
    names: set[str] = set()
    for part in model.modules():
        if isinstance(part, modeling.PreTrainedModel):
            names |= _names(part.config)
    names.discard(NAME)
    for name in names:
        if name not in _READ:
            raise ModelError(
                f"{type(model).__name__} computes attention by {name!r}, whose masks are not read "
                "here. Set it to 'sdpa', 'eager' or flash attention, or to multihead's by "
                "multihead.integrations.transformers.use(model)."
            )
    own = functions._local_mapping
    before = dict(own)
    for name in names:
        original = before.get("eager") if name == "eager" else functions[name]
        own[name] = partial(_shown, show, name, original)
    try:
        yield
    finally:
        own.clear()
        own.update(before)


def _names(config: Any) -> set[str]:
    """What a model of this config, or a part of it, may call its attention function by."""
    names = {config._attn_implementation or "eager"}
    for part in (getattr(config, name, None) for name in config.sub_configs):
        if part is not None:
            names |= _names(part)
    return names


def _shown(
    show: Show,
    name: str,
    original: Callable[..., Any] | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *arguments: Any,
    **keywords: Any,
) -> Any:
    """The model's own call; then it is shown."""
    function = original or _eager_of(module)
    result = function(module, query, key, value, attention_mask, *arguments, **keywords)
    with torch.no_grad():
        show(module, _described(module, name, query, key, attention_mask, keywords))
    return result


def _eager_of(module: nn.Module) -> Callable[..., Any]:
    """The function that stands for "eager" beside the module's class."""
    for kind in type(module).__mro__:
        function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if function is not None:
            return function  # type: ignore[no-any-return]
    raise ModelError(
        f"{type(module).__name__} has no eager attention function that can be found. Set the model "
        "to attn_implementation='sdpa'."
    )


def _described(
    module: nn.Module, name: str, query: Tensor, key: Tensor, mask: Any, keywords: dict[str, Any]
) -> Problem:
    for packed in ("cu_seq_lens_q", "cu_seqlens_q"):
        if keywords.get(packed) is not None:
            raise ModelError(
                f"{type(module).__name__} packs its texts into one row ({packed}), which is not "
                "read here. Set the model to multihead's attention, or do not pack."
            )
    rule, bias = _rule(module, name, query, key, mask, keywords)
    query, key = query.detach(), key.detach()
    sinks = keywords.get("s_aux")
    return describe(
        query,
        key,
        key[..., :1],
        mask=rule,
        bias=bias,
        scale=keywords.get("scaling"),
        softcap=keywords.get("softcap"),
        sinks=None if sinks is None else sinks.detach().reshape(-1),
        dropout_p=0.0,
    )


def _rule(
    module: nn.Module, name: str, query: Tensor, key: Tensor, mask: Any, keywords: dict[str, Any]
) -> tuple[Mask | None, Tensor | None]:
    """The mask as a rule, and what is added to the scores."""
    bias = keywords.get("position_bias")
    bias = None if bias is None else bias.detach()
    length = query.shape[-2]
    if name in _PADDING_ALONE or mask is None:
        causal = keywords.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        window = keywords.get("sliding_window") if name in _PADDING_ALONE else None
        rule: Mask | None = None
        if causal and (length > 1 or name in _PADDING_ALONE):
            rule = SlidingWindow(window) if window else Causal()
        if mask is not None:
            padding = KeyPadding(mask.bool()[:, -key.shape[-2] :])
            rule = padding if rule is None else rule & padding
        return rule, bias
    mask = mask.detach()[..., : key.shape[-2]]
    visible = mask
    if mask.dtype != torch.bool:
        # Lowest numbers stand for hidden keys there; what is hidden is no key of the row here.
        visible = mask > torch.finfo(mask.dtype).min / 2
        added = mask.masked_fill(~visible, 0.0)
        if added.any():
            bias = added if bias is None else bias + added
    # A key that nobody sees is padding: said as such, its own query is known for padding too.
    seen = visible.flatten(1, 2).any(1).expand(query.shape[0], -1)
    return Dense(visible) & KeyPadding(seen), bias
