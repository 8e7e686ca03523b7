"""The frame of common_mistakes.py: a mistake, what is right, and how far they lie apart."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from textwrap import dedent

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ran:
    """What the mistake gives, what is right, and the answer that both are compared with."""

    wrong: Tensor
    right: Tensor
    answer: Tensor


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake: its name, what one sees of it, what helps, and the code that shows it."""

    title: str
    symptom: str
    remedy: str
    code: str
    run: Callable[[], Ran]
    varies: bool

    def lines(self) -> list[str]:
        """What both give, beside the answer."""
        torch.manual_seed(0)
        ran = self.run()
        wrong = told(ran.wrong, ran.answer)
        if self.varies:
            torch.manual_seed(1)
            wrong = "another in each call" if told(self.run().wrong, ran.answer) != wrong else wrong
        return [f"wrong: {wrong}", f"right: {told(ran.right, ran.answer)}"]


MISTAKES: list[Mistake] = []
# What counts as right: above the rounding of the dtype, far below any mistake.
_ROUNDING = {torch.float64: 1e-12, torch.float16: 2e-3}


def mistake(
    title: str, remedy: str, *, varies: bool = False
) -> Callable[[Callable[[], Ran]], Callable[[], Ran]]:
    """Put a function among the mistakes; its docstring is the symptom, its body the code.

    `varies` says that what is wrong depends on chance, so that a figure would mean nothing.
    """

    def add(run: Callable[[], Ran]) -> Callable[[], Ran]:
        symptom = " ".join((run.__doc__ or "").split())
        MISTAKES.append(Mistake(title, symptom, remedy, _body(run), run, varies))
        return run

    return add


def told(found: Tensor, answer: Tensor) -> str:
    """How a result differs from the answer."""
    if found.shape != answer.shape:
        return f"a shape of {list(found.shape)} instead of {list(answer.shape)}"
    lost = int(found.isnan().sum())
    if lost:
        return f"NaN in {lost} of {found.numel()} numbers"
    off = distance(found, answer)
    return (
        "as it should be"
        if off < _ROUNDING[found.dtype]
        else f"off by {off:.0%} of the answer's norm"
    )


def distance(found: Tensor, answer: Tensor) -> float:
    """Norm of the difference over norm of the answer."""
    return float((found.double() - answer).norm() / answer.norm())


def _body(run: Callable[[], Ran]) -> str:
    """The lines of a function behind its docstring."""
    source = inspect.getsource(run)
    return dedent(source[source.index('"""', source.index('"""') + 3) + 3 :]).strip("\n")
