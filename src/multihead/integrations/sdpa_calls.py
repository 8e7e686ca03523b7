"""One call of `scaled_dot_product_attention`, as a call of multihead's attention.

Shape suffixes: b batch, h head, q query row, k key column, d width.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from ..masks import Causal, Dense, KeyPadding, Mask, QueryStart
from ..ops import dispatch
from ..ops.attention import attention
from ..ops.tracing import PLAIN
from .deferred import Deferred, Repeated
from .sdpa_masks import Block, Lowered, lower
from .sdpa_watched import run_watched, unwatched

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# A model has a mask for each kind of its layers. One that makes them anew in each layer must not
# have all of them kept.
_MOST_MASKS = 4


class Masks:
    """What the masks of one forward pass were lowered to.

    Layers share masks, so each is lowered once, and again where it was written to since.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[Tensor, Any, Lowered]] = {}

    def lower(self, mask_bhqk: Tensor) -> Lowered:
        """What `mask_bhqk` says; an eager call's on the CPU may be read."""
        if torch.compiler.is_compiling():
            is_bool = mask_bhqk.dtype == torch.bool
            return Lowered(mask=Dense(mask_bhqk)) if is_bool else Lowered(bias=mask_bhqk)
        if mask_bhqk.requires_grad:  # one that is detached may lie in the same memory
            return Lowered(bias=mask_bhqk)
        # Views of one memory are made anew for each layer. They are kept, so no other tensor can
        # come to lie where they do.
        place = (mask_bhqk.data_ptr(), mask_bhqk.shape, mask_bhqk.stride(), mask_bhqk.dtype)
        known = self._known.get(place)
        if known is not None and _is_as_it_was(mask_bhqk, known[1]):
            return known[2]
        lowered = lower(mask_bhqk)
        if len(self._known) >= _MOST_MASKS:
            del self._known[next(iter(self._known))]
        self._known[place] = mask_bhqk, _state(mask_bhqk), lowered
        return lowered


def attend(
    masks: Masks,
    key_visible: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """`scaled_dot_product_attention`, its arguments and meanings; None: it is to be left to torch.

    `key_visible`, bool [B, Lk], hides keys on top of `attn_mask`. Left to torch are calls with
    dropout, on other devices, on tensors of other kinds, under transforms, and those that torch
    refuses, so that it says so itself.
    """
    if dropout_p or not _readable(query, key, value, attn_mask, scale):
        return None
    key, value, grouped = _without_repeats(key, value, grouped=enable_gqa)
    result_lead = _leading(query, key, value, grouped=grouped)
    if result_lead is None:
        return None
    lead = result_lead or (1,)
    mask_bhqk = None
    if attn_mask is not None:
        mask_bhqk = _four_dims_of_mask(attn_mask, lead, query.shape[-2], key.shape[-2])
        if mask_bhqk is None or is_causal:
            return None
    query_bhqd = _four_dims(query, lead)
    kv_lead = (*lead[:-1], _kv_heads(key, value, lead))
    key_bhkd, value_bhkd = _four_dims(key, kv_lead), _four_dims(value, kv_lead)
    lowered = _CAUSAL if is_causal else Lowered()
    if mask_bhqk is not None:
        lowered = masks.lower(mask_bhqk)
    out_bhqd = _shown(query_bhqd, key_bhkd, value_bhkd, lowered, key_visible, scale)
    if query_bhqd.stride(1) < query_bhqd.stride(2):
        # Tokens outside of heads, as torch lays out the result: callers `view` it as [B, L, H * D].
        out_bhqd = out_bhqd.transpose(1, 2).contiguous().transpose(1, 2)
    return out_bhqd if len(lead) == 2 else out_bhqd.reshape(*result_lead, *out_bhqd.shape[2:])


def show(
    masks: Masks,
    key_visible: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *others: Any,
    **named: Any,
) -> Tensor:
    """Let whoever watches see a call that torch answers: what it gives without dropout.

    The arguments are `attend`'s. Nothing is recorded for gradients.
    """
    with torch.no_grad():
        out = attend(masks, key_visible, query, key, value, attn_mask, 0.0, *others, **named)
        if out is None:
            out = query.new_zeros((*query.shape[:-1], value.shape[-1]))
        return out


def is_watched() -> bool:
    """Whether someone sees the calls that are made now; not those that autograd repeats."""
    return dispatch.observer.get() is not None and torch._C._current_graph_task_id() == -1


_CAUSAL = Lowered(mask=Causal() & QueryStart(0))


def _shown(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lowered: Lowered,
    key_visible: Tensor | None,
    scale: float | None,
) -> Tensor:
    """`_run`, seen by whoever watches."""
    watching = None if torch.compiler.is_compiling() else dispatch.observer.get()
    if watching is None:
        return _run(query, key, value, lowered, key_visible, scale)
    seen = run_watched(watching, query, key, value, lowered, key_visible, scale)
    if seen is not None:
        return seen
    with unwatched():
        return _run(query, key, value, lowered, key_visible, scale)


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lowered: Lowered,
    key_visible: Tensor | None,
    scale: float | None,
) -> Tensor:
    if not lowered.blocks:
        mask = _and_keys(lowered.mask, key_visible)
        whole: Tensor = attention(query, key, value, mask=mask, bias=lowered.bias, scale=scale)
        return whole

    def run(block: Block) -> Tensor:
        columns = slice(block.begin, block.end)
        keys = None if key_visible is None else key_visible[:, columns]
        part: Tensor = attention(
            query[:, :, block.rows],
            key[:, :, columns],
            value[:, :, columns],
            mask=_and_keys(block.mask, keys),
            scale=scale,
        )
        return part

    outs = [run(block) for block in lowered.blocks]
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def _and_keys(mask: Mask | None, key_visible: Tensor | None) -> Mask | None:
    rules = [] if mask is None else [mask]
    if key_visible is not None:
        rules.append(KeyPadding(key_visible))
    return functools.reduce(Mask.__and__, rules) if rules else None


