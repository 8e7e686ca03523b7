"""The C++ kernels: exact attention on the CPU in O(N) memory, for float32, bfloat16 and float16.

This module alone imports the extension; without it the package works and `reasons` says so.
Shape suffixes: b batch, h head, q query, k key, d width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from ...errors import BackendError
from ...masks import MaskParts
from ..key_values import KeyValues
from ..problem import ALiBi, Logits, Problem

_native: ModuleType | None
try:
    import multihead._native as _native
except ImportError as error:
    _native = None
    _MISSING = f"The native extension is not built: {error}."
else:
    _MISSING = ""

NAME = "native"

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The order of the addresses in the extension's `statistics`; argmax is int64.
_STATISTICS = (
    "lse",
    "entropy",
    "max_logit",
    "max_qk",
    "max_weight",
    "mean_distance",
    "sink_mass",
    "participation",
    "argmax",
)
_NO_STATISTICS = (0,) * len(_STATISTICS)
_NO_MAP = (0, 0, 0)


def reasons(problem: Logits) -> list[str]:
    """Why the kernels can't serve: not built, another device, another dtype, dropout."""
    found = []
    if _native is None:
        found.append(_MISSING)
    if problem.query.device.type != "cpu":
        found.append(f"It runs on the CPU; the tensors are on {problem.query.device}.")
    if problem.query.dtype not in _DTYPES:
        dtype = str(problem.query.dtype).removeprefix("torch.")
        found.append(f"It computes float32, bfloat16 and float16, not {dtype}.")
    if isinstance(problem, Problem) and problem.dropout is not None:
        found.append("It has no dropout yet.")
    return found


def forward(problem: Problem) -> tuple[Tensor, dict[str, Tensor]]:
    """The output [B, H, Lq, Dv] in query's dtype, and the statistics of `problem.stats`.

    Statistics are float32 [B, H, Lq], argmax int64. With `problem.bins` they hold the "map", as
    `attention_map` pools it, unless the call has so few rows that their kernel pools none. The bits
    do not depend on the number of threads or on the batch around a row. Raises BackendError if
    the extension is not built.
    """
    return launch(
        problem.query,
        problem.key,
        problem.value,
        problem.parts,
        problem.scale,
        problem.softcap,
        problem.stats,
        problem.bias,
        problem.sinks,
        problem.bins,
    )


def reads_in_place(query: Tensor, kv: KeyValues) -> bool:
    """Whether `launch` reads the pages or int8 of `kv` for this query, on the CPU.

    It does for calls of few queries, where the numbers of a token lie together.
    """
    if query.ndim != 4 or query.dtype not in _DTYPES or kv.key.ndim != 4:
        return False
    if kv.key_scale is None and query.dtype != kv.key.dtype:
        return False
    try:
        few = _extension().decodes(
            _dtype(query.dtype), query.shape[1], kv.key.shape[1], query.shape[2]
        )
    except ValueError:  # MULTIHEAD_ISA names a set that is not here: any other way says so
        return False
    return bool(few and kv.key.stride(3) == 1 == kv.value.stride(3))


def launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parts: MaskParts,
    scale: float,
    softcap: float | None,
    stats: tuple[str, ...],
    bias: Tensor | ALiBi | None = None,
    sinks: Tensor | None = None,
    bins: int | None = None,
    kv: KeyValues | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`forward` of a checked call that is not a Problem.

    With `kv`, for which `reads_in_place` holds, key and value are its stand-ins.
    """
    extension = _extension()
    query = _written_out(query)
    batch, heads, query_length, head_dim = query.shape
    _, kv_heads, key_length, value_dim = value.shape
    held = pages = None
    if kv is not None:
        pages = None if kv.pages is None else kv.pages.contiguous()
        key, value, held = kv.key, kv.value, _held(kv, pages)
    key, value = _written_out(key), _written_out(value)
    # Sizes one by one: as a tuple they take torch half as long again.
    out = query.new_empty(batch, heads, query_length, value_dim)
    statistics, addresses = _empty_statistics(stats, query) if stats else ({}, _NO_STATISTICS)
    pooled = None
    if bins and not extension.decodes(_dtype(query.dtype), heads, kv_heads, query_length):
        cells = min(bins, query_length), min(bins, key_length)
        pooled = statistics["map"] = query.new_empty((batch, heads, *cells), dtype=torch.float32)
    # Held until the kernel returns, which only sees addresses.
    sinks = _per_head(sinks)
    slopes = _per_head(bias.slopes) if isinstance(bias, ALiBi) else None
    bias = _written_out(bias) if isinstance(bias, Tensor) else None
    try:
        extension.forward(
            _dtype(query.dtype),
            (batch, heads, kv_heads, query_length, key_length, head_dim, value_dim),
            query.data_ptr(), query.stride(),
            key.data_ptr(), key.stride(),
            value.data_ptr(), value.stride(),
            out.data_ptr(), out.stride(),
            scale,
            softcap or 0.0,
            _address(sinks),
            _address(slopes),
            _broadcast(bias),
            _dtype(query.dtype if bias is None else bias.dtype),
            _mask(parts, batch, heads),
            addresses,
            _NO_MAP if pooled is None else (*pooled.shape[2:], pooled.data_ptr()),
            held,
            torch.get_num_threads(),
        )  # fmt: skip
    except ValueError as error:  # MULTIHEAD_ISA names a set that is not here
        raise BackendError(f"{error}.") from None
    return out, statistics


def sweep(
    call: Logits, lse: Tensor, edges: Sequence[int], mask_shape: tuple[int, int], *, peaks: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """The weights e^(logit - lse) of the rows from `edges[0]` to `edges[-1]`, summed over bins.

    `lse` is a float tensor [B, H, Lq]; bin i has the rows from `edges[i]` up to `edges[i + 1]`, of
    which there is at least one; `mask_shape` (B|1, H|1) says which samples and heads the mask
    tells apart. Returns

    * the sums, float32 [B, H, bins, Lk], and the largest weights alike, or None without `peaks`
    * how many rows of a bin see each key, int64 [B|1, H|1, bins, Lk]
    * whether these rows see any key, bool [B|1, H|1, rows]

    The bits depend neither on the number of threads nor on the other bins. Raises BackendError if
    the extension is not built.
    """
    extension = _extension()
    query, key = _written_out(call.query.detach()), _written_out(call.key.detach())
    shape = (call.batch, call.heads, len(edges) - 1, call.key_length)
    sums = query.new_empty(shape, dtype=torch.float32)
    highest = torch.empty_like(sums) if peaks else None
    viewers = query.new_zeros((*mask_shape, *shape[2:]), dtype=torch.int64)
    seeing = query.new_zeros((*mask_shape, call.query_length), dtype=torch.bool)
    bias = call.bias
    # Held until the kernel returns, which only sees addresses.
    lse = _written_out(lse.detach()).float().contiguous()
    slopes = _per_head(bias.slopes) if isinstance(bias, ALiBi) else None
    bias = _written_out(bias.detach()) if isinstance(bias, Tensor) else None
    try:
        extension.sweep(
            dtype=_dtype(query.dtype),
            sizes=(
                call.batch,
                call.heads,
                call.kv_heads,
                call.query_length,
                call.key_length,
                call.head_dim,
            ),
            query=(query.data_ptr(), *query.stride()),
            key=(key.data_ptr(), *key.stride()),
            scale=call.scale,
            softcap=call.softcap or 0.0,
            slopes=_address(slopes),
            bias=_broadcast(bias),
            bias_dtype=_dtype(torch.float32 if bias is None else bias.dtype),
            mask=_mask(call.parts, call.batch, call.heads),
            lse=lse.data_ptr(),
            edges=list(edges),
            sums=sums.data_ptr(),
            peaks=_address(highest),
            mask_shape=mask_shape,
            viewers=viewers.data_ptr(),
            seeing=seeing.data_ptr(),
            threads=torch.get_num_threads(),
        )
    except ValueError as error:  # MULTIHEAD_ISA names a set that is not here
        raise BackendError(f"{error}.") from None
    return sums, highest, viewers, seeing[..., edges[0] : edges[-1]]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [B, H, L, D] with lanes i and i + r turned by `cos` and `sin`, float32 [B|1, 1, L, r].

    For float32, bfloat16 and float16 on the CPU, and contiguous `cos` and `sin`. Computed in
    float32 and rounded once; lanes from 2r on are copied. The bits do not depend on the number of
    threads or on what is around a row. Raises BackendError if the extension is not built.
    """
    extension = _extension()
    x = _written_out(x)
    out = torch.empty_like(x)
    rows, _, length, pairs = cos.shape
    try:
        extension.rotate(
            _dtype(x.dtype),
            (*x.shape, pairs),
            x.data_ptr(), x.stride(),
            out.data_ptr(), out.stride(),
            cos.data_ptr(),
            sin.data_ptr(),
            0 if rows == 1 else length * pairs,
            torch.get_num_threads(),
        )  # fmt: skip
    except ValueError as error:  # MULTIHEAD_ISA names a set that is not here
        raise BackendError(f"{error}.") from None
    return out


