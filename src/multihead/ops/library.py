"""The operators registered with torch.library, and the one autograd.Function around them.

`multihead::attend` and `multihead::attend_backward` exist for torch.compile, torch.export and
fake tensors; an eager call goes straight to a backend. Derivatives are not registered with the
operator, since `torch.func` would silently get zeros from it (pytorch#168393), but live in an
autograd.Function. Second derivatives, batched gradients, forward mode and `torch.func` go through
the definition, also where they are compiled. Gradients of a compiled function are torch.compile's:
first ones alone. It refuses second ones, but for its backend for debugging, "eager", which leaves
out of them what any autograd.Function has.

A call travels as flat arguments, in the order of `_SCHEMA`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import BackendError
from ..masks import MaskParts
from . import dispatch
from .backends import chunked, reference
from .dropout import Dropout
from .problem import DIFFERENTIABLE, STATISTICS, ALiBi, Problem
from .scores import full_precision
from .tracing import PLAIN, intercepted
from .weights import pooled_map

_SCHEMA = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? slopes, Tensor? sinks, "
    "SymInt start, Tensor? starts, Tensor? first, SymInt? left, Tensor? lefts, "
    "SymInt? right, Tensor? rights, SymInt keep_first, SymInt prefix, Tensor? prefixes, "
    "Tensor? key_lengths, Tensor? query_lengths, Tensor? key_visible, "
    "Tensor? query_ids, Tensor? key_ids, Tensor? query_positions, Tensor? key_positions, "
    "Tensor? ranges, Tensor? dense, float scale, float? softcap, str[] stats, "
    "SymInt? bins, float dropout_p, Tensor? dropout_seed, str backend"
)
_NAMES = ("out", *STATISTICS, "map")
_RESULTS = ", ".join(f"Tensor {name}" for name in _NAMES)
_GRADIENTS = ", ".join(f"Tensor grad_{n}" for n in ("query", "key", "value", "bias", "slopes"))

_library = torch.library.Library("multihead", "DEF")
_library.define(f"attend({_SCHEMA}) -> ({_RESULTS})")
_library.define(
    "attend_backward(Tensor? grad_out, Tensor? grad_lse, Tensor? grad_entropy, "
    f"Tensor? grad_max_logit, {_SCHEMA}) "
    f"-> ({_GRADIENTS}, Tensor grad_sinks)"
)


def run(problem: Problem, backend: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and statistics of a described call, recorded for autograd where it asks for it."""
    if torch._C._get_tracing_state() is not None:
        raise BackendError("torch.jit.trace can't record attention; torch.export and compile can.")
    if backend == reference.NAME or dispatch.transformed():
        return _computed(problem, backend)
    through_operator = _needs_operator(problem.differentiated)
    if problem.needs_grad:
        arguments = _flatten(problem, backend)
        results = _Attend.apply(  # type: ignore[no-untyped-call]
            *(_distinct(arguments) if through_operator else arguments)
        )
    elif through_operator:
        results = torch.ops.multihead.attend(*_flatten(problem, backend))
    else:
        return _computed(problem, backend)
    named = dict(zip(_NAMES, results, strict=True))
    return named["out"], {name: named[name] for name in _wanted(problem)}


def _computed(problem: Problem, backend: str) -> tuple[Tensor, dict[str, Tensor]]:
    with full_precision(problem.query.device):
        out, stats = dispatch.choose(problem, backend).forward(problem)
    if problem.bins is not None and "map" not in stats:
        stats["map"] = pooled_map(problem, stats["lse"], problem.bins)
    return out, stats


def _wanted(problem: Problem) -> tuple[str, ...]:
    return problem.stats if problem.bins is None else (*problem.stats, "map")


def _needs_operator(tensors: Sequence[Tensor | None]) -> bool:
    """Whether pointers must not be taken: of intercepted calls, meta tensors and subclasses."""
    return intercepted() or any(
        tensor is not None and (tensor.is_meta or type(tensor) not in PLAIN) for tensor in tensors
    )


