"""The suite `memory`: what a call takes beyond its inputs and outputs, each in a fresh process.

Every two features meet in some call, every feature also meets every other's absence, and nothing
is built that grows with the table of scores. A dense mask, which is as large, is no part of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from itertools import combinations, product

from multihead.bench.case import Entry
from multihead.bench.contest import Setting
from multihead.bench.memory_probe import FEATURES
from multihead.bench.suites.row import Row
from multihead.errors import MultiheadError

LENGTH, QUICK_LENGTH = 32768, 1024
HEADS, WIDTH = 8, 64

# Two frames, or two biases, that one call cannot have.
_EXCLUSIVE = ({"lengths", "start", "positions"}, {"keys-bias", "alibi"})

_Values = dict[str, bool]


def rows(*, quick: bool) -> list[Row]:
    """A row for each call of the cover."""
    length = QUICK_LENGTH if quick else LENGTH
    calls = [tuple(name for name, on in values.items() if on) for values in cover(FEATURES)]
    return [Row("+".join(call) or "plain", partial(_measure, call, length)) for call in calls]


def cover(features: Iterable[str]) -> list[_Values]:
    """Calls such that any two features occur on-on, on-off, off-on and off-off, where they can."""
    names = list(features)
    open_pairs = {
        ((a, x), (b, y))
        for a, b in combinations(names, 2)
        for x, y in product((True, False), repeat=2)
        if _allowed({a: x, b: y})
    }
    calls = []
    while open_pairs:
        (first, on), (second, also) = min(open_pairs, key=lambda pair: _order(names, pair))
        values: _Values = {first: on, second: also}
        for name in names:
            if name not in values:
                values[name] = _better(name, values, open_pairs)
        values = {name: values[name] for name in names}
        open_pairs -= set(combinations(values.items(), 2))
        calls.append(values)
    return calls


def _order(names: list[str], pair: tuple[tuple[str, bool], tuple[str, bool]]) -> tuple[int, ...]:
    (a, x), (b, y) = pair
    return (-x - y, names.index(a), names.index(b), -x)


def _better(
    name: str,
    values: _Values,
    open_pairs: set[tuple[tuple[str, bool], tuple[str, bool]]],
) -> bool:
    def met(on: bool) -> int:
        mine = (name, on)
        return sum(
            (mine, other) in open_pairs or (other, mine) in open_pairs for other in values.items()
        )

    return _allowed({**values, name: True}) and met(True) >= met(False)


def _allowed(values: _Values) -> bool:
    on = {name for name, is_on in values.items() if is_on}
    return all(len(on & group) < 2 for group in _EXCLUSIVE)


def _measure(features: tuple[str, ...], length: int, setting: Setting) -> Entry:
    command = [
        *(sys.executable, "-m", "multihead.bench.memory_probe"),
        *(str(n) for n in (length, HEADS, WIDTH, setting.threads)),
        *features,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MultiheadError(
            f"the memory of {'+'.join(features)} was not measured: {done.stderr.strip()[-500:]}"
        )
    return {
        "features": list(features),
        "length": length,
        "heads": HEADS,
        "width": WIDTH,
        **json.loads(done.stdout),
    }
