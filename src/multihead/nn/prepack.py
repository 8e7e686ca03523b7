"""Weights of linear layers packed once, where that is faster on this processor.

    packed = mh.prepack(model)   # at inference; says what it did: print(packed)
    mh.unpack(model)             # or:  with mh.prepack(model): ...

Which product is the faster one depends on the processor, on torch's build, on the dtype and on the
sizes, so nothing is assumed: every shape in the model is measured on the model's own weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ..errors import DtypeError
from ..machine import processor_name
from .packed_linear import Packed, Rows, packed_class, plain_state, unpackable

PROBES = (1, 4, 16, 64, 512, 2048)
"""The numbers of rows that are measured."""

MARGIN = 1.1
"""What is faster by less stays as it is: measurements scatter, and a copy takes memory."""

# Products that take longer are not measured, nor those of more rows: packing stays a matter of
# seconds, and what is not measured is not packed.
_LONGEST = 0.1

_ROUNDS, _SAMPLE = 7, 1e-3

# Rounds of calls that take longer than a sample by so much: they scatter less.
_SLOW_ROUNDS, _SLOW = 3, 0.02

MOST_ERROR = 2.0
"""An error of more than so many times the plain layer's is no price for speed."""

# So many rows and outputs of a product are compared with float64.
_COMPARED_ROWS, _COMPARED_OUTPUTS = 32, 4096

# So many weights of a shape take turns while it is measured, as they do in the model: one weight
# alone would stay in the cache.
_IN_TURN = 8


@dataclass(frozen=True)
class Shape:
    """What decides about the product of a layer."""

    dtype: torch.dtype
    in_features: int
    out_features: int
    transposed: bool = False

    @classmethod
    def of(cls, layer: nn.Module) -> Shape:
        """The shape of a layer's weight: [out, in], or [in, out] where the class keeps it so."""
        weight: Tensor = layer.weight  # type: ignore[assignment]
        kind = type(layer) if isinstance(layer, Packed) else packed_class(type(layer))
        transposed = kind is not None and kind.transposed
        outputs, inputs = reversed(weight.shape) if transposed else weight.shape
        return cls(weight.dtype, inputs, outputs, transposed)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        kept = ", kept transposed" if self.transposed else ""
        return f"{dtype} {self.in_features} to {self.out_features}{kept}"


@dataclass(frozen=True)
class Gain:
    """The packed product beside the plain one, for one number of rows.

    Attributes:
        speed: the plain layer's time over the packed one's.
        error: the packed one's error over the plain one's: root mean squares, from float64.
    """

    speed: float
    error: float

    def __str__(self) -> str:
        return f"{self.speed:.2f}x" + (
            f" with {self.error:.1f}x the error" if self.error > MOST_ERROR else ""
        )


_measured: dict[tuple[Shape, int], dict[int, Gain]] = {}  # with a number of threads

Plan = Mapping[Shape, Rows | None]
"""For each shape the numbers of rows that the packed weight serves; None for a shape left alone."""


@dataclass(frozen=True)
class Choice:
    """What was found for one shape.

    Attributes:
        layers: how many layers of the model have it.
        gains: for each measured number of rows; empty if the rows came from a given plan.
        rows: the numbers of rows that the packed weights serve, or None if none was packed.
        nbytes: bytes of these packed weights, beside the weights themselves.
    """

    shape: Shape
    layers: int
    gains: Mapping[int, Gain]
    rows: Rows | None
    nbytes: int


