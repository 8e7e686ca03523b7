"""From transformers' mask functions to masks: the rules, never an Lq x Lk tensor of them.

transformers describes a mask by a function of (batch, head, query position, key position), built
from a few known ones by closures and `and_masks`. The known ones become rules; any other function
is evaluated in full, so that none is ever ignored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ModelError
from ..masks import Causal, Dense, Documents, KeyPadding, Mask, QueryStart, Window
from .extras import import_extra

MaskFunction = Callable[..., Any]

_hf = import_extra("transformers.masking_utils")


def _code(function: MaskFunction) -> Any:
    """What all closures of one origin share."""
    return getattr(function, "__code__", None)


_NOTHING = torch.zeros(1, 1, dtype=torch.long)
_WINDOW = _code(_hf.sliding_window_overlay(1))
_TWO_SIDED_WINDOW = _code(_hf.sliding_window_bidirectional_overlay(1))
_BOTH = _code(_hf.and_masks(_hf.causal_mask_function))
_PACKED = _code(_hf.packed_sequence_mask_function(_NOTHING))
_REMAPPED = (  # transformers 5.4 leaves packed positions as they are
    _code(_hf.remap_positions_for_packed_sequence(_hf.causal_mask_function, _NOTHING))
    if hasattr(_hf, "remap_positions_for_packed_sequence")
    else object()
)


@dataclass(frozen=True, eq=False)
class PreparedMask:
    """A mask on its way through a transformers model, from the mask to the attention function.

    Models look at the shape of what they carry: four dimensions mean that it is ready for use.
    """

    mask: Mask
    shape: tuple[int, int, int, int]

    @property
    def ndim(self) -> int:
        """The number of dimensions, which tells transformers that this is not a padding mask."""
        return len(self.shape)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_UNREADABLE.format(f"{name!r}"))

    def __getitem__(self, index: Any) -> Any:
        raise ModelError(_UNREADABLE.format("a part"))


_UNREADABLE = (
    "This model reads {} of its attention mask, which multihead keeps as a rule and not as a "
    "tensor. Set the model to 'sdpa' and use multihead.replace_sdpa(model); or to 'eager', if it "
    "has no 'sdpa'."
)


def mask_forward(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: MaskFunction = _hf.causal_mask_function,
    attention_mask: Tensor | PreparedMask | None = None,
    *,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> PreparedMask:
    """The mask function that transformers calls; its arguments are those of `sdpa_mask`.

    `attention_mask` is the padding mask [B, tokens so far], True = a real token, or an earlier
    result of this function, which is final. Row i stands at position `q_offset + i`, column j at
    `kv_offset + j`.
    """
    if isinstance(attention_mask, PreparedMask):
        return attention_mask
    start = _whole(q_offset, batch_size) - _whole(kv_offset, batch_size)
    rules: list[Mask] = [QueryStart(start)]
    if torch.compiler.is_dynamo_compiling():
        recognized = _recognize_in_a_graph(mask_function, batch_size, q_length, device)
    else:
        recognized = _recognize(mask_function)
    if recognized is None:
        visible = _hf.sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        rules.append(Dense(visible))
    else:
        rules.extend(recognized)
    if attention_mask is not None:
        padding = _padding(attention_mask, kv_length, kv_offset)
        if padding is not None:
            rules.append(KeyPadding(padding))
    mask = functools.reduce(Mask.__and__, rules)
    return PreparedMask(mask, (batch_size, 1, q_length, kv_length))


def _recognize(function: MaskFunction) -> tuple[Mask, ...] | None:
    """The rules whose intersection `function` is; None if it holds something unknown."""
    if function is _hf.causal_mask_function:
        return (Causal(),)
    if function is _hf.bidirectional_mask_function:
        return ()
    code, inside = _code(function), _closure(function)
    # Qwen2-MoE prepares a window of 0, which no layer reads, where its config has no windows.
    if code is _WINDOW and inside["sliding_window"] > 0:
        return (Window(inside["sliding_window"] - 1, None),)
    if code is _TWO_SIDED_WINDOW:
        return (Window(inside["sliding_window"], inside["sliding_window"]),)
    if code is _PACKED:
        return (Documents(inside["packed_sequence_mask"]),)
    if code is _BOTH:
        return _recognize_all(inside["mask_functions"])
    return None


def _recognize_all(functions: tuple[MaskFunction, ...]) -> tuple[Mask, ...] | None:
    documents = [
        _closure(function)["packed_sequence_mask"]
        for function in functions
        if _code(function) is _PACKED
    ]
    rules: list[Mask] = []
    for function in functions:
        if _code(function) is _REMAPPED:
            recognized = _recognize_remapped(_closure(function), documents)
        else:
            recognized = _recognize(function)
        if recognized is None:
            return None
        rules.extend(recognized)
    return tuple(rules)


def _recognize_remapped(
    inside: Mapping[str, Any], documents: list[Tensor]
) -> tuple[Mask, ...] | None:
    """A function of restarting positions, as one of columns.

    Within a document the two differ by a constant, so rules on their difference read the same; the
    documents themselves must be among the functions joined to this one.
    """
    if torch.compiler.is_compiling():
        return None  # no graph may depend on what tensors hold
    positions = inside["position_ids"]
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    restarts = (steps != 1).cumsum(-1)
    if not any(torch.equal(restarts, ids) for ids in documents):
        return None
    rules = _recognize(inside["mask_function"])
    if rules is None or not all(isinstance(rule, Causal | Window) for rule in rules):
        return None
    return rules


# --- in a graph of torch.compile, which shows no closure to the code that it records --------------

_Bounds = tuple[tuple[int | None, int | None], ...]
_Noted = tuple[_Bounds, bool] | None
_noted: list[_Noted] = []


def _recognize_in_a_graph(
    function: MaskFunction, batch_size: int, length: int, device: torch.device | str
) -> tuple[Mask, ...] | None:
    """As `_recognize`; of functions that hold tensors it knows packed sequences alone.

    What the function is made of is asked of the compiler. The documents of packed sequences are
    then read off the function itself, at each token and the one before it: a tensor in a closure
    cannot be handed out.
    """
    from torch._dynamo.comptime import comptime

    comptime(_note)
    noted = _last_noted()
    if noted is None:
        return None
    bounds, is_packed = noted
    rules: tuple[Mask, ...] = tuple([Window(*pair) for pair in bounds])
    if not is_packed:
        return rules
    rows, tokens = torch.arange(batch_size, device=device), torch.arange(length, device=device)
    continues = function(rows[:, None], 0, tokens[None], (tokens - 1).clamp(min=0)[None])
    return *rules, Documents((~continues).cumsum(-1))


def _note(context: Any) -> None:
    """Run by the compiler where `_recognize_in_a_graph` has come to."""
    variable = context.get_local("function")
    try:
        try:
            rules, is_packed = _recognize(variable.as_python_constant()), False
        except Exception:  # of a kind of the compiler's own: a closure holds tensors
            inside = variable._i_will_not_complain_if_bc_breaks_VariableTracker()
            rules, is_packed = _recognize(_rule_of_packed(inside)), True
    except Exception:  # another function; or a compiler that is built in another way
        rules = None
    _noted.append(None if rules is None else (tuple(map(_bounds, rules)), is_packed))


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _last_noted() -> _Noted:
    return _noted.pop()


def _bounds(rule: Mask) -> tuple[int | None, int | None]:
    if isinstance(rule, Causal):
        return None, 0
    assert isinstance(rule, Window)  # all other rules hold tensors
    return rule.left, rule.right  # type: ignore[return-value]


def _rule_of_packed(variable: Any) -> MaskFunction:
    """The function of positions that packed sequences are joined to.

    Raises where `variable`, the compiler's own of a function, is not made of these two, the
    documents being counted from the same positions.
    """
    parts = {part.get_code(): part for part in _cells(variable)["mask_functions"].items}
    remapped, packed = _cells(parts.pop(_REMAPPED)), _cells(parts.pop(_PACKED))
    ids, positions = (
        held.as_proxy().node for held in (packed["packed_sequence_mask"], remapped["position_ids"])
    )
    if parts or variable.get_code() is not _BOTH or not _counts_restarts(ids, positions):
        raise ValueError("not what transformers builds of packed sequences")
    rule: MaskFunction = remapped["mask_function"].as_python_constant()
    return rule


def _cells(variable: Any) -> dict[str, Any]:
    """`_closure`, of the compiler's own variable of a function."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    effects = InstructionTranslator.current_tx().output.side_effects
    names = variable.get_code().co_freevars
    return {
        name: effects.load_cell(cell)
        for name, cell in zip(names, variable.closure.items, strict=True)
    }


