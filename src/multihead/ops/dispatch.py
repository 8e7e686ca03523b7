"""Which backend serves a call, why the others don't, and who is watching."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import ArgumentError, BackendError
from .backends import chunked, native, reference
from .problem import Problem


class Backend(Protocol):
    """What a backend module offers."""

    NAME: str

    def reasons(self, problem: Problem) -> list[str]:
        """Why it can't serve the call; empty if it can."""
        ...

    def forward(self, problem: Problem) -> tuple[Tensor, dict[str, Tensor]]:
        """The output and exactly the statistics that the problem asks for."""
        ...


class Observer(Protocol):
    """Sees the calls of attention while it sits in `observer`."""

    def wants(self, problem: Problem) -> tuple[str, ...]:
        """Statistics that this call shall compute for the observer; () for no interest."""
        ...

    def record(self, problem: Problem, out: Tensor, stats: Mapping[str, Tensor]) -> None:
        """The call as it was computed, detached from autograd."""
        ...


observer: ContextVar[Observer | None] = ContextVar("multihead.observer", default=None)

BACKENDS: tuple[Backend, ...] = (native, chunked, reference)
_AUTOMATIC: tuple[Backend, ...] = (native, chunked)


def choose(problem: Problem, name: str = "auto") -> Backend:
    """The backend that serves: the named one, or the first of the automatic order that can.

    Raises ArgumentError for an unknown name and BackendError, with every reason, where the
    named one can't. Nothing falls back in silence.
    """
    candidates = order(name)
    for backend in candidates:
        if not reasons(backend, problem):
            return backend
    listed = "; ".join(f"{it.NAME}: {' '.join(reasons(it, problem))}" for it in candidates)
    raise BackendError(f"No backend can serve this call. {listed}")


def order(name: str) -> tuple[Backend, ...]:
    """The backends that `name` stands for, in the order in which they are asked.

    Forward mode and torch.func need operations that they can go through, which are those of the
    definition: under them, and only there, "auto" means it.
    """
    if name == "auto":
        return (*_AUTOMATIC, reference) if transformed() else _AUTOMATIC
    named = tuple(backend for backend in BACKENDS if name == backend.NAME)
    if not named:
        names = ", ".join(["auto", *(backend.NAME for backend in BACKENDS)])
        raise ArgumentError(f"Unknown backend {name!r}; there are {names}.")
    return named


def reasons(backend: Backend, problem: Problem) -> list[str]:
    """Why `backend` can't serve the call; empty if it can."""
    own = backend.reasons(problem)
    if backend is not reference and transformed():
        own = [
            *own,
            "Forward-mode derivatives and torch.func transforms don't reach into it; "
            'backend="reference" has them, in O(Lq Lk) memory, and "auto" takes it for them.',
        ]
    return own


def transformed() -> bool:
    """Whether forward-mode differentiation or a torch.func transform is under way."""
    # Both are known to torch.compile, and guarded by it.
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