@dataclass(frozen=True, eq=False)
class Prepacked:
    """What `prepack` did; print it. As a context manager it unpacks these layers at the end.

    Attributes:
        choices: one for each shape of a linear layer in the model.
        left: the layers that cannot be packed, by name, with the reason.
        threads: torch's number of threads while it was measured.
    """

    choices: tuple[Choice, ...]
    left: Mapping[str, str]
    threads: int
    _packed: WeakSet[Packed] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights, beside the weights themselves."""
        return sum(choice.nbytes for choice in self.choices)

    @property
    def plan(self) -> Plan:
        """What was chosen. Given to another `prepack` it gives the same kernels, hence bits."""
        return {choice.shape: choice.rows for choice in self.choices}

    def serves(self, rows: int) -> bool:
        """Whether some packed weight serves calls of so many rows (batch times length)."""
        return any(choice.rows is not None and rows in choice.rows for choice in self.choices)

    def undo(self) -> None:
        """Unpack the layers that this call packed."""
        for layer in self._packed:
            _unpack(layer)

    def __enter__(self) -> Prepacked:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __str__(self) -> str:
        packed = sum(choice.layers for choice in self.choices if choice.rows is not None)
        total = sum(choice.layers for choice in self.choices) + len(self.left)
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        where = f"{processor_name()}, {threads}, torch {torch.__version__}"
        if not packed:
            head = f"Nothing packed: no linear layer of {total} gains on this machine ({where})."
        else:
            head = (
                f"{packed} of {total} linear layers packed, {self.nbytes / 2**20:.1f} MiB beside "
                f"their weights ({where})."
            )
        return "\n".join([head, *map(_line, self.choices), *_reasons(self.left)])


def prepack(model: nn.Module, *, plan: Plan | None = None) -> Prepacked:
    """Pack the weights of a model's linear layers, where this processor gains from it.

    Every `torch.nn.Linear` in `model` (and `Conv1D`, GPT-2's) whose shape is at least 1.1 times as
    fast with its weight reordered once for oneDNN becomes a layer that keeps such a copy and uses
    it at inference, for the numbers of rows (batch times length) at which it is faster. On other
    calls, and for all other layers, nothing changes. See `Packed` for what it falls back on, and
    for what happens when a weight changes.

    Packing never more than doubles the plain layer's error, or a shape is left alone. Where the two
    products use the same kernel their bits are the same. As in plain torch, bits of a row can
    depend on how many rows there are.

    Args:
        model: any module, in train or eval mode; it is changed in place.
        plan: the `plan` of an earlier call. Nothing is measured then; shapes that it does not have
            are left alone.

    Returns:
        What was measured, packed and left, and what it takes in memory.

    Raises:
        DtypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise DtypeError(f"prepack takes a torch.nn.Module; got {type(model).__name__}.")
    groups, left = _groups(model)
    choices = []
    newly: WeakSet[Packed] = WeakSet()
    for shape, layers in groups.items():
        gains = {} if plan is not None else _gains(shape, layers)
        rows = plan.get(shape) if plan is not None else _worth(gains)
        of_shape = [] if rows is None else [_pack(layer, rows) for layer in layers]
        newly.update(of_shape)
        nbytes = sum(layer.packed_bytes for layer in of_shape)
        choices.append(Choice(shape, len(layers), gains, rows, nbytes))
    return Prepacked(tuple(choices), left, torch.get_num_threads(), newly)


def unpack(model: nn.Module) -> None:
    """Make every packed layer of a model a plain one again."""
    for module in model.modules():
        if isinstance(module, Packed):
            _unpack(module)


def _groups(model: nn.Module) -> tuple[dict[Shape, list[nn.Module]], dict[str, str]]:
    """The layers that can be packed, by shape; the others by name, with reasons."""
    groups: dict[Shape, list[nn.Module]] = {}
    left = {}
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Linear, Packed)) and packed_class(type(module)) is None:
            continue
        reason = _reason(module)
        if reason is None:
            groups.setdefault(Shape.of(module), []).append(module)
        else:
            left[name] = reason
    return groups, left


def _reason(layer: nn.Module) -> str | None:
    if isinstance(layer, Packed):
        return "it is packed already"
    if packed_class(type(layer)) is None:
        return f"it is a {type(layer).__name__}"
    if "forward" in layer.__dict__:
        return "its forward is replaced"
    weight = layer._parameters.get("weight")
    return "its weight is not a parameter of its own" if weight is None else unpackable(weight)


def _pack(layer: nn.Module, rows: Rows) -> Packed:
    kind = packed_class(type(layer))
    assert kind is not None
    layer.__class__ = kind
    assert isinstance(layer, Packed)
    layer.pack(rows)
    return layer


def _unpack(layer: Packed) -> None:
    if "plain" in vars(type(layer)):
        plain = plain_state(layer)
        layer.__dict__.clear()
        layer.__dict__.update(plain)
        layer.__class__ = layer.plain  # type: ignore[assignment]
    else:  # a parametrization has made it a class of its own, which goes back to ours
        layer.release()