def _distinct(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, a tensor that comes twice as a view of itself the second time.

    torch.compile refuses an autograd.Function that is given one tensor twice.
    """
    seen: list[Any] = []
    for argument in arguments:
        twice = isinstance(argument, Tensor) and any(argument is other for other in seen)
        seen.append(argument.view_as(argument) if twice else argument)
    return tuple(seen)


def _flatten(problem: Problem, backend: str) -> tuple[Any, ...]:
    parts, dropout = problem.parts, problem.dropout

    def split(value: int | Tensor | None) -> tuple[Any, Tensor | None]:
        if isinstance(value, Tensor):
            return 0, value
        return value, None

    query, key, value, bias, slopes, sinks = problem.differentiated
    return (
        query, key, value, bias, slopes, sinks,
        *split(parts.start),
        parts.first if isinstance(parts.first, Tensor) else None,
        *split(parts.left),
        *split(parts.right),
        parts.keep_first,
        *split(parts.prefix),
        parts.key_lengths, parts.query_lengths, parts.key_visible,
        parts.query_ids, parts.key_ids, parts.query_positions, parts.key_positions,
        parts.ranges, parts.dense,
        problem.scale, problem.softcap, list(problem.stats), problem.bins,
        *((0.0, None) if dropout is None else (dropout.p, dropout.seed)), backend,
    )  # fmt: skip


def _unflatten(arguments: Sequence[Any]) -> tuple[Problem, str]:
    (
        query, key, value, bias, slopes, sinks,
        start, starts, first, left, lefts, right, rights, keep_first, prefix, prefixes,
        key_lengths, query_lengths, key_visible, query_ids, key_ids,
        query_positions, key_positions, ranges, dense, scale, softcap, stats, bins,
        dropout_p, dropout_seed, backend,
    ) = arguments  # fmt: skip
    parts = MaskParts(
        query_length=query.shape[2],
        key_length=key.shape[2],
        device=query.device,
        start=start if starts is None else starts,
        first=0 if first is None else first,
        left=left if lefts is None else lefts,
        right=right if rights is None else rights,
        keep_first=keep_first,
        prefix=prefix if prefixes is None else prefixes,
        key_lengths=key_lengths,
        query_lengths=query_lengths,
        key_visible=key_visible,
        query_ids=query_ids,
        key_ids=key_ids,
        query_positions=query_positions,
        key_positions=key_positions,
        ranges=ranges,
        dense=dense,
    )
    problem = Problem(
        query=query,
        key=key,
        parts=parts,
        bias=bias if slopes is None else ALiBi(slopes),
        scale=scale,
        softcap=softcap,
        value=value,
        sinks=sinks,
        stats=tuple(stats),
        bins=bins,
        dropout=None if dropout_seed is None else Dropout(dropout_p, dropout_seed),
    )
    return problem, backend


def _attend(*arguments: Any) -> tuple[Tensor, ...]:
    problem, backend = _unflatten(arguments)
    out, stats = _computed(problem, backend)
    return out, *(
        stats[name] if name in stats else _absent(out, _dtype(problem, name)) for name in _NAMES[1:]
    )


def _attend_fake(*arguments: Any) -> tuple[Tensor, ...]:
    problem, _ = _unflatten(arguments)
    query, bins = problem.query, problem.bins
    shape_bhq = query.shape[:3]
    shapes = dict.fromkeys(problem.stats, shape_bhq)
    if bins is not None:
        lengths = problem.query_length, problem.key_length
        shapes["map"] = torch.Size((*shape_bhq[:2], *(torch.sym_min(bins, it) for it in lengths)))
    return (
        query.new_empty((*shape_bhq, problem.value_dim)),
        *(
            query.new_empty(shapes.get(name, (0,)), dtype=_dtype(problem, name))
            for name in _NAMES[1:]
        ),
    )


def _attend_backward(*arguments: Any) -> tuple[Tensor, ...]:
    grad_out, *given = arguments[:4]
    problem, _ = _unflatten(arguments[4:])
    query = problem.query
    if grad_out is None:
        grad_out = query.new_zeros((*query.shape[:3], problem.value_dim))
    asked = [
        grad if name in problem.stats else None
        for name, grad in zip(DIFFERENTIABLE, given, strict=True)
    ]
    with full_precision(query.device):
        grads = chunked.backward(problem, chunked.Cotangents(grad_out, *asked))
    return tuple(_absent(query) if grad is None else grad for grad in grads)


def _attend_backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    problem, _ = _unflatten(arguments[4:])
    return tuple(
        problem.query.new_empty(0)
        if tensor is None
        else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for tensor in problem.differentiated
    )


def _absent(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A result of size 0. It has memory of its own: null pointers would count as aliases."""
    return like.new_empty(1, dtype=dtype)[:0]


def _dtype(problem: Problem, name: str) -> torch.dtype:
    return torch.int64 if name == "argmax" else problem.compute_dtype


for _name, _implementation, _fake in (
    ("attend", _attend, _attend_fake),
    ("attend_backward", _attend_backward, _attend_backward_fake),
):
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"multihead::{_name}", _fake, lib=_library)
del _name, _implementation, _fake


