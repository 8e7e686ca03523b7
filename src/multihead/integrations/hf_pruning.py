"""Heads taken out of transformers models for good, saved and loaded again.

Which heads are gone stands in the model's config, `multihead_pruned_heads`, so that
`model.save_pretrained(folder)` writes all that `load_pruned(folder)` needs. The config's own sizes
stay those of the whole model: transformers' `from_pretrained` refuses such a folder, whose tensors
are smaller, rather than reading something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..models import EncoderConfig
from ..models.checkpoints import read_config
from ..models.checkpoints.pruned import FIELD, numbers
from ..nn.prune import (
    Pruned,
    check_plain,
    keep_inputs,
    keep_outputs,
    lanes,
    places,
    selected,
    window_of_heads,
)
from .attention_layers import PRUNED, AttentionLayer, attention_layers, is_conv1d
from .checkpoints import CONFIG, read_json
from .extras import import_extra
from .hf_windows import head_window, set_head_window

_COUNTS = {  # what families call the numbers of their heads
    "query": ("num_heads", "num_attention_heads"),
    "kv": ("num_key_value_heads",),
}


def check_prunable(layer: AttentionLayer) -> None:
    """Raise ModelError or DtypeError for a transformers layer whose heads cannot be taken out."""
    module: Any = layer.module
    kind = type(module).__name__
    if layer.family not in ("llama", "gpt2", "bert"):
        raise ModelError(
            f"heads of {layer.name}, a {kind}, cannot be pruned, only ablated. Supported are "
            "multihead's MultiHeadAttention and transformers' Llama-, GPT-2- and BERT-like models."
        )
    if getattr(module, "is_cross_attention", False):
        raise ModelError(
            f"heads of {layer.name}, a cross-attention, cannot be pruned, only ablated."
        )
    for projection in _projections(layer):
        if not (is_conv1d(projection) and type(projection.weight) is nn.Parameter):
            check_plain(projection)
    _check_parts(layer)


def prune_layer(layer: AttentionLayer, after: Pruned) -> None:
    """Leave the layer the heads of `after`, in place; `check_prunable` has passed."""
    module: Any = layer.module
    before, width = layer.pruned, layer.value_dim
    query = places(before.kept, after.kept)
    kv = places(before.kept_kv, after.kept_kv)
    query_lanes, kv_lanes = lanes(query, width), lanes(kv, width)
    if layer.family == "gpt2":
        old = len(before.kept) * width
        packed = torch.cat((query_lanes, query_lanes + old, query_lanes + 2 * old))
        _keep_conv_outputs(module.c_attn, packed)
        _keep_conv_inputs(module.c_proj, query_lanes)
        module.split_size = len(query_lanes)
    else:
        for projection, rows in zip(
            _projections(layer), (query_lanes, kv_lanes, kv_lanes), strict=False
        ):
            keep_outputs(projection, rows)
        keep_inputs(_projections(layer)[-1], query_lanes)
    if isinstance(getattr(module, "sinks", None), nn.Parameter):
        module.sinks = selected(module.sinks, torch.tensor(query, dtype=torch.long), 0)
    set_head_window(module, window_of_heads(head_window(module), query))
    counts = {"query": len(query), "kv": len(kv)}
    for which, names in _COUNTS.items():
        for name in names:
            if hasattr(module, name):
                setattr(module, name, counts[which])
    if hasattr(module, "num_key_value_groups"):
        module.num_key_value_groups = len(query) // max(len(kv), 1)
    if hasattr(module, "all_head_size"):
        module.all_head_size = len(query_lanes)
    setattr(module, PRUNED, after)
    if not query:
        module.__class__ = _headless(type(module), layer.family)


def record(model: nn.Module) -> None:
    """Write into the config of each transformers model in `model` which heads its layers lost."""
    seen: set[int] = set()
    for part in model.modules():
        config: Any = getattr(part, "config", None)
        if not hasattr(part, "save_pretrained") or id(config) in seen:
            continue  # a base model shares the config of the whole one around it
        seen.add(id(config))
        gone = {
            str(place): list(getattr(it, PRUNED).heads)
            for place, it in enumerate(_attention_modules(part))
            if getattr(it, PRUNED, None) is not None
        }
        if gone:
            setattr(config, FIELD, gone)


def _attention_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of attention; none for a part that has none."""
    try:
        return [layer.module for layer in attention_layers(model)]
    except ModelError:
        return []


def prune_by_layer(model: Any, heads: Mapping[int, Sequence[int]]) -> None:
    """Take heads out of a transformers model, in place and all or none.

    Raises:
        ModelError, DtypeError: a layer that cannot be pruned.
        ArgumentError: a head that there is not, or KV groups of unequal size.
    """
    layers = attention_layers(model)
    for index in heads:
        check_prunable(layers[index])
    after = {
        index: layers[index].pruned.without(chosen, f"layer {index}")
        for index, chosen in heads.items()
    }
    for index, pruned in after.items():
        prune_layer(layers[index], pruned)
    record(model)


def is_pruned(fields: Mapping[str, Any]) -> bool:
    """Whether a config.json tells of heads that are gone."""
    return bool(fields.get(FIELD))