def _gains(shape: Shape, layers: Sequence[nn.Module]) -> dict[int, Gain]:
    """What packing does to a shape's time and error, for each number of rows."""
    key = shape, torch.get_num_threads()
    if key not in _measured:
        probed = [_pack(layer, Rows(1)) for layer in layers[:_IN_TURN]]
        try:
            with torch.no_grad():
                _measured[key] = _measure(shape, probed)
        finally:
            for layer in probed:
                _unpack(layer)
    return _measured[key]


def _measure(shape: Shape, layers: Sequence[Packed]) -> dict[int, Gain]:
    generator = torch.Generator().manual_seed(0)  # the caller's draws stay what they were
    x = torch.randn(1, PROBES[-1], shape.in_features, generator=generator).to(shape.dtype)
    right = _right(x[0, :_COMPARED_ROWS], layers[0])
    gains: dict[int, Gain] = {}
    for rows in PROBES:
        batch = x[:, :rows]  # three dimensions, as in a model: they cost a microsecond or two
        plain = _turns(layers[0].plain.forward, layers, batch)
        packed = _turns(Packed.forward, layers, batch)
        longest = max(plain(), packed())
        if longest > _LONGEST:
            break
        repeats = max(1, round(_SAMPLE / longest))
        plain_times, packed_times = [], []
        for _ in range(_ROUNDS if longest < _SLOW else _SLOW_ROUNDS):
            plain_times.append(sum(plain() for _ in range(repeats)))
            packed_times.append(sum(packed() for _ in range(repeats)))
        # The shortest of each: whatever else runs makes samples longer, never shorter.
        speed = min(plain_times) / min(packed_times)
        gains[rows] = Gain(speed, _error_ratio(layers[0], batch, right))
    return gains


def _turns(
    forward: Callable[..., Tensor], layers: Sequence[Packed], x: Tensor
) -> Callable[[], float]:
    """A call that takes the next layer in each turn and returns the seconds it took."""
    turn = cycle(layers)

    def call() -> float:
        layer = next(turn)
        start = time.perf_counter()
        forward(layer, x)
        return time.perf_counter() - start

    return call


def _right(x_rc: Tensor, layer: Packed) -> Tensor:
    """The first rows and outputs of the layer's product in float64."""
    matrix = layer.weight if layer.transposed else layer.weight.t()
    right = x_rc.double() @ matrix[:, :_COMPARED_OUTPUTS].double()
    bias = layer._parameters["bias"]
    return right if bias is None else right + bias[:_COMPARED_OUTPUTS].double()


def _error_ratio(layer: Packed, x: Tensor, right: Tensor) -> float:
    """The packed layer's error over the plain one's; 1 where neither has any."""
    count = min(x.shape[1], len(right))
    plain, packed = (
        (forward(layer, x)[0, :count, :_COMPARED_OUTPUTS].double() - right[:count]).norm().item()
        for forward in (layer.plain.forward, Packed.forward)
    )
    if packed == 0:
        return 1.0
    return packed / plain if plain else float("inf")


def _worth(gains: Mapping[int, Gain]) -> Rows | None:
    """The longest run of measured numbers of rows that gains at both ends and loses nowhere.

    It has no end if the largest measured number gains. Numbers between a measured one that gains
    and one that does not are left alone, and so is one that gains alone: that may be chance.
    """
    best: Sequence[int] = ()
    run: list[int] = []
    for rows, gain in gains.items():
        if not (gain.speed >= 1 and gain.error <= MOST_ERROR):  # NaN is no gain either
            run = []
        elif run or gain.speed >= MARGIN:
            run.append(rows)
            if gain.speed >= MARGIN and len(run) > len(best):
                best = tuple(run)
    if len(best) < 2:
        return None
    return Rows(best[0], None if best[-1] == PROBES[-1] else best[-1])


def _line(choice: Choice) -> str:
    gains = ", ".join(f"{gain} at {rows}" for rows, gain in choice.gains.items())
    layers = f"{choice.layers} layer{'s' if choice.layers > 1 else ''}"
    done = f"packed for {choice.rows}" if choice.rows else "left alone"
    return f"  {choice.shape}, {layers}: {done}{f' ({gains})' if gains else ''}"


def _reasons(left: Mapping[str, str]) -> list[str]:
    """One line for each reason."""
    names: dict[str, list[str]] = {}
    for name, reason in left.items():
        names.setdefault(reason, []).append(name)
    return [
        f"  {', '.join(of_reason[:3])}{', ...' if len(of_reason) > 3 else ''}: {reason}"
        for reason, of_reason in names.items()
    ]
