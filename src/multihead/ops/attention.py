"""attention(), attention_with_stats(), explain(): describe the call, choose, run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from ..cost.attention import AttentionCost
from ..errors import ArgumentError, DtypeError
from ..masks import Mask
from . import dispatch, library
from .backends import native
from .dropout import Dropout
from .forms import form_of, goes_straight, known, remember
from .key_values import KeyValues
from .problem import (
    STATISTICS,
    ALiBi,
    Problem,
    autocast,
    checked_dropout,
    checked_scale,
    checked_softcap,
    checked_stats,
    describe,
)
from .split_key_values import SplitKeyValues, attend_to_parts, refuse_split
from .sweep import visible_keys
from .weights import attention_weights

T = TypeVar("T", Tensor, Any)


def attention(
    query: T,
    key: T | KeyValues,
    value: T | None = None,
    *,
    mask: Mask | Tensor | None = None,
    bias: Tensor | ALiBi | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
) -> T:
    """Exact softmax attention, O(N) memory.

    Args:
        query: [B, H, Lq, D], float32, bfloat16, float16 or float64, any strides.
        key: [B, Hkv, Lk, D] in query's dtype; Hkv divides H, and query head h reads KV head
            `h // (H / Hkv)`; or the KeyValues of a cache, in place of key and value.
        value: [B, Hkv, Lk, Dv].
        mask: a Mask, or a bool tensor [Lq, Lk] or [B, H, Lq, Lk] (True = may attend, axes of
            size 1 broadcast).
        bias: a float tensor of the same shapes that is added to the logits, in float32; -inf
            in it hides the key. Or `ALiBi(slopes)`.
        scale: of q.k; 1/sqrt(D) unless given. 0 and negative values mean what they say.
        softcap: c > 0 turns a scaled score s into `c * tanh(s / c)`.
        sinks: float tensor [H]; a logit beside each row's keys that has no value.
        dropout_p: the share of weights that are dropped, whenever it is above 0; what is kept is
            divided by 1 - p. The seed is drawn from torch's generator.
        backend: "auto", or one by name: "native", "chunked", "reference".

    Returns:
        [B, H, Lq, Dv] in query's dtype. NumPy arrays in, a NumPy array out.

    The order is: scale, softcap, bias, mask, softmax. A key that no rule lets in does not
    exist: NaN there reaches nothing. A query that sees nothing gives zeros and zero gradients.
    Softmax and sums are computed in float32 (float64 for float64).

    Gradients are O(N) memory too. Forward mode and torch.func's transforms are right, in O(Lq Lk)
    memory, and so are gradients of gradients: `create_graph` takes the definition for the first
    one, whichever backend is named.

    Raises:
        ArgumentError, DtypeError, DeviceError, MaskError: before any work.
        BackendError: no backend, or not the named one, can serve the call.

    Source: Vaswani et al. 2017, equation 1; softcap: Gemma 2; sinks: gpt-oss.
    """
    is_array = isinstance(query, np.ndarray)
    if is_array:
        query, key, value, mask, bias, sinks = _tensors(query, key, value, mask, bias, sinks)
    keys: Any = key
    values: Any = value
    kv = None
    if value is None:
        if isinstance(key, SplitKeyValues):
            options = {"scale": scale, "softcap": softcap, "dropout_p": dropout_p}
            return attend_to_parts(
                attention, query, key, mask=mask, bias=bias, sinks=sinks, backend=backend, **options
            )
        plain = checked_dropout(dropout_p) == 0
        keys, values, mask, bias, kv = _opened(query, key, mask, bias, sinks, backend, plain)
    out, _ = _attend(
        query, keys, values, (), mask, bias, scale, softcap, sinks, dropout_p, backend, None, kv
    )
    return cast(T, out.numpy() if is_array else out)


def attention_with_stats(
    query: T,
    key: T | KeyValues,
    value: T | None = None,
    *,
    stats: Sequence[str] = ("lse", "entropy", "max_logit"),
    bins: int | None = None,
    mask: Mask | Tensor | None = None,
    bias: Tensor | ALiBi | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
) -> AttentionResult:
    """`attention`, and statistics of every query row from the same pass.

    Takes attention's arguments, `bins`, and `stats`, any of:

    * `lse`: log of the softmax's denominator, natural, a sink included; -inf for an empty row
    * `entropy`: of the row's weights in nats, a sink being one outcome
    * `max_logit`: largest logit of a key; `max_qk`: largest `scale * q.k` before softcap and bias
    * `max_weight`: largest weight of a key; `argmax`: its column, the lowest on ties, -1 for none
    * `mean_distance`: mean `|p - j|` under the weights of the keys
    * `sink_mass`: share of the keys' weight on the row's first column (its first visible
      column under KeyPadding)
    * `participation`: 1 / sum of squared weights of the keys: how many keys share the weight

    lse, entropy and max_logit are differentiable, the others detached. Each is [B, H, Lq] in
    float32 (float64 for float64 inputs; argmax int64).

    With `bins`, `result.map` is the matrix of weights pooled to `bins` x `bins` cells, [B, H, bins,
    bins] in the dtype of the statistics: what `attention_map` with pool "mass" gives, from the same
    pass where the backend can, detached.

    Raises what `attention` raises, and ArgumentError for an unknown statistic or bins below 1.

    Source: Dao et al. 2022 for lse; Zhai et al. 2023 for entropy; Kimi K2 2025 for max_qk.
    """
    names: tuple[str, ...] = checked_stats(stats)
    is_array = isinstance(query, np.ndarray)
    if is_array:
        query, key, value, mask, bias, sinks = _tensors(query, key, value, mask, bias, sinks)
    keys: Any = key
    values: Any = value
    kv = None
    if value is None:
        refuse_split(key)
        plain = bins is None and checked_dropout(dropout_p) == 0
        keys, values, mask, bias, kv = _opened(query, key, mask, bias, sinks, backend, plain)
    query, keys, values = autocast(query, keys, values)
    kept = names if "lse" in names else ("lse", *names)
    out, computed = _attend(
        query, keys, values, kept, mask, bias, scale, softcap, sinks, dropout_p, backend, bins, kv
    )
    call: dict[str, Any] = {
        "query": query,
        "key": keys if kv is None else kv,
        "lse": computed["lse"],
        "mask": mask,
        "bias": bias,
        "scale": scale,
        "softcap": softcap,
    }
    wanted = {name: computed[name] for name in (names if bins is None else (*names, "map"))}
    return AttentionResult(
        out=out.numpy() if is_array else out,
        stats={name: x.numpy() if is_array else x for name, x in wanted.items()},
        _call=call,
    )


@dataclass(frozen=True, eq=False, repr=False)
class AttentionResult:
    """The output of a call, the statistics asked for, and the call itself.

    Each statistic is an attribute: `result.lse`, `result.entropy`. `weights` needs query and key
    as they were: the result keeps both alive, and does not notice where they are written to.
    """

    out: Any
    stats: Mapping[str, Any]
    _call: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        stats = self.__dict__.get("stats", {})
        if name in stats:
            return stats[name]
        if name == "map":
            raise AttributeError("No map was asked for: pass bins=64 to attention_with_stats.")
        if name in STATISTICS:
            raise AttributeError(
                f"{name!r} was not asked for; this result has {', '.join(stats) or 'none'}. "
                f"Pass stats=({name!r},) to attention_with_stats."
            )
        raise AttributeError(f"AttentionResult has no attribute {name!r}.")

    def __repr__(self) -> str:
        return f"AttentionResult(out={list(self.out.shape)}, stats={list(self.stats)})"

    def weights(self, rows: Any, columns: Any) -> Any:
        """The exact attention weights of rows x columns, [B, H, rows, columns].

        `rows` and `columns` are slices, sequences of ints or 1-D integer tensors. Computed from
        query, key and lse: O(rows x columns), whatever the context length.
        """
        weights = attention_weights(**_with_keys(self._call), rows=rows, columns=columns)
        return weights.numpy() if isinstance(self.out, np.ndarray) else weights


def explain(
    query: Tensor,
    key: Tensor | KeyValues,
    value: Tensor | None = None,
    *,
    stats: Sequence[str] = (),
    bins: int | None = None,
    mask: Mask | Tensor | None = None,
    bias: Tensor | ALiBi | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
) -> Explanation:
    """Which backend would serve this call and why the others would not; what the call costs.

    Takes the arguments of `attention` and `attention_with_stats`; computes no attention. Raises
    what they would raise for bad arguments, but not where a named backend can't serve.
    """
    if isinstance(query, np.ndarray):
        query, key, value, mask, bias, sinks = _tensors(query, key, value, mask, bias, sinks)
    keys: Any = key
    values: Any = value
    if value is None:
        refuse_split(key)
        keys, values, mask, bias, _ = _opened(query, key, mask, bias, sinks, backend)
    _check_alone(keys)
    if isinstance(query, Tensor) and query.device.type == "meta":
        raise ArgumentError("explain counts visible pairs; meta tensors have none to count.")
    problem = describe(
        query,
        keys,
        values,
        mask=mask,
        bias=bias,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        dropout_p=dropout_p,
        stats=stats,
        bins=bins,
    )
    if dropout_p > 0:  # no seed is drawn: the next call's must stay what it is
        problem = replace(problem, dropout=Dropout(float(dropout_p), torch.zeros(2).long()))
    order = dispatch.order(backend)
    reasons = {it.NAME: tuple(dispatch.reasons(it, problem)) for it in dispatch.BACKENDS}
    keys_bhq = visible_keys(problem)
    alike = problem.batch * problem.heads // max(1, math.prod(keys_bhq.shape[:2]))
    cost = AttentionCost.of_call(
        batch=problem.batch,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        query_length=problem.query_length,
        key_length=problem.key_length,
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        visible_pairs=int(keys_bhq.sum()) * alike,
        dtype=problem.query.dtype,
    )
    serves = next((it.NAME for it in order if not reasons[it.NAME]), None)
    return Explanation(backend=serves, reasons=reasons, cost=cost)


@dataclass(frozen=True)
class Explanation:
    """Which backend serves a call (None if none does), why others don't, and what it costs.

    `print` shows it as a table.
    """

    backend: str | None
    reasons: Mapping[str, tuple[str, ...]]
    cost: AttentionCost

    def __str__(self) -> str:
        lines = [f"served by: {self.backend or 'no backend'}"]
        for name, reasons in self.reasons.items():
            lines.append(f"  {name:<10} {' '.join(reasons) or 'can serve'}")
        cost = self.cost
        lines += [
            f"visible pairs     {cost.exponentials:,}",
            f"operations        {cost.flops:,}",
            f"bytes in and out  {cost.input_bytes + cost.output_bytes:,}",
            f"N x N not built   {cost.score_table_bytes:,} bytes",
        ]
        return "\n".join(lines)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    stats: tuple[str, ...],
    mask: Mask | Tensor | None,
    bias: Tensor | ALiBi | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout_p: float,
    backend: str,
    bins: int | None = None,
    kv: KeyValues | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Describe the call, choose, run; a call of a known form runs at once.

    With `kv`, which the native kernels read in place, key and value are its stand-ins.
    """
    form, dropout = None, checked_dropout(dropout_p)
    if bias is None and sinks is None and bins is None and dropout == 0:
        form = form_of(query, key, value, mask, stats, backend)
        parts = known(form)
        if parts is not None:
            scale, softcap = checked_scale(scale, query.shape[3]), checked_softcap(softcap)
            return native.launch(query, key, value, parts, scale, softcap, stats, kv=kv)
    _check_alone(key)
    problem = describe(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        dropout_p=dropout_p,
        stats=stats,
        bins=bins,
    )
    if dropout > 0:
        problem = replace(problem, dropout=Dropout.drawn(dropout, query.device))
        return _run(problem, backend)
    remember(form, problem)
    return _run(problem, backend) if kv is None else _run_in_place(problem, kv)