def load_pruned(folder: str | Path, *, dtype: torch.dtype | None = None) -> Any:
    """The transformers model of a folder that `save_pretrained` wrote of a pruned one.

    Also loads what `save_checkpoint` wrote of a pruned model of ours, where its type is a
    transformers one. Nothing is downloaded.

    Args:
        folder: with a config.json that names `multihead_pruned_heads`.
        dtype: of the model; by default that of the file.

    Returns:
        The model in eval mode, of the class that the config names.

    Raises:
        ModelError: a folder that holds no such model, or tensors that do not fit it.
        MissingExtraError: transformers is not installed.
    """
    transformers = import_extra("transformers")
    folder = Path(folder)
    fields = read_json(folder / CONFIG)
    if not is_pruned(fields):
        raise ModelError(
            f"{folder} is no pruned model: its {CONFIG} has no {FIELD}. transformers' "
            "from_pretrained loads it."
        )
    gone = numbers(fields[FIELD])
    whole = _class_of(transformers, fields)

    def build(self: Any, config: Any, *arguments: Any, **options: Any) -> None:
        whole.__init__(self, config, *arguments, **options)
        count = len(attention_layers(self))
        if max(gone) >= count:
            raise ModelError(f"{FIELD} names layer {max(gone)}, but there are {count} layers.")
        prune_by_layer(self, gone)

    smaller = type(whole.__name__, (whole,), {"__init__": build, "__module__": whole.__module__})
    options = {} if dtype is None else {"dtype": dtype}
    try:
        model = smaller.from_pretrained(  # type: ignore[attr-defined]
            folder, local_files_only=True, **options
        )
    except ModelError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ModelError(
            f"transformers cannot load {folder} as a pruned model: {reason}"
        ) from error
    model.__class__ = whole
    return model.eval()


def _class_of(transformers: Any, fields: Mapping[str, Any]) -> Any:
    """The class that a config.json names, or that of its type's language models."""
    name = (fields.get("architectures") or [None])[0]
    if name is not None:
        found = getattr(transformers, name, None)
        if found is None:
            raise ModelError(f"transformers has no class {name}, which {CONFIG} names.")
        return found
    # As `save_checkpoint` writes it, without a class: an encoder, or a language model.
    kind, names = fields.get("model_type"), import_extra("transformers.models.auto.modeling_auto")
    encodes = isinstance(read_config(fields), EncoderConfig)
    mapping = names.MODEL_MAPPING_NAMES if encodes else names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if kind not in mapping:
        raise ModelError(f"transformers has no models of type {kind!r}.")
    return getattr(transformers, mapping[kind])


def _projections(layer: AttentionLayer) -> list[Any]:
    """The projections of a layer, the output projection last."""
    module: Any = layer.module
    if layer.family == "gpt2":
        return [module.c_attn, layer.out_proj]
    names = ("query", "key", "value") if layer.family == "bert" else ("q_proj", "k_proj", "v_proj")
    return [*(getattr(module, name) for name in names), layer.out_proj]


def _check_parts(layer: AttentionLayer) -> None:
    """Raise ModelError where the layer has parameters that pruning would not know what to do with.

    A norm over one head is the same for all; one over all heads together is not what it was.
    """
    own = {id(parameter) for part in _projections(layer) for parameter in part.parameters()}
    for name, parameter in layer.module.named_parameters():
        if id(parameter) in own:
            continue
        per_head = name == "sinks" and parameter.numel() == len(layer.heads)
        of_one_head = name in ("q_norm.weight", "k_norm.weight") and parameter.shape == (
            layer.value_dim,
        )
        if not (per_head or of_one_head):
            raise ModelError(
                f"heads of {layer.name} cannot be pruned: its {name}, {list(parameter.shape)}, "
                "belongs to all heads together or in a way that is not known here. Ablate them "
                "instead."
            )


def _keep_conv_outputs(conv: Any, columns: Tensor) -> None:
    """Keep these outputs of a Conv1D, whose weight is [in, out]."""
    conv.weight = selected(conv.weight, columns, 1)
    conv.bias = selected(conv.bias, columns, 0)
    conv.nf = len(columns)


def _keep_conv_inputs(conv: Any, rows: Tensor) -> None:
    conv.weight = selected(conv.weight, rows, 0)
    conv.nx = len(rows)


# --- layers without heads ------------------------------------------------------------------------


class _Headless:
    """What makes attention of a class that attends to nothing: its heads are all gone.

    The cache still gets a number for each token, since transformers counts tokens by what layers
    store.
    """

    base: type[nn.Module]
    family: str
    layer_idx: int

    def forward(self, hidden_states: Tensor, *_: Any, **options: Any) -> tuple[Tensor, Tensor]:
        batch, length = hidden_states.shape[:2]
        cache = options.get("cache")
        cache = options.get("past_key_values") if cache is None else cache
        keys = length
        if cache is not None:
            zero = hidden_states.new_zeros(batch, 1, length, 1)
            stored, _ = cache.update(zero, zero, self.layer_idx)
            keys = stored.shape[-2]
        weights = hidden_states.new_zeros(batch, 0, length, keys)
        return self._written(hidden_states), weights

    def _written(self, hidden_states: Tensor) -> Tensor:
        shape = hidden_states.shape[:-1]
        if self.family == "bert":  # whose output projection stands outside
            return hidden_states.new_zeros(*shape, 0)
        out: Any = getattr(self, "o_proj" if self.family == "llama" else "c_proj")
        width = out.out_features if self.family == "llama" else out.nf
        if out.bias is None:
            return hidden_states.new_zeros(*shape, width)
        return out.bias.expand(*shape, width)  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (self.base, self.family), self.__dict__


_headless_classes: dict[type[nn.Module], type[nn.Module]] = {}  # made when first met


def _headless(base: type[nn.Module], family: str) -> type[nn.Module]:
    """The class of a module of `base` whose heads are all gone."""
    if base not in _headless_classes:
        fields = {"base": base, "family": family, "__doc__": _Headless.__doc__}
        made = type(f"Headless{base.__name__}", (_Headless, base), fields)
        _headless_classes[base] = made
    return _headless_classes[base]


def _rebuilt(base: type[nn.Module], family: str) -> Any:
    return object.__new__(_headless(base, family))
