"""The layers of attention in a model, ours or transformers', and where their heads lie.

Transformers' modules are known by what they are made of, so nothing of transformers is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import nn

from ..errors import ArgumentError, DtypeError, ModelError
from ..nn import LatentAttention, MultiHeadAttention, Pruned

Family = Literal["multihead", "latent", "llama", "gpt2", "bert", "bart"]
"""How a layer's projections are laid out; "llama" and the others are transformers' modules."""

Head = tuple[int, int]
"""A head's address: the number of its layer and its number in the layer, both from 0."""

PRUNED = "multihead_pruned"
"""The attribute of a transformers module that keeps its `Pruned`."""

_SUPPORTED = (
    "Supported are multihead's own layers and transformers' Llama-, GPT-2-, BERT- and BART-like "
    "models"
)


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """One layer of attention of a model.

    Attributes:
        index: its place among the model's layers of attention, self- and cross-, from 0.
        name: the module's name in the model.
        module: what computes attention.
        out_proj: what reads the outputs of all heads side by side, [..., heads * value_dim].
        value_dim: width of a head's output.
        pruned: the layer's heads before any were taken out, and which are gone.
        family: how its projections are laid out.
    """

    index: int
    name: str
    module: nn.Module
    out_proj: nn.Module
    value_dim: int
    pruned: Pruned
    family: Family

    @property
    def heads(self) -> tuple[int, ...]:
        """The query heads that are there, by the numbers that they had before any were pruned."""
        return self.pruned.kept

    def columns(self, head: int) -> slice:
        """Where a head's output stands in what `out_proj` reads."""
        start = self.heads.index(head) * self.value_dim
        return slice(start, start + self.value_dim)


def attention_layers(model: nn.Module) -> tuple[AttentionLayer, ...]:
    """The layers of attention of a model, in the order in which it has them.

    Raises:
        ModelError: a model without any, or with one whose heads cannot be told apart.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    found: list[AttentionLayer] = []
    inside = ""  # the name of the last module that is described, and a dot
    for name, module in model.named_modules():
        if inside and f"{name}.".startswith(inside):
            continue
        layer = _described(len(found), name, module)
        if layer is not None:
            found.append(layer)
            inside = f"{name}." if name else ""
            if not name:
                break
        elif _attends(module):
            raise ModelError(_unknown(name, module))
    if not found:
        raise ModelError(f"{type(model).__name__} has no layer of attention. {_SUPPORTED}.")
    return tuple(found)


def by_layer(layers: tuple[AttentionLayer, ...], heads: Iterable[Head]) -> dict[int, list[int]]:
    """Addresses of heads, sorted by layer.

    Raises:
        DtypeError: what is no pair of integers.
        ArgumentError: a layer or a head that there is not.
    """
    found: dict[int, set[int]] = {}
    for address in _pairs(heads):
        index, head = address
        if not 0 <= index < len(layers):
            raise ArgumentError(
                f"there is no layer {index}; the model's layers of attention are numbered 0 to "
                f"{len(layers) - 1}."
            )
        if head not in layers[index].heads:
            raise ArgumentError(_no_such_head(layers[index], head))
        found.setdefault(index, set()).add(head)
    return {index: sorted(found[index]) for index in sorted(found)}


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is GPT-2's Conv1D, packed or not: a linear layer whose weight is [in, out]."""
    return any(base.__name__ == "Conv1D" for base in type(module).__mro__)


def _pairs(heads: Iterable[Head]) -> list[Head]:
    wrong = DtypeError(
        f"heads must be pairs (layer, head) of integers, such as {{(3, 1), (3, 8)}}; got {heads!r}."
    )
    try:
        found = [tuple(address) for address in heads]
    except TypeError:
        raise wrong from None
    for address in found:
        if len(address) != 2 or not all(map(_is_integer, address)):
            raise wrong
    return [(int(layer), int(head)) for layer, head in found]


def _is_integer(number: object) -> bool:
    """Python's or numpy's, as argsort and argwhere give them."""
    return isinstance(number, int | np.integer) and not isinstance(number, bool)


def _no_such_head(layer: AttentionLayer, head: int) -> str:
    gone = " It was pruned." if head in layer.pruned.heads else ""
    heads = ", ".join(map(str, layer.heads)) or "none"
    return f"layer {layer.index} has no head {head}; its heads are {heads}.{gone}"