def _run_in_place(problem: Problem, kv: KeyValues) -> tuple[Tensor, dict[str, Tensor]]:
    """`_run` of a call whose key and value are stand-ins for `kv`, which the kernels read."""
    watching = dispatch.observer.get()
    seen = problem
    wanted: tuple[str, ...] = ()
    if watching is not None:
        key, value = kv.tensors(problem.query.dtype)
        seen = replace(problem, key=key, value=value)
        wanted = watching.wants(seen)
    names = checked_stats((*problem.stats, *wanted))
    out, stats = native.launch(
        problem.query,
        problem.key,
        problem.value,
        problem.parts,
        problem.scale,
        problem.softcap,
        names,
        problem.bias,
        problem.sinks,
        kv=kv,
    )
    if watching is not None and wanted:
        watching.record(replace(seen, stats=names), out, {name: stats[name] for name in wanted})
    return out, stats


def _run(problem: Problem, backend: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Run a described call, and show it to whoever watches."""
    # A compiled graph has no one to show its calls to.
    watching = None if torch.compiler.is_compiling() else dispatch.observer.get()
    wanted = watching.wants(problem) if watching is not None else ()
    if watching is None or not wanted:
        return library.run(problem, backend)
    both = replace(problem, stats=checked_stats((*problem.stats, *wanted)))
    out, stats = library.run(both, backend)
    seen = {name: statistic.detach() for name, statistic in stats.items() if name in wanted}
    watching.record(both, out.detach(), seen)
    return out, stats


def _check_alone(key: Any) -> None:
    if isinstance(key, KeyValues):
        raise ArgumentError("value was given beside KeyValues, which hold the values already.")


def _with_keys(call: Mapping[str, Any]) -> dict[str, Any]:
    """The call of a result, its keys written out where the kernels read them in place."""
    key = call["key"]
    if isinstance(key, KeyValues):
        key, _ = key.tensors(call["query"].dtype)
    return {**call, "key": key}


def _opened(
    query: Any, key: Any, mask: Any, bias: Any, sinks: Any, backend: str, in_place: bool = True
) -> tuple[Any, Any, Any, Any, KeyValues | None]:
    """key, value, mask and bias of a cache's KeyValues, which came for a key.

    The last are those KeyValues where the kernels read them in place, if they may, key and value
    being stand-ins for them.
    """
    if not isinstance(key, KeyValues):
        raise ArgumentError(
            "value is missing: pass query, key and value, or query and a cache's KeyValues."
        )
    mask, bias = key.rule(mask), key.bias(bias)
    if key.are_tensors:
        return key.key, key.value, mask, bias, None
    if not isinstance(query, Tensor):
        raise DtypeError(f"query must be a tensor [B, H, L, D]; got {type(query).__name__}.")
    recorded = torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in (bias, getattr(bias, "slopes", 0), sinks)
    )
    straight = goes_straight(query, key.key, key.value, backend) and not recorded
    if in_place and straight and native.reads_in_place(query, key):
        return *key.stand_ins(query.dtype), mask, bias, key
    return *key.tensors(query.dtype), mask, bias, None


def _tensors(*arrays: Any) -> tuple[Any, ...]:
    """NumPy arrays as tensors, which share their memory where torch can; others as they are."""

    def tensor(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        usable = x.flags.writeable and all(stride >= 0 for stride in x.strides)
        return torch.from_numpy(x if usable else x.copy())

    return tuple(map(tensor, arrays))
