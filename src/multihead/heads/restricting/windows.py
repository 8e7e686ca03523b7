"""Windows of single heads: which heads of a model read only what is near, as data."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...errors import ArgumentError, InputError, ModelError
from ...integrations.hf_windows import head_window, set_head_window
from ...masks import Causal, Window
from ...nn import MultiHeadAttention
from ...nn.checks import check_sizes
from ...ops.split_key_values import UNBOUNDED
from ..running import transformers_models


@dataclass(frozen=True)
class HeadWindows:
    """Which heads see only the newest `window` tokens and the first `keep_first`.

    Attributes:
        window: how many of the newest keys a restricted head sees, its query's own included.
        keep_first: how many of the first keys it sees besides.
        heads: for each attention module, by name, how many query heads it has.
        restricted: for each attention module, by name, its restricted query heads in order. What
            is not named has none.

    Heads are counted as the modules have them: where some were pruned, those that are left.

    Raises:
        ArgumentError, DtypeError: a window below 1, or heads that there are not.
    """

    window: int
    keep_first: int
    heads: Mapping[str, int]
    restricted: Mapping[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        check_sizes(window=self.window)
        if not isinstance(self.keep_first, int) or self.keep_first < 0:
            raise ArgumentError(f"keep_first must be 0 or above; got {self.keep_first!r}.")
        for name, chosen in self.restricted.items():
            count = self.heads.get(name, 0)
            if any(type(head) is not int for head in chosen) or len(set(chosen)) < len(chosen):
                raise ArgumentError(
                    f"restricted heads must be integers, each once; {name!r} has {list(chosen)}."
                )
            if any(not 0 <= head < count for head in chosen):
                raise ArgumentError(
                    f"{name!r} has heads 0 to {count - 1}; got {list(chosen)} to restrict."
                )

    @property
    def count(self) -> int:
        """How many query heads are restricted."""
        return sum(map(len, self.restricted.values()))

    @property
    def total(self) -> int:
        """How many query heads there are."""
        return sum(self.heads.values())

    def rule(self, name: str) -> Window | None:
        """The mask of one module's heads; None where all of them see all."""
        chosen = self.restricted.get(name, ())
        if not chosen:
            return None
        left = torch.full((self.heads[name],), UNBOUNDED, dtype=torch.int32)
        left[list(chosen)] = self.window - 1
        return Window(left, None, self.keep_first)

    def visible_pairs(self, queries: int, keys: int) -> int:
        """Pairs of a query and a key that it sees, summed over all heads of a causal model."""
        total = 0
        for name, heads in self.heads.items():
            rule = self.rule(name)
            if rule is None:
                total += heads * Causal().visible_pairs(queries, keys)
            else:
                total += (Causal() & rule).visible_pairs(queries, keys)
        return total

    def by_layer(self) -> list[tuple[int | None, ...] | None]:
        """A window for each head of each module, in order; None for a module that stays as it is.

        What a model would cost with them, before it is restricted:

            cost.with_head_windows(describe(model), windows.by_layer(), windows.keep_first)
        """
        found: list[tuple[int | None, ...] | None] = []
        for name, heads in self.heads.items():
            near = self.restricted.get(name, ())
            sizes = tuple(self.window if head in near else None for head in range(heads))
            found.append(sizes if near else None)
        return found

    def to_json(self) -> str:
        """As one JSON document, which `from_json` reads."""
        return json.dumps(
            {
                "window": self.window,
                "keep_first": self.keep_first,
                "heads": dict(self.heads),
                "restricted": {name: list(it) for name, it in self.restricted.items()},
            }
        )

    @classmethod
    def from_json(cls, text: str) -> HeadWindows:
        """What `to_json` wrote. Raises InputError for another text."""
        try:
            fields = json.loads(text)
            restricted = {name: tuple(it) for name, it in fields["restricted"].items()}
            return cls(fields["window"], fields["keep_first"], fields["heads"], restricted)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"This is no JSON of HeadWindows.to_json(): {error!r}.") from error


def restrict(model: nn.Module, windows: HeadWindows) -> None:
    """Restrict heads of a model from now on; `windows` without restricted heads frees them all.

    A transformers model is set to multihead's attention, which alone reads the windows. Files of a
    model do not hold them: keep `windows.to_json()` beside the weights. A model that is moved to
    another device afterwards is restricted there anew.

    In a `LanguageModel`, `make_caches("window")` then makes caches that hold, for KV heads all of
    whose query heads are restricted, the window and the first tokens alone. transformers' own
    caches go on holding all tokens of all heads.

    Raises:
        ModelError: a layer that the model does not have or that has other heads, a window of its
            own, or no windows of single heads (`LatentAttention`); a model that is not on
            multihead's attention and cannot be set to it.
    """
    layers = _layers(model, windows)
    for part in _models_of(model, layers):
        from ...integrations.transformers import use

        use(part)
    for name, layer in layers.items():
        _set_window(layer, windows.rule(name))


@contextmanager
def restricted(model: nn.Module, windows: HeadWindows) -> Iterator[None]:
    """`restrict` for the length of a `with` block, undone on the way out, errors included."""
    layers = _layers(model, windows)
    before = {name: _window_of(layer) for name, layer in layers.items()}
    with ExitStack() as stack:
        for part in _models_of(model, layers):
            from ...integrations.transformers import using

            stack.enter_context(using(part))
        try:
            for name, layer in layers.items():
                _set_window(layer, windows.rule(name))
            yield
        finally:
            for name, layer in layers.items():
                _set_window(layer, before[name])


def _models_of(model: nn.Module, layers: Mapping[str, nn.Module]) -> list[nn.Module]:
    """The transformers models that some of the layers are in."""
    chosen = set(layers.values())
    return [part for part in transformers_models(model) if chosen & set(part.modules())]


def _layers(model: nn.Module, windows: HeadWindows) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    kind = getattr(sys.modules.get("transformers"), "PreTrainedModel", ())
    theirs = {it for part in model.modules() if isinstance(part, kind) for it in part.modules()}
    found: dict[str, nn.Module] = {}
    for name, heads in windows.heads.items():
        layer = modules.get(name)
        if layer is None:
            raise ModelError(
                f"{type(model).__name__} has no module {name!r}, which the windows name: they are "
                "of another model."
            )
        if not isinstance(layer, MultiHeadAttention) and layer not in theirs:
            raise ModelError(
                f"{name} is a {type(layer).__name__}, which reads no windows of single heads: "
                "MultiHeadAttention layers and attention modules of transformers models do."
            )
        own = layer.num_heads if isinstance(layer, MultiHeadAttention) else heads
        if own != heads:
            raise ModelError(f"{name} has {own} heads, but the windows are of {heads}.")
        window = _window_of(layer)
        if window is not None and not isinstance(window.left, torch.Tensor):
            if windows.restricted.get(name):
                raise ModelError(
                    f"{name} has a window of its own for all heads ({window}); its heads are "
                    "restricted already. Leave it out."
                )
            continue
        found[name] = layer
    return found


def _window_of(layer: Any) -> Window | None:
    if isinstance(layer, MultiHeadAttention):
        return layer.window
    return head_window(layer)


def _set_window(layer: Any, window: Window | None) -> None:
    if window is not None and isinstance(window.left, torch.Tensor):
        weight = next(layer.parameters(), None)
        if weight is not None:  # masks are read where the call is
            window = replace(window, left=window.left.to(weight.device))
    if isinstance(layer, MultiHeadAttention):
        layer.window = window
    else:
        set_head_window(layer, window)