def is_built() -> bool:
    """Whether the extension was found."""
    return _native is not None


def instruction_sets() -> list[str]:
    """The sets that this build holds and this processor runs, slowest first; [] if not built."""
    return [] if _native is None else list(_native.instruction_sets())


def instruction_set(dtype: torch.dtype = torch.float32) -> str | None:
    """The set that serves `dtype` now; None if the extension is not built.

    MULTIHEAD_ISA or `use_instruction_set` override the choice. "avx512_bf16" and "avx512_amx" hold
    bfloat16 alone: where one is chosen, float32 still takes the fastest other set. Raises
    BackendError if MULTIHEAD_ISA names a set that this processor lacks.
    """
    if _native is None:
        return None
    try:
        return str(_native.instruction_set_for(_dtype(dtype)))
    except ValueError as error:
        raise BackendError(f"{error}.") from None


def use_instruction_set(name: str | None) -> None:
    """Run every later call of this process on one instruction set; None for the fastest.

    Raises BackendError if the extension is not built or the processor lacks the set.
    """
    try:
        _extension().use_instruction_set(name or "")
    except ValueError as error:
        raise BackendError(f"{error}.") from None


def build_info() -> str | None:
    """The compiler and the kind of build; None if the extension is not built."""
    return None if _native is None else str(_native.BUILD)


def use_decoder(on: bool) -> None:
    """Whether calls of few rows take kernels of their own, as they do from the start.

    For tests and measurements. Raises BackendError if the extension is not built.
    """
    _extension().use_decoder(on)


def built_sets() -> tuple[list[str], list[str]]:
    """The sets in this build, and those left out, which the compiler did not know; [] each if
    the extension is not built.
    """
    if _native is None:
        return [], []
    held, left_out = str(_native.SETS), str(_native.SETS_LEFT_OUT)
    return held.split(","), left_out.split(",") if left_out else []


def peak(kind: str, threads: int) -> float | None:
    """Measure the processor's limit in GF/s: "fma" in float32, "dpbf16" or "amx" in bfloat16.

    None where the processor lacks the instruction. Takes some ten milliseconds. Raises
    BackendError if the extension is not built.
    """
    rate = float(_extension().peak(kind, threads))
    return None if math.isnan(rate) else rate


def _extension() -> ModuleType:
    if _native is None:
        raise BackendError(_MISSING)
    return _native


@lru_cache
def _dtype(dtype: torch.dtype) -> object:
    return getattr(_extension().Dtype, str(dtype).removeprefix("torch."))


def _empty_statistics(
    names: tuple[str, ...], query: Tensor
) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """Tensors [B, H, Lq] to be filled, and their addresses in the extension's order."""
    batch, heads, length, _ = query.shape
    empty = {
        name: query.new_empty(
            batch, heads, length, dtype=torch.int64 if name == "argmax" else torch.float32
        )
        for name in names
    }
    return empty, tuple([empty[n].data_ptr() if n in empty else 0 for n in _STATISTICS])


