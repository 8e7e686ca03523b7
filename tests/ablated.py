"""The definition of an ablated head: its columns of the output projection are zero."""

import copy

import torch

from multihead.integrations.attention_layers import attention_layers


def zeroed(model, heads):
    """A copy of the model in which nothing reads these heads."""
    copied = copy.deepcopy(model)
    layers = attention_layers(copied)
    with torch.no_grad():
        for index, head in heads:
            layer = layers[index]
            weight = layer.out_proj.weight
            (weight.t() if layer.family == "gpt2" else weight)[:, layer.columns(head)] = 0
    return copied


def outputs(model, ids):
    """The last hidden states or the logits, whatever the model gives first."""
    with torch.no_grad():
        found = model(ids)
    return found if isinstance(found, torch.Tensor) else found[0]
