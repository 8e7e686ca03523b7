"""A row of a suite: its name, and how it is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from multihead.bench.case import Case, Entry
from multihead.bench.contest import Setting, not_served


@dataclass(frozen=True)
class Row:
    """One line of a suite's table."""

    name: str
    measure: Callable[[Setting], Entry]


def of_case(case: Case, measure: Callable[[Case, Setting], Entry]) -> Row:
    """The row of a case, or of the reason why our kernels can't make its call here."""
    return Row(case.name, partial(_measured, case, measure))


def _measured(case: Case, measure: Callable[[Case, Setting], Entry], setting: Setting) -> Entry:
    reason = not_served(case)
    if reason is not None:
        return {**case.to_json(), "not_measurable": reason}
    return measure(case, setting)