def _described(index: int, name: str, module: nn.Module) -> AttentionLayer | None:
    if isinstance(module, MultiHeadAttention):
        pruned = module.pruned or Pruned(module.num_heads, module.num_kv_heads)
        return AttentionLayer(
            index, name, module, module.out_proj, module.value_dim, pruned, "multihead"
        )
    if isinstance(module, LatentAttention):
        pruned = Pruned(module.num_heads, module.num_heads)
        return AttentionLayer(
            index, name, module, module.out_proj, module.value_dim, pruned, "latent"
        )
    parts = dict(module.named_children())
    for describe in (_llama, _gpt2, _bert, _bart, _deepseek):
        found = describe(index, name, module, parts)
        if found is not None:
            return found
    return None


def _llama(index: int, name: str, module: Any, parts: Mapping[str, Any]) -> AttentionLayer | None:
    if not parts.keys() >= {"q_proj", "k_proj", "v_proj", "o_proj"}:
        return None
    return _separate(index, name, module, parts["o_proj"], parts, "llama")


def _bart(index: int, name: str, module: Any, parts: Mapping[str, Any]) -> AttentionLayer | None:
    if not parts.keys() >= {"q_proj", "k_proj", "v_proj", "out_proj"}:
        return None
    return _separate(index, name, module, parts["out_proj"], parts, "bart")


def _separate(
    index: int, name: str, module: Any, out: Any, parts: Mapping[str, Any], family: Family
) -> AttentionLayer | None:
    width = getattr(module, "head_dim", None)
    sizes = [getattr(parts[key], "out_features", None) for key in ("q_proj", "k_proj", "v_proj")]
    inputs = getattr(out, "in_features", None)
    # A q_proj of another width than out's input holds more than queries, a gate for example.
    if not width or None in sizes or sizes[0] != inputs or sizes[1] != sizes[2]:
        return None
    pruned = getattr(module, PRUNED, None)
    if pruned is None:
        heads, kv_heads = inputs // width, sizes[1] // width
        if heads * width != inputs or not kv_heads or heads % kv_heads:
            return None
        pruned = Pruned(heads, kv_heads)
    return AttentionLayer(index, name, module, out, width, pruned, family)


def _gpt2(index: int, name: str, module: Any, parts: Mapping[str, Any]) -> AttentionLayer | None:
    if not parts.keys() >= {"c_attn", "c_proj"} or not hasattr(module, "split_size"):
        return None
    if not is_conv1d(parts["c_attn"]) or not is_conv1d(parts["c_proj"]):
        return None  # GPTBigCode's are linear layers, its keys and values of one head
    pruned = getattr(module, PRUNED, None) or Pruned(module.num_heads, module.num_heads)
    return AttentionLayer(index, name, module, parts["c_proj"], module.head_dim, pruned, "gpt2")


def _bert(index: int, name: str, module: Any, parts: Mapping[str, Any]) -> AttentionLayer | None:
    inner: Any = parts.get("self")
    output = parts.get("output")
    dense = getattr(output, "dense", None)
    if dense is None or not all(hasattr(inner, key) for key in ("query", "key", "value")):
        return None
    heads, width = inner.num_attention_heads, inner.attention_head_size
    pruned = getattr(inner, PRUNED, None) or Pruned(heads, heads)
    return AttentionLayer(index, f"{name}.self", inner, dense, width, pruned, "bert")


def _deepseek(
    index: int, name: str, module: Any, parts: Mapping[str, Any]
) -> AttentionLayer | None:
    if not parts.keys() >= {"kv_b_proj", "o_proj"} or not hasattr(module, "v_head_dim"):
        return None
    pruned = Pruned(module.num_heads, module.num_heads)
    return AttentionLayer(index, name, module, parts["o_proj"], module.v_head_dim, pruned, "latent")


def _attends(module: nn.Module) -> bool:
    """Whether a module is attention of some kind: by its name, with no known one inside."""
    if "Attention" not in type(module).__name__ or not any(True for _ in module.parameters()):
        return False
    return all(_described(0, name, part) is None for name, part in module.named_modules() if name)


def _unknown(name: str, module: nn.Module) -> str:
    remedy = (
        " multihead.MultiHeadAttention.from_torch takes over its weights."
        if isinstance(module, nn.MultiheadAttention)
        else ""
    )
    return (
        f"the heads of {name or 'the model'}, a {type(module).__name__}, cannot be told apart. "
        f"{_SUPPORTED}.{remedy}"
    )