class _Attend(torch.autograd.Function):
    """`multihead::attend` with its first derivative; arguments as in `_SCHEMA`."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        if _needs_operator(arguments[:6]):
            return tuple(torch.ops.multihead.attend(*arguments))
        return _attend(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        named = dict(zip(_NAMES, output, strict=True))
        ctx.mark_non_differentiable(
            *(x for n, x in named.items() if n != "out" and n not in DIFFERENTIABLE)
        )
        ctx.set_materialize_grads(False)
        ctx.is_tensor = [isinstance(x, Tensor) for x in inputs]
        ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
        ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        remaining = iter(ctx.saved_tensors)
        arguments = [
            next(remaining) if is_tensor else other
            for is_tensor, other in zip(ctx.is_tensor, ctx.others, strict=True)
        ]
        named = dict(zip(_NAMES, grads, strict=True))
        if not torch.compiler.is_compiling() and (
            torch.is_grad_enabled() or dispatch.transformed() or _batched(grads)
        ):
            return (*_recorded_backward(named, arguments), *(None for _ in arguments[6:]))
        given = [named[name] for name in ("out", *DIFFERENTIABLE)]
        through_operator = _needs_operator(arguments[:6])
        call = torch.ops.multihead.attend_backward if through_operator else _attend_backward
        results = call(*given, *arguments)
        per_input = [
            result if tensor is not None else None
            for result, tensor in zip(results, arguments[:6], strict=True)
        ]
        return (*per_input, *(None for _ in arguments[6:]))


def _batched(grads: Sequence[Tensor | None]) -> bool:
    """Whether these are many gradients at once, as `is_grads_batched` makes them."""
    is_batched = torch._C._functorch.is_legacy_batchedtensor
    return any(grad is not None and is_batched(grad) for grad in grads)


def _recorded_backward(
    grads: Mapping[str, Tensor | None], arguments: Sequence[Any]
) -> list[Tensor | None]:
    """The first derivative by operations that autograd records for a second one, and that batches
    of gradients go through: those of the definition, O(Lq Lk) memory.

    On views of the inputs: an input that is made of another one, or that comes twice, must not be
    charged with the other's share.
    """
    recorded = torch.is_grad_enabled()
    with torch.enable_grad(), full_precision(arguments[0].device):
        inputs = [None if tensor is None else tensor.view_as(tensor) for tensor in arguments[:6]]
        problem, _ = _unflatten([*inputs, *arguments[6:]])
        out, stats = reference.forward(problem)
        results = {"out": out, **stats}
        given = {name: grad for name, grad in grads.items() if grad is not None}
        wanted = [it for it in inputs if it is not None and it.requires_grad]
        found = iter(
            torch.autograd.grad(
                [results[name] for name in given],
                wanted,
                list(given.values()),
                create_graph=recorded,
                allow_unused=True,
            )
        )
    return [next(found) if it is not None and it.requires_grad else None for it in inputs]