def _readable(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> bool:
    """Whether these are tensors that attention computes with, in a call that it can be part of."""
    tensors = (query, key, value) if mask is None else (query, key, value, mask)
    compiling = torch.compiler.is_compiling()
    for tensor in tensors:
        if not (compiling or type(tensor) in PLAIN or isinstance(tensor, Deferred)):
            return False
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_nested:
            return False
        if tensor.ndim < 2 or 0 in tensor.shape:
            return False
    if not _dtypes_fit(query, key, value, mask):
        return False
    if type(scale) is float and not math.isfinite(scale):
        return False
    return torch._C._get_tracing_state() is None and not dispatch.transformed()


def _dtypes_fit(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    dtypes = {query.dtype, key.dtype, value.dtype}
    adds = mask is not None and mask.dtype != torch.bool
    if torch.is_autocast_enabled("cpu"):
        return dtypes <= set(_DTYPES[:3]) and (mask is None or not adds or mask.dtype in _DTYPES)
    if len(dtypes) > 1 or query.dtype not in _DTYPES:
        return False
    return mask is None or not adds or mask.dtype in (torch.float32, query.dtype)


def _without_repeats(key: Tensor, value: Tensor, *, grouped: bool) -> tuple[Tensor, Tensor, bool]:
    """Keys and values without repeated heads, and whether query heads are to share theirs."""
    if type(key) is Repeated and type(value) is Repeated:
        waiting = not (key.is_written or value.is_written)
        if waiting and key.source.shape[1] == value.source.shape[1]:
            return key.source, value.source, True
    key, value = (x.written() if isinstance(x, Deferred) else x for x in (key, value))
    many = key.ndim > 2 and value.ndim > 2 and key.shape[-3] == value.shape[-3] > 1
    if many and key.stride(-3) == value.stride(-3) == 0:
        return key.narrow(-3, 0, 1), value.narrow(-3, 0, 1), grouped
    return key, value, grouped


def _leading(query: Tensor, key: Tensor, value: Tensor, *, grouped: bool) -> tuple[int, ...] | None:
    """The axes before length and width that the result has; None where the shapes don't fit."""
    same_length = key.shape[-2] == value.shape[-2]
    if not same_length or query.shape[-1] != key.shape[-1]:
        return None
    leads = [tuple(tensor.shape[:-2]) for tensor in (query, key, value)]
    if grouped:
        if not all(leads) or leads[1][-1] != leads[2][-1] or leads[0][-1] % leads[1][-1]:
            return None
        leads[1:] = [(*lead[:-1], 1) for lead in leads[1:]]
    return _broadcast(*leads)


def _broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The common shape; None if there is none."""
    length = max(map(len, shapes))
    padded = [(1,) * (length - len(shape)) + shape for shape in shapes]
    common = []
    for sizes in zip(*padded, strict=True):
        size = next((it for it in sizes if it != 1), 1)
        if any(it not in (1, size) for it in sizes):
            return None
        common.append(size)
    return tuple(common)


def _kv_heads(key: Tensor, value: Tensor, lead: tuple[int, ...]) -> int:
    """How many heads keys and values have between them: their own number, if it is one."""
    key_heads = key.shape[-3] if key.ndim > 2 else 1
    value_heads = value.shape[-3] if value.ndim > 2 else 1
    return key_heads if key_heads == value_heads else lead[-1]


def _four_dims(tensor: Tensor, lead: tuple[int, ...]) -> Tensor:
    """`tensor` with the leading axes `lead`, all but the last of them joined to one."""
    if tensor.ndim == 4 and tuple(tensor.shape[:2]) == lead:
        return tensor
    whole = tensor.expand(*lead, *tensor.shape[-2:])
    return whole.reshape(math.prod(lead[:-1]), lead[-1], *tensor.shape[-2:])


def _four_dims_of_mask(
    mask: Tensor, lead: tuple[int, ...], query_length: int, key_length: int
) -> Tensor | None:
    """`mask` as [B|1, H|1, Lq|1, Lk|1]; None if it does not broadcast to the scores."""
    if mask.ndim - 2 > len(lead):
        return None
    own = (1,) * (len(lead) - mask.ndim + 2) + tuple(mask.shape)
    scores = (*lead, query_length, key_length)
    if any(size not in (1, want) for size, want in zip(own, scores, strict=True)):
        return None
    if len(lead) > 2 and any(size != 1 for size in own[:-3]):
        whole = mask.expand(*lead[:-1], *own[-3:])
        return whole.reshape(math.prod(lead[:-1]), *own[-3:])
    return mask.view(1, *own[-3:]) if len(lead) != 2 else mask.view(own)


def _state(tensor: Tensor) -> Any:
    """What tells whether a tensor was written to: its version; its values where it has none."""
    return tensor.clone() if tensor.is_inference() else tensor._version


def _is_as_it_was(tensor: Tensor, state: Any) -> bool:
    if isinstance(state, Tensor):
        return torch.equal(tensor, state)
    return bool(tensor._version == state)
