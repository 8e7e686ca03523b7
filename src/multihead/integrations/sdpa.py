"""Any torch model on multihead's attention, by way of what it calls.

    with mh.replace_sdpa(model):
        model(x)

Inside the model's modules, and nowhere else, calls of `scaled_dot_product_attention` are answered
by multihead.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)

from ..errors import ModelError
from .deferred import Repeats
from .sdpa_calls import Masks, attend, is_watched, show

_SDPA = F.scaled_dot_product_attention
_MULTI_HEAD = F.multi_head_attention_forward


def replace_sdpa(model: nn.Module) -> Replacement:
    """Compute by multihead what `model` gives to torch's `scaled_dot_product_attention`.

    Works for any module that calls it, for `nn.MultiheadAttention` without weights and with it for
    `nn.TransformerEncoder` and its like, and for a transformers model set to "sdpa", also in its
    `generate_batch`. It holds from the call on, for the model's own modules alone, until `undo`
    or the end of a `with` block:

        with mh.replace_sdpa(model):
            model(x)

    Results are torch's up to rounding, its meanings are kept: `is_causal` is the triangle from the
    top left, a float mask is added, leading axes may be any and broadcast, heads are shared only
    with `enable_gqa`. A mask tensor that says little (a triangle, a window, padding, packed
    requests) is read once a forward pass and never again as a table; keys and values that the
    model repeats for its query heads are read once.

    Left to torch, with its result unchanged, are calls with `dropout_p` above 0, calls on other
    devices than the CPU, on subclasses of tensors and under torch.func transforms, calls of
    `nn.MultiheadAttention` that ask for the weights, and calls from a function (not a module) that
    activation checkpointing will run again. `nn.TransformerEncoder`'s path for inference, which
    returns zeros at padded tokens, is not taken: real tokens agree, padded ones are computed.

    Raises ModelError if `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"replace_sdpa takes a torch.nn.Module; got a {type(model).__name__}.")
    return Replacement(model)


class Replacement:
    """What `replace_sdpa` did to a model; a context manager that undoes it at its end."""

    def __init__(self, model: nn.Module) -> None:
        # A compiled model keeps the original, whose modules run or are traced.
        self._hooks = hooks = _Hooks()
        self._handles = []
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # takes no hooks, and shows none of its calls
            self._handles += [
                # Before the hooks of others, which may call the model's functions too.
                module.register_forward_pre_hook(hooks.enter, prepend=True),
                module.register_forward_hook(hooks.leave, always_call=True),
            ]

    def undo(self) -> None:
        """Give the model its torch attention back; again changes nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooks.drop_mode()

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


class _Hooks:
    """Has a `_Mode` in place while modules run, in each thread that runs them.

    Each module enters and leaves it: autograd takes modes away while it computes gradients, and
    activation checkpointing then calls modules from the middle of the model.
    """

    def __init__(self) -> None:
        self._in_a_graph = _GraphMode()  # the compiler takes no mode that is made while it records

    def enter(self, module: nn.Module, arguments: Any) -> None:
        if torch.compiler.is_compiling():
            _push_mode(self._in_a_graph)
            return
        mode = self._mode()
        if mode is not None and mode.running[0][0] is module and not _runs(mode.frame):
            self.drop_mode()
            mode = None
        if mode is None:
            mode = _Mode(self, sys._getframe(1))
            _push_mode(mode)
        mode.running.append((module, _saved_tensors_hooks()))

    def leave(self, module: nn.Module, arguments: Any, result: Any) -> None:
        if torch.compiler.is_compiling():
            _pop_mode()
            return
        mode = self._mode()
        if mode is None:
            return
        for place in range(len(mode.running) - 1, -1, -1):
            if mode.running[place][0] is module:
                del mode.running[place:]
                break
        if not mode.running:
            _pop_mode()

    def drop_mode(self) -> None:
        """Take away what an interrupted call left: no hooks run after a KeyboardInterrupt."""
        others = []
        while self._mode() is not None:
            mode = _pop_mode()
            if not (isinstance(mode, _Mode) and mode.hooks is self):
                others.append(mode)
        for mode in reversed(others):
            _push_mode(mode)

    def _mode(self) -> _Mode | None:
        for mode in reversed(_get_current_function_mode_stack()):
            if isinstance(mode, _Mode) and mode.hooks is self:
                return mode
        return None


class _Mode(TorchFunctionMode):
    """Answers for torch from the outermost module's call, whose frame is `frame`, to its return."""

    def __init__(self, hooks: _Hooks, frame: types.FrameType) -> None:
        super().__init__()
        self.hooks = hooks
        self.frame = frame
        self.running: list[tuple[nn.Module, Any]] = []
        self._masks = Masks()
        self._repeats = Repeats()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return _answer_in_a_graph(func, args, kwargs)
        result = None
        if func is _SDPA:
            return self._attend(None, *args, **kwargs)
        if func is _MULTI_HEAD:
            return self._multi_head(*args, **kwargs)
        self._repeats.before(func)
        if func is Tensor.reshape:
            result = self._repeats.of_reshape(*args, **kwargs)
        elif func is Tensor.repeat_interleave or func is torch.repeat_interleave:
            result = self._repeats.of_interleave(*args, **kwargs)
        return func(*args, **kwargs) if result is None else result

    def _attend(self, key_visible: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        result = None
        if self.running[-1][1] == _saved_tensors_hooks():
            result = attend(self._masks, key_visible, *args, **kwargs)
        if result is not None:
            return result
        if is_watched():
            show(self._masks, key_visible, *args, **kwargs)
        if key_visible is not None:
            args = _with_padding(key_visible, *args)
        return _SDPA(*args, **kwargs)

    def _multi_head(self, *args: Any, **kwargs: Any) -> Any:
        """`F.multi_head_attention_forward`, which torch has brought into one form of arguments."""
        hinted_alone = kwargs["is_causal"] and kwargs["attn_mask"] is None
        if kwargs["need_weights"] or hinted_alone:  # which torch refuses
            results = _MULTI_HEAD(*args, **kwargs)
            if is_watched():
                self._show_multi_head(*args, **kwargs)
            return results
        key_visible = _visible_keys(*args, **kwargs)
        if key_visible is not None:
            # Together with padding torch does not take the hint, but the mask itself.
            kwargs |= {"key_padding_mask": None, "is_causal": False}
        attend = functools.partial(self._attend, key_visible)
        return _answered_by(attend)(*args, **kwargs)

    def _show_multi_head(self, *args: Any, **kwargs: Any) -> None:
        """Let whoever watches see a call that torch has answered, together with the weights."""
        key_visible = _visible_keys(*args, **kwargs)
        kwargs |= {"need_weights": False, "is_causal": False}
        if key_visible is not None:
            kwargs["key_padding_mask"] = None
        with torch.no_grad():
            _answered_by(functools.partial(show, self._masks, key_visible))(*args, **kwargs)


class _GraphMode(TorchFunctionMode):
    """Answers for torch while the compiler records a module."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _answer_in_a_graph(func, args, kwargs or {})


def _answer_in_a_graph(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is _SDPA:
        return _attend_in_a_graph(*args, **kwargs)
    if func is _MULTI_HEAD:
        return _multi_head_in_a_graph(*args, **kwargs)
    if func is Tensor.unflatten:  # which the compiler knows as a method only
        return args[0].unflatten(*args[1:], **kwargs)
    return func(*args, **kwargs)


def _attend_in_a_graph(*args: Any, **kwargs: Any) -> Tensor:
    result = attend(Masks(), None, *args, **kwargs)
    return _SDPA(*args, **kwargs) if result is None else result


def _answered_by(attend: Any) -> Any:
    """torch's `multi_head_attention_forward` with `attend` for its attention.

    torch takes a mode away for all that a function calls, so this one must be told; and it must not
    ask for modes, or it would be given to them again and again.
    """
    names = {name: value for name, value in vars(F).items() if name != "__name__"}
    names |= {
        "scaled_dot_product_attention": attend,
        "has_torch_function": lambda tensors: False,
        "_check_key_padding_mask": _check_padding,  # torch's own has closures no compiler records
    }
    copy = types.FunctionType(_MULTI_HEAD.__code__, names, argdefs=_MULTI_HEAD.__defaults__)
    return copy


def _check_padding(padding: Tensor, key_length: int, batch: int) -> None:
    if padding.shape != (batch, key_length):
        raise AssertionError(
            f"Expected key_padding_mask to be {(batch, key_length)}, got {tuple(padding.shape)}"
        )


_multi_head_in_a_graph = _answered_by(_attend_in_a_graph)


def _visible_keys(
    query: Tensor, key: Tensor, *args: Any, key_padding_mask: Tensor | None, **others: Any
) -> Tensor | None:
    """What a padding mask of `F.multi_head_attention_forward` shows, [B, Lk], where that is all.

    torch itself would write it out for each head, and with another mask for each query too.
    """
    bias_k, add_zero_attention = args[5], args[7]
    adds_keys = bias_k is not None or add_zero_attention or others.get("static_k") is not None
    if key_padding_mask is None or adds_keys:
        return None
    visible = key_padding_mask if query.ndim == 3 else key_padding_mask[None]
    if visible.shape != (key.shape[1] if key.ndim == 3 else 1, key.shape[0]):
        return None
    if visible.dtype == torch.bool:
        return ~visible
    shown = visible == 0
    if torch.compiler.is_compiling() or not (shown | (visible == -torch.inf)).all():
        return None
    return shown


def _with_padding(
    key_visible: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *others: Any,
) -> tuple[Any, ...]:
    """The arguments of torch's attention with `key_visible` [B, Lk] in the mask."""
    hidden = ~key_visible[:, None, None]
    padding = torch.zeros_like(hidden, dtype=query.dtype).masked_fill(hidden, -torch.inf)
    return query, key, value, padding if attn_mask is None else attn_mask + padding, *others


def _runs(frame: types.FrameType) -> bool:
    """Whether the caller runs inside of `frame`."""
    inner: types.FrameType | None = sys._getframe(1)
    while inner is not None and inner is not frame:
        inner = inner.f_back
    return inner is frame


def _saved_tensors_hooks() -> Any:
    """The innermost hooks on saved tensors: where a checkpoint is under way, its own."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)
