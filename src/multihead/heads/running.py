"""Which module of a model runs, and how a model comes to compute by multihead for a while."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from ..nn import LatentAttention, MultiHeadAttention
from ..ops import dispatch

# Arguments by which attention modules are given a second sequence to read.
_OTHER_SEQUENCE = ("encoder_hidden_states", "key_value_states", "context")

_OURS = (MultiHeadAttention, LatentAttention)


@dataclass(frozen=True, eq=False)
class _Run:
    """A module that runs, and whether it was given a second sequence; `frame` is that of its call,
    None for one whose call is not looked for.
    """

    name: str
    module: nn.Module
    reads_other: bool
    frame: types.FrameType | None


class Running:
    """Which modules of a model are running, innermost last."""

    def __init__(self) -> None:
        self._stack: list[_Run] = []
        self.runs = 0

    @property
    def innermost(self) -> str | None:
        """The name of the module that runs now, None outside of the model."""
        self._forget_interrupted(sys._getframe(1))
        return self._stack[-1].name if self._stack else None

    @property
    def reads_itself(self) -> bool:
        """Whether the module that runs now was given no second sequence to read."""
        return not (self._stack and self._stack[-1].reads_other)

    def enter(
        self,
        name: str,
        module: nn.Module,
        reads_other: bool,
        frame: types.FrameType | None = None,
    ) -> None:
        """`module` runs, in the call of `frame` or, without one, until it leaves."""
        self._forget_interrupted(sys._getframe(1))
        if not self._stack:
            self.runs += 1
        self._stack.append(_Run(name, module, reads_other, frame))

    def leave(self, module: nn.Module) -> None:
        """Forget `module` and whatever it left running."""
        for place in range(len(self._stack) - 1, -1, -1):
            if self._stack[place].module is module:
                del self._stack[place:]
                return

    def clear(self) -> None:
        """Forget all that runs."""
        self._stack.clear()

    def _forget_interrupted(self, frame: types.FrameType | None) -> None:
        """Forget modules whose call is over: no hooks run after a KeyboardInterrupt."""
        while self._stack and self._stack[-1].frame is not None:
            outer = frame
            while outer is not None and outer is not self._stack[-1].frame:
                outer = outer.f_back
            if outer is not None:
                return
            self._stack.pop()


@contextmanager
def running_modules(model: nn.Module) -> Iterator[Running]:
    """Know, inside the block, which module of `model` runs."""
    running = Running()
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # takes no hooks

        def enter(
            module: nn.Module,
            arguments: Any,
            keywords: Mapping[str, Any],
            name: str = name,
            places: tuple[int, ...] = _places_of_another(type(module).forward),
        ) -> None:
            reads_other = _reads_other(module, arguments, keywords, places)
            running.enter(name, module, reads_other, sys._getframe(1))

        def leave(module: nn.Module, arguments: Any, result: Any) -> None:
            running.leave(module)

        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield running
    finally:
        for handle in handles:
            handle.remove()
        running.clear()


@contextmanager
def observing(observer: dispatch.Observer) -> Iterator[None]:
    """Show every call of attention inside the block to `observer`."""
    token = dispatch.observer.set(observer)
    try:
        yield
    finally:
        dispatch.observer.reset(token)


def set_to_multihead(model: nn.Module, stack: ExitStack) -> None:
    """Let `model` compute its attention by multihead until `stack` closes.

    transformers models are set to it, layers of ours are as they are, and the calls that all other
    modules make of torch's attention are answered as by `replace_sdpa`.

    Raises ModelError for what is no module, and for one that has nothing that could attend.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"Only a torch.nn.Module can be watched; got a {type(model).__name__}.")
    inside: set[nn.Module] = set()
    for part in transformers_models(model):
        if _use(part, stack):
            inside.update(part.modules())
    rest = [module for module in model.modules() if module not in inside]
    if any(_may_call_attention(module) for module in rest):
        from ..integrations.sdpa import replace_sdpa

        stack.enter_context(replace_sdpa(model))
    elif not inside and not any(isinstance(module, _OURS) for module in rest):
        raise ModelError(
            f"{type(model).__name__} has no attention to watch: it is made of torch.nn modules "
            "alone, and none of them is a torch.nn.MultiheadAttention. Watch the model that has it."
        )


def inside_backward() -> bool:
    """Whether autograd is running: a forward pass now is a repetition of an earlier one."""
    return torch._C._current_graph_task_id() != -1


@lru_cache(maxsize=256)
def _places_of_another(forward: Callable[..., Any]) -> tuple[int, ...]:
    """Where among the positional arguments of a method a second sequence may come."""
    try:
        names = list(inspect.signature(forward).parameters)[1:]
    except (TypeError, ValueError):  # one that is not written in Python
        return ()
    return tuple(place for place, name in enumerate(names) if name in _OTHER_SEQUENCE)


def _reads_other(
    module: nn.Module, arguments: Any, keywords: Mapping[str, Any], places: tuple[int, ...]
) -> bool:
    if isinstance(module, MultiHeadAttention):
        # Once a cache holds a context, the layer is called without it.
        return module.context_dim is not None
    if isinstance(module, nn.MultiheadAttention):
        given = dict(zip(("query", "key"), arguments, strict=False)) | dict(keywords)
        return given.get("query") is not given.get("key")
    others = [arguments[place] for place in places if place < len(arguments)]
    return any(it is not None for it in (*others, *map(keywords.get, _OTHER_SEQUENCE)))


def _use(part: nn.Module, stack: ExitStack) -> bool:
    """Whether a transformers model could be set to multihead."""
    from ..integrations.transformers import using

    try:
        stack.enter_context(using(part))
    except ModelError:  # it has attention of its own, which may still call torch's
        return False
    return True


def _may_call_attention(module: nn.Module) -> bool:
    """Whether a module may call torch's attention: torch's own, or one written by somebody else."""
    package = type(module).__module__.partition(".")[0]
    if package == "torch":
        return isinstance(module, nn.MultiheadAttention)
    return package != "multihead" and not isinstance(module, _OURS)


def transformers_models(model: nn.Module) -> list[nn.Module]:
    """The outermost transformers models in `model`. Where there is one, transformers is loaded."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return []
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel) and module not in inside:
            found.append(module)
            inside.update(module.modules())
    return found
