"""Taking heads out of a whole model for good."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ...errors import ModelError
from ...integrations import hf_pruning
from ...integrations.attention_layers import AttentionLayer, Head, attention_layers, by_layer
from ...models import Encoder, EncoderDecoder, LanguageModel
from ...nn import MultiHeadAttention, prune_heads
from ...nn.prune import check_prunable

load_pruned = hf_pruning.load_pruned


def prune(model: nn.Module, heads: Iterable[Head]) -> None:
    """Take heads out of a model for good, in place; all of them, or none after an error.

        from multihead import heads

        heads.prune(model, {(3, 1), (3, 8)})

    The model then gives what `ablate(model, heads)` gives, with fewer parameters, products and
    cached keys. Layers may differ in their number of heads; a layer that has lost all of them
    writes its output bias. Addresses are those of `ablate`, and heads keep the numbers that they
    had before any were pruned, also for a second pruning and after saving and loading.

    Under grouped queries a KV head goes with the last query head that reads it, and what is left
    of the groups must be of one size: remove whole groups, or as many heads of each.

    Save a transformers model by its `save_pretrained`, and load it by `load_pruned`; save one of
    ours by `multihead.integrations.save_checkpoint`, and load it by `load_checkpoint`. Each reads
    what the other wrote. Parameters are replaced: make an optimizer anew, and empty caches.

    Args:
        model: ours (`MultiHeadAttention` layers anywhere), or a Llama-, GPT-2- or BERT-like model
            of transformers.
        heads: pairs (layer, head).

    Raises:
        ArgumentError: a head that there is not, or KV groups of unequal size.
        DtypeError: heads that are no pairs of integers, or a projection that is no plain linear
            layer.
        ModelError: a model whose heads cannot be taken out.
    """
    layers = attention_layers(model)
    chosen = by_layer(layers, heads)
    if not chosen:
        return
    families = {layers[index].family for index in chosen}
    if families == {"multihead"}:
        _prune_ours(model, layers, chosen)
        return
    hf_pruning.prune_by_layer(model, chosen)


def _prune_ours(
    model: nn.Module, layers: Sequence[AttentionLayer], heads: Mapping[int, Sequence[int]]
) -> None:
    stacks = [it for it in model.modules() if isinstance(it, LanguageModel | Encoder)]
    described = {
        id(block.attention): (stack, place)
        for stack in stacks
        for place, block in enumerate(stack.blocks)
    }
    crossing = {id(block.cross_attention) for stack in stacks for block in stack.blocks} - {
        id(None)
    }
    for index in heads:
        if id(layers[index].module) in crossing:
            raise ModelError(
                f"heads of {layers[index].name}, a cross-attention of a whole model, cannot be "
                "pruned, only ablated: its description counts heads of self-attentions."
            )
    for index, gone in heads.items():
        module = layers[index].module
        assert isinstance(module, MultiHeadAttention)
        layers[index].pruned.without(gone, f"layer {index}")
        check_prunable(module)
    for index, gone in heads.items():
        module = layers[index].module
        assert isinstance(module, MultiHeadAttention)
        prune_heads(module, gone)
        if id(module) in described:
            _describe(*described[id(module)], gone)
    for whole in model.modules():
        if isinstance(whole, EncoderDecoder):
            whole.config = replace(
                whole.config, source=whole.encoder.config, target=whole.decoder.config
            )


def _describe(stack: Any, place: int, gone: Iterable[int]) -> None:
    """Let a model's config say what the layer at `place` has lost."""
    described = list(stack.config.layers)
    described[place] = described[place].without_heads(gone)
    stack.config = replace(stack.config, layers=tuple(described))
