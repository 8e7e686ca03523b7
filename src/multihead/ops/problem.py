"""One call, described and checked: shapes, dtypes, device, mask, and what is wanted.

Axis names: B batch, H query heads, Hkv key/value heads, Lq and Lk lengths, D and Dv widths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ArgumentError, DeviceError, DtypeError, MaskError
from ..masks import Dense, Mask, MaskParts, Window, four_dims
from .dropout import Dropout

STATISTICS = (
    "lse",
    "entropy",
    "max_logit",
    "max_qk",
    "max_weight",
    "argmax",
    "mean_distance",
    "sink_mass",
    "participation",
)
DIFFERENTIABLE = ("lse", "entropy", "max_logit")

_EVERYTHING = Window(None, None)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, eq=False)
class ALiBi:
    """Attention with linear biases: `-slopes[h] * |p - j|` is added to the logit.

    `slopes` is a float tensor [H]. Press, Smith, Lewis 2022, section 3.
    """

    slopes: Tensor


@dataclass(frozen=True, eq=False)
class Logits:
    """What the logits of a call are made of; all but the values.

    `s = scale * q.k`, then softcap `c * tanh(s / c)`, then bias, then mask.
    `query` is [B, H, Lq, D], `key` [B, Hkv, Lk, D], `bias` a float tensor that broadcasts to
    [B, H, Lq, Lk], an ALiBi or None.
    """

    query: Tensor
    key: Tensor
    parts: MaskParts
    bias: Tensor | ALiBi | None
    scale: float
    softcap: float | None

    @property
    def batch(self) -> int:
        return self.query.shape[0]

    @property
    def heads(self) -> int:
        return self.query.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.key.shape[1]

    @property
    def query_length(self) -> int:
        return self.query.shape[2]

    @property
    def key_length(self) -> int:
        return self.key.shape[2]

    @property
    def head_dim(self) -> int:
        return self.query.shape[3]

    @property
    def group(self) -> int:
        """Query heads that read one KV head."""
        return self.heads // self.kv_heads if self.kv_heads else 1

    @property
    def compute_dtype(self) -> torch.dtype:
        """float64 for float64 inputs, otherwise float32."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32


@dataclass(frozen=True, eq=False)
class Problem(Logits):
    """One checked call of attention: its logits, values `[B, Hkv, Lk, Dv]`, sinks `[H]`, and the
    statistics and the bins of the pooled map that are wanted beside the output. Dropout, of the
    weights that the values are weighed with, changes no statistic.
    """

    value: Tensor
    sinks: Tensor | None
    stats: tuple[str, ...]
    bins: int | None = None
    dropout: Dropout | None = None

    @property
    def value_dim(self) -> int:
        return self.value.shape[3]

    @property
    def differentiated(self) -> tuple[Tensor | None, ...]:
        """The tensors that gradients may be asked for, in the order of the operator."""
        if isinstance(self.bias, ALiBi):
            return self.query, self.key, self.value, None, self.bias.slopes, self.sinks
        return self.query, self.key, self.value, self.bias, None, self.sinks

    @property
    def needs_grad(self) -> bool:
        """Whether autograd wants this call recorded."""
        return torch.is_grad_enabled() and any(
            tensor is not None and tensor.requires_grad for tensor in self.differentiated
        )


def describe(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None,
    bias: Tensor | ALiBi | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout_p: float,
    stats: Sequence[str] = (),
    bins: int | None = None,
) -> Problem:
    """Check a call and describe it, but for the seed of its dropout.

    Raises ArgumentError, DtypeError, DeviceError or MaskError before any work; each names the
    argument, what was expected, what came, and the remedy.
    """
    query, key, value = autocast(query, key, value)
    _check_tensors(query=query, key=key, value=value)
    _check_shapes(query, key, value)
    logits = _checked_logits(query, key, mask, bias, scale, softcap)
    checked_dropout(dropout_p)
    sinks = None if sinks is None else _checked_per_head(sinks, "sinks", query)
    return Problem(
        *logits, value, sinks, checked_stats(stats), bins if bins is None else checked_bins(bins)
    )