def _counts_restarts(ids: Any, positions: Any) -> bool:
    """Whether a graph computes `ids` as transformers does: `(diff(positions) != 1).cumsum()`."""
    differ = ids.args[0]
    steps = differ.args[0]
    names = [getattr(node.target, "__name__", node.target) for node in (ids, differ, steps)]
    return names == ["cumsum", "ne", "diff"] and _unexpanded(steps.args[0]) is _unexpanded(
        positions
    )


def _unexpanded(node: Any) -> Any:
    return node.args[0] if node.target == "expand" else node


def _closure(function: MaskFunction) -> dict[str, Any]:
    cells = getattr(function, "__closure__", None) or ()
    names = getattr(_code(function), "co_freevars", ())
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _padding(padding: Tensor, kv_length: int, kv_offset: int | Tensor) -> Tensor | None:
    """The padding mask of this call's columns, [B, kv_length]; None if it hides none of them.

    Columns that no token has reached yet, in a cache of fixed size, count as padding.
    """
    columns = torch.arange(kv_length, device=padding.device) + kv_offset
    reached = columns < padding.shape[-1]
    visible = padding.bool()[:, columns.clamp(max=padding.shape[-1] - 1)] & reached
    if visible.device.type == "cpu" and not torch.compiler.is_compiling() and visible.all():
        return None
    return visible


def _whole(offset: int | Tensor, batch: int) -> int | Tensor:
    """An offset as an int; per sample where reading it would wait or break a graph."""
    if not isinstance(offset, Tensor):
        return offset
    if offset.device.type == "cpu" and not torch.compiler.is_compiling():
        return int(offset)
    return offset.reshape(-1)[:1].expand(batch)