def _written_out(tensor: Tensor) -> Tensor:
    """As its memory says: a lazily negated view's holds the other sign, torch's zeros have none."""
    if tensor.is_neg():
        return tensor.resolve_neg()
    return tensor.clone() if tensor._is_zerotensor() else tensor


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _per_head(values_h: Tensor | None) -> Tensor | None:
    return None if values_h is None else values_h.detach().resolve_neg().float().contiguous()


def _broadcast(tensor: Tensor | None) -> tuple[int, ...] | None:
    """Address and strides of a 4-D tensor, stride 0 along axes of size 1."""
    if tensor is None:
        return None
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.data_ptr(), *(0 if size == 1 else stride for size, stride in strides)


def _held(kv: KeyValues, pages: Tensor | None) -> object:
    """Pages and scales by their addresses; `kv` and its contiguous `pages` must outlive it."""

    def scales(tensor: Tensor | None) -> tuple[int, ...] | None:
        return None if tensor is None else (tensor.data_ptr(), *tensor.stride())

    return _extension().Held(
        dtype=_dtype(kv.key.dtype),
        pages=None if pages is None else (pages.data_ptr(), pages.stride(0), kv.key.shape[2]),
        key_scale=scales(kv.key_scale),
        value_scale=scales(kv.value_scale),
    )


def _mask(parts: MaskParts, batch: int, heads: int) -> object:
    if parts.closed_form is not None:
        return _closed_mask(*parts.closed_form)
    return _extension().Mask(
        start=_number(parts.start, batch),
        first=_number(parts.first, batch),
        left=None if parts.left is None else _number(parts.left, heads),
        right=None if parts.right is None else _number(parts.right, heads),
        keep_first=_number(parts.keep_first, heads),
        prefix=_number(parts.prefix, batch),
        key_lengths=_address(parts.key_lengths),
        query_lengths=_address(parts.query_lengths),
        key_visible=_rows(parts.key_visible),
        query_ids=_rows(parts.query_ids),
        key_ids=_rows(parts.key_ids),
        query_positions=_rows(parts.query_positions),
        key_positions=_rows(parts.key_positions),
        ranges=_ranges(parts.ranges),
        dense=_broadcast(parts.dense),
    )


@lru_cache(maxsize=1024)
def _closed_mask(
    start: int, first: int, left: int | None, right: int | None, keep_first: int, prefix: int
) -> object:
    """A mask without tensors, which many calls share."""
    return _extension().Mask(
        start=(start, 0),
        first=(first, 0),
        left=None if left is None else (left, 0),
        right=None if right is None else (right, 0),
        keep_first=(keep_first, 0),
        prefix=(prefix, 0),
        key_lengths=0,
        query_lengths=0,
        key_visible=None,
        query_ids=None,
        key_ids=None,
        query_positions=None,
        key_positions=None,
        ranges=None,
        dense=None,
    )


def _number(value: int | Tensor, size: int) -> tuple[int, int]:
    """One integer, or the address of `size` of them."""
    if isinstance(value, Tensor):
        return (0, value.data_ptr()) if value.numel() == size else (int(value), 0)
    return value, 0


def _rows(tensor_bl: Tensor | None) -> tuple[int, int] | None:
    """Address and batch stride of an array [B|1, L]."""
    if tensor_bl is None:
        return None
    return tensor_bl.data_ptr(), 0 if tensor_bl.shape[0] == 1 else tensor_bl.shape[1]


def _ranges(ranges_bhqr2: Tensor | None) -> tuple[int, int, int, int] | None:
    """Address, ranges a row, and the strides of batch and head."""
    if ranges_bhqr2 is None:
        return None
    batch, heads, _, count, _ = ranges_bhqr2.shape
    strides = ranges_bhqr2.stride()
    return (
        ranges_bhqr2.data_ptr(),
        count,
        0 if batch == 1 else strides[0],
        0 if heads == 1 else strides[1],
    )