def describe_logits(
    query: Tensor,
    key: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Tensor | ALiBi | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Logits:
    """Check and describe a call that needs no values. Raises as `describe` does."""
    query, key = autocast(query, key)
    _check_tensors(query=query, key=key)
    _check_shapes(query, key, None)
    return Logits(*_checked_logits(query, key, mask, bias, scale, softcap))


def _checked_logits(
    query: Tensor,
    key: Tensor,
    mask: Mask | Tensor | None,
    bias: Tensor | ALiBi | None,
    scale: float | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, MaskParts, Tensor | ALiBi | None, float, float | None]:
    """The fields of Logits, in its order."""
    batch, heads, query_length, head_dim = query.shape
    rule = checked_mask(mask)
    parts = rule.lower(query_length, key.shape[2], batch=batch, heads=heads, device=query.device)
    bias = _checked_bias(bias, query, key)
    return query, key, parts, bias, checked_scale(scale, head_dim), checked_softcap(softcap)


def checked_stats(stats: Sequence[str]) -> tuple[str, ...]:
    """The names in the order of STATISTICS; raises ArgumentError for an unknown one."""
    if stats is None:
        raise ArgumentError(
            "stats must list statistics by name; got None. Leave it out, or pass ()."
        )
    names = (stats,) if isinstance(stats, str) else tuple(stats)
    if not names:
        return names
    for name in names:
        if name == "map":
            raise ArgumentError("The map is no statistic of a row: pass bins=64 beside stats.")
        if name not in STATISTICS:
            raise ArgumentError(f"Unknown statistic {name!r}; there are {', '.join(STATISTICS)}.")
    return tuple([name for name in STATISTICS if name in names])


def checked_bins(bins: int) -> int:
    """The number of bins as an int; raises ArgumentError for anything else."""
    if isinstance(bins, int | np.integer) and not isinstance(bins, bool) and bins >= 1:
        return bins if isinstance(bins, int) else int(bins)
    raise ArgumentError(f"bins must be a whole number, 1 or more; got {bins!r}.")


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast tensors are cast to its dtype first, float64 aside, as torch does."""
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return tensors
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype)
        if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
        else x
        for x in tensors
    )


def _check_tensors(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise DtypeError(
                f"{name} must be a tensor [B, H, L, D]; got {type(tensor).__name__}."
                + (" attention takes NumPy arrays if all three are." if "value" in tensors else "")
            )
        if tensor.layout != torch.strided:
            raise ArgumentError(
                f"{name} must be a dense tensor; got the layout {tensor.layout}. "
                f"Write {name}.to_dense()."
            )
        if tensor.ndim != 4:
            raise ArgumentError(
                f"{name} must have four dimensions [B, H, L, D]; got shape {tuple(tensor.shape)}. "
                "Add the missing ones with unsqueeze, for example x[None] for a batch of one."
            )
        if tensor.dtype not in _DTYPES:
            raise DtypeError(
                f"{name} must be float32, bfloat16, float16 or float64; got {_name(tensor.dtype)}."
            )
    (first_name, first), *others = tensors.items()
    for name, tensor in others:
        if tensor.dtype != first.dtype:
            raise DtypeError(
                f"{name} is {_name(tensor.dtype)}, but {first_name} is {_name(first.dtype)}; they "
                f"must share one dtype. Write {name}.to({first_name}.dtype)."
            )
        if tensor.device != first.device:
            raise DeviceError(
                f"{name} is on {tensor.device}, but {first_name} is on {first.device}. "
                f"Write {name}.to({first_name}.device)."
            )


def _check_shapes(query: Tensor, key: Tensor, value: Tensor | None) -> None:
    batch, heads, _, width = query.shape
    key_batch, kv_heads, key_length, key_width = key.shape
    if value is not None:
        value_batch, value_heads, value_length, _ = value.shape
        for size, other, what in (
            (key_batch, value_batch, "batch"),
            (kv_heads, value_heads, "number of KV heads"),
            (key_length, value_length, "length"),
        ):
            if size != other:
                raise ArgumentError(
                    f"key and value differ in {what}: {size} against {other} "
                    f"({_shapes(query, key, value)})."
                )
    if batch != key_batch:
        raise ArgumentError(
            f"query and key differ in batch: {batch} against {key_batch} "
            f"({_shapes(query, key, value)}). Nothing is broadcast here; use expand."
        )
    if width != key_width:
        raise ArgumentError(
            f"query and key differ in head width D: {width} against {key_width} "
            f"({_shapes(query, key, value)})."
        )
    if width == 0:
        raise ArgumentError(f"The head width D must be at least 1 ({_shapes(query, key, value)}).")
    if heads % kv_heads if kv_heads else heads:
        raise ArgumentError(
            f"{heads} query heads can't share {kv_heads} KV heads evenly: the number of KV heads "
            f"must divide the number of query heads ({_shapes(query, key, value)}). The axes are "
            "[B, H, L, D]; [B, L, H, D] needs transpose(1, 2)."
        )


def _shapes(query: Tensor, key: Tensor, value: Tensor | None) -> str:
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}"
    return shapes if value is None else f"{shapes}, value {tuple(value.shape)}"


def checked_mask(mask: Mask | Tensor | None) -> Mask:
    """`mask` as a Mask; raises DtypeError for what is none."""
    if mask is None:
        return _EVERYTHING
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        return Dense(mask)
    if isinstance(mask, Tensor) and mask.dtype.is_floating_point:
        raise DtypeError(
            f"mask must be a Mask or a bool tensor (True = may attend); got {_name(mask.dtype)}. "
            "A float tensor that is added to the scores is `bias=`."
        )
    if isinstance(mask, Tensor):
        raise DtypeError(
            f"mask must be a Mask or a bool tensor (True = may attend); got {_name(mask.dtype)}. "
            "Write mask.bool() if 1 means 'may attend'."
        )
    raise DtypeError(
        f"mask must be a Mask, a bool tensor or None; got {type(mask).__name__}. "
        "For the causal triangle write mask=multihead.Causal()."
    )


def _checked_bias(bias: Tensor | ALiBi | None, query: Tensor, key: Tensor) -> Tensor | ALiBi | None:
    if bias is None:
        return None
    if isinstance(bias, ALiBi):
        return ALiBi(_checked_per_head(bias.slopes, "ALiBi.slopes", query))
    if not isinstance(bias, Tensor) or not bias.dtype.is_floating_point:
        kind = _name(bias.dtype) if isinstance(bias, Tensor) else type(bias).__name__
        hint = " A bool tensor is `mask=`." if kind == "bool" else ""
        raise DtypeError(f"bias must be a float tensor or multihead.ALiBi; got {kind}.{hint}")
    if bias.device != query.device:
        raise DeviceError(f"bias is on {bias.device}, but query is on {query.device}.")
    bias = four_dims(bias, "bias")
    expected = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    for size, want in zip(bias.shape, expected, strict=True):
        if size not in (1, want):
            raise MaskError(
                f"bias must broadcast to {list(expected)} ([B, H, Lq, Lk]); got {list(bias.shape)}."
            )
    return bias


def _checked_per_head(value: Tensor, name: str, query: Tensor) -> Tensor:
    if not isinstance(value, Tensor) or not value.dtype.is_floating_point:
        kind = _name(value.dtype) if isinstance(value, Tensor) else type(value).__name__
        raise DtypeError(f"{name} must be a float tensor [H]; got {kind}.")
    if tuple(value.shape) != (query.shape[1],):
        raise ArgumentError(
            f"{name} must have one value a query head, shape ({query.shape[1]},); "
            f"got {tuple(value.shape)}."
        )
    if value.device != query.device:
        raise DeviceError(f"{name} is on {value.device}, but query is on {query.device}.")
    return value


def checked_scale(scale: float | None, head_dim: int) -> float:
    """The factor of q.k; raises ArgumentError if it is not finite."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    return _checked_number(scale, "scale", "Leave it out for 1/sqrt(D).")


def checked_softcap(softcap: float | None) -> float | None:
    """The cap as a float; raises ArgumentError if it is not above 0."""
    if softcap is None:
        return None
    number = _checked_number(softcap, "softcap", "None means no cap.")
    if number <= 0:
        raise ArgumentError(f"softcap must be above 0; got {softcap}. None means no cap.")
    return number


def checked_dropout(dropout_p: float) -> float:
    """The probability as a float; raises ArgumentError for what is none."""
    if type(dropout_p) is float and dropout_p == 0:
        return dropout_p
    if isinstance(dropout_p, bool):
        raise ArgumentError(f"dropout_p must be a number from 0 to 1; got {dropout_p}.")
    number = _checked_number(dropout_p, "dropout_p", "0 means no dropout.")
    if not 0 <= number <= 1:
        raise ArgumentError(f"dropout_p must lie between 0 and 1; got {dropout_p}.")
    return number


def _checked_number(value: Any, name: str, remedy: str) -> float:
    if isinstance(value, torch.SymFloat):
        return value  # type: ignore[return-value]
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not -math.inf < number < math.inf:
        raise ArgumentError(f"{name} must be a finite number; got {value!r}. {remedy}")
    return number


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
