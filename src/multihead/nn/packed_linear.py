"""Linear layers that keep their weight a second time, in the order that oneDNN's product reads.

torch's own product either reads the weight as it lies or reorders it in every call. A copy that is
reordered once is right only as long as nobody changes the weight, so every call compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .inference import differentiates, watched

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# So many runs of so many numbers, evenly spread, are compared in each call: a change that torch
# does not count (`weight.data.add_()`, as merging an adapter does, or NumPy on the same memory)
# shows in them. They cost half a microsecond.
_RUNS, _RUN = 16, 8

_CONV1D = ("transformers.pytorch_utils", "Conv1D")

_classes: dict[type[nn.Module], type[Packed]] = {}  # of others' layers, made when first met

_INTEGERS = {4: torch.int32, 2: torch.int16}


@dataclass(frozen=True)
class Rows:
    """The numbers of rows, `first` to `last`, that a choice holds for; None is without an end."""

    first: int
    last: int | None = None

    def __contains__(self, rows: int) -> bool:
        return self.first <= rows and (self.last is None or rows <= self.last)

    def __str__(self) -> str:
        if self.last is None:
            return f"{self.first} rows or more"
        return f"{self.first} to {self.last} rows"


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A reordered copy, and what the weight was when it was made.

    `sample` looks at the weight's own memory; `sampled` is what stood there.
    """

    packed: Tensor
    weight: Tensor
    state: tuple[Any, ...]
    sample: Tensor
    sampled: Tensor

    @classmethod
    def of(cls, weight: Tensor, *, transposed: bool = False) -> PackedWeight:
        """Reorder a weight [out, in], transposed [in, out]; one that is not `unpackable`."""
        state = _state(weight)  # first: a change during the copying must show in the next call
        sample = _sample(weight)
        sampled = sample.clone()
        matrix = weight.detach().t().contiguous() if transposed else weight.detach()
        packed = torch.ops.mkldnn._reorder_linear_weight(matrix)
        return cls(packed, weight, state, sample, sampled)

    def is_of(self, weight: Tensor) -> bool:
        """Whether the copy still says what the weight says."""
        return (
            self.weight is weight
            and self.state == _state(weight)
            and torch.equal(self.sample, self.sampled)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """None: a copied weight is packed when it is first met."""

    @property
    def nbytes(self) -> int:
        """Bytes that the copy takes beside the weight; its blocks are padded."""
        return int(torch.ops.mkldnn._nbytes(self.packed))


class Packed(nn.Module):
    """What makes a packed layer of the class of a plain one, which stands behind it as a base.

    Parameters, state dict, hooks and results are those of the plain layer. The copy serves calls
    that need no derivative, of as many rows as it was chosen for; all others take the plain
    layer's forward: under autograd, autocast, torch.compile, export, tracing, `torch.func` and
    torch's function and dispatch modes (`replace_sdpa` is one), for weights that another tensor
    stands in for (parametrizations, `functional_call`), other devices, dtypes and layouts.

    A weight that changed is packed anew by the next call. Changes are seen by torch's version
    counter, by address, shape and dtype, and by 128 of its numbers.

    Copies by `copy.deepcopy` and pickle are plain layers.
    """

    plain: ClassVar[type[nn.Module]]
    transposed: ClassVar[bool] = False
    """Whether the weight is [in, out]."""

    weight: Tensor

    def pack(self, rows: Rows) -> None:
        """Pack the weight now, for calls of so many rows."""
        self._rows = rows
        self._packed: PackedWeight | None = PackedWeight.of(self.weight, transposed=self.transposed)

    def release(self) -> None:
        """Drop the copy, and pack no other."""
        self._rows, self._packed = Rows(1, 0), None

    @property
    def packed_bytes(self) -> int:
        """Bytes that the copy takes beside the weight."""
        return 0 if self._packed is None else self._packed.nbytes

    def forward(self, input: Tensor) -> Tensor:
        """`input` [..., in_features] times the weight, plus the bias: [..., out_features]."""
        if not watched():  # first: a function mode is shown each question to a tensor
            # From the dictionary: what a parametrization puts in a parameter's place is not in it.
            weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
            if (
                weight is not None
                and (bias is not None or "bias" in self._parameters)
                and self._may_serve(input, weight, bias)
            ):
                packed = self._current(weight)
                if packed is not None:
                    return torch.ops.mkldnn._linear_pointwise(  # type: ignore[no-any-return]
                        input, packed.packed, bias, "none", [], ""
                    )
        return super().forward(input)  # type: ignore[no-any-return]

    def _may_serve(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether the call is one that a packed weight may serve, in order of the checks' cost."""
        if type(input) is not Tensor or not input.ndim:
            return False
        outputs, width = weight.shape
        if self.transposed:
            outputs, width = width, outputs
        return (
            input.shape[-1] == width > 0  # a layer may have lost all its heads
            and input.numel() // width in self._rows
            and input.dtype is weight.dtype
            and input.is_cpu
            and input.layout is torch.strided
            and (bias is None or _fits(bias, outputs, weight.dtype))
            and not differentiates(input, weight, bias)
            and torch._C._get_mkldnn_enabled()
        )

    def _current(self, weight: Tensor) -> PackedWeight | None:
        """The copy of this weight, made anew if it changed; None if it cannot be packed now."""
        packed = self._packed  # once: another thread may put a new one in its place
        if packed is not None and packed.is_of(weight):
            return packed
        self._packed = None
        if unpackable(weight) is not None:
            return None
        packed = PackedWeight.of(weight, transposed=self.transposed)
        self._packed = packed
        return packed

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Each conversion (`to`, `half`, `share_memory`): the copy is of the old memory."""
        self._packed = None
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._packed = None
        super()._load_from_state_dict(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As the plain layer that it was: whoever copies or stores it keeps its weight once."""
        if "plain" not in vars(type(self)):  # a parametrization's class knows how to copy itself
            return super().__reduce_ex__(protocol)
        return object.__new__, (self.plain,), plain_state(self)

    def __prepare_scriptable__(self) -> nn.Module:
        """What torch.jit.script compiles."""
        plain = self.plain.__new__(self.plain)
        plain.__dict__.update(plain_state(self))
        return plain


class PackedLinear(Packed, nn.Linear):
    """A `torch.nn.Linear` that `multihead.prepack` has given a packed copy; see `Packed`."""

    plain = nn.Linear

    def extra_repr(self) -> str:
        """The sizes, and when the packed weight serves."""
        return f"{super().extra_repr()}, packed for {self._rows}"


def packed_class(plain: type[nn.Module]) -> type[Packed] | None:
    """The packed class of a layer's own; None if there is none.

    GPT-2's Conv1D is known by its name: this module does without transformers.
    """
    if plain is nn.Linear:
        return PackedLinear
    if (plain.__module__, plain.__qualname__) != _CONV1D:
        return None
    if plain not in _classes:
        fields = {"plain": plain, "transposed": True, "__doc__": Packed.__doc__}
        _classes[plain] = type("PackedConv1D", (Packed, plain), fields)
    return _classes[plain]


def plain_state(layer: nn.Module) -> dict[str, Any]:
    """The attributes of a packed layer without what packing added."""
    return {k: v for k, v in layer.__dict__.items() if k not in ("_rows", "_packed")}


def unpackable(weight: Tensor) -> str | None:
    """Why a weight can't be packed; None if it can."""
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}, not a plain parameter"
    if weight.device.type != "cpu":
        return f"its weight is on {weight.device}"
    if weight.dtype not in DTYPES or not _multiplies(weight.dtype):
        return f"oneDNN has no product of {_name(weight.dtype)} on this processor"
    if weight.is_inference():
        return "its weight was made in inference mode, where torch does not count changes"
    if weight.layout is not torch.strided or not weight.is_contiguous() or not weight.numel():
        return "its weight is not contiguous"
    return None


def _multiplies(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fits(bias: Tensor, outputs: int, dtype: torch.dtype) -> bool:
    return (
        type(bias) is nn.Parameter
        and bias.dtype is dtype
        and bias.is_cpu
        and bias.shape == (outputs,)
        and bias.is_contiguous()
    )


def _state(weight: Tensor) -> tuple[Any, ...]:
    """What differs when torch has changed the weight's numbers or what they mean."""
    return weight.data_ptr(), weight._version, weight.shape, weight.stride(), weight.dtype


def _sample(weight: Tensor) -> Tensor:
    """Some of a contiguous weight's numbers as integers, so that NaN equals itself; a view.

    It holds the memory, so that no other weight comes to the same address, but not the parameter:
    torch refuses to swap one that a view is of.
    """
    flat = weight.data.view(_INTEGERS[weight.itemsize]).flatten()
    if len(flat) <= _RUNS * _RUN:
        return flat
    step = (len(flat) - _RUN) // (_RUNS - 1)  # the last run ends where the weight does
    return flat.as_strided((_RUNS, _RUN), (step, 1), flat.storage_offset())
