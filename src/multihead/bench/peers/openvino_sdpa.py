"""OpenVINO's operator ScaledDotProductAttention."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from multihead.bench.case import Case
from multihead.bench.contest import Contestant
from multihead.bench.peers.shapes import only_full_or_causal

NAME = "openvino"
PACKAGE = "openvino"

_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def contestant(case: Case, query: Tensor, key: Tensor, value: Tensor, threads: int) -> Contestant:
    """A model of one node with fixed shapes, told to compute in the dtype of its inputs."""
    causal = only_full_or_causal(case)
    openvino = import_module("openvino")
    operators = import_module("openvino.opset13")
    element = getattr(openvino.Type, _DTYPES[case.dtype])
    ports = [operators.parameter(list(x.shape), element) for x in (query, key, value)]
    node = operators.scaled_dot_product_attention(*ports, causal=causal)
    compiled = openvino.Core().compile_model(
        openvino.Model([node], ports),
        "CPU",
        {
            "INFERENCE_PRECISION_HINT": element,
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
        },
    )
    request = compiled.create_infer_request()
    for index, tensor in enumerate((query, key, value)):
        request.set_input_tensor(index, _share(openvino, tensor, element))

    def result() -> Tensor:
        request.infer()
        out = request.get_output_tensor(0).data
        if case.dtype == torch.bfloat16:  # NumPy has no such numbers
            return torch.from_numpy(out.view("int16").copy()).view(torch.bfloat16)
        return torch.from_numpy(out.copy())

    return Contestant(request.infer, result)


def _share(openvino: Any, tensor: Tensor, element: Any) -> Any:
    """The tensor's memory as one of OpenVINO's."""
    if tensor.dtype == torch.bfloat16:
        bits = tensor.view(torch.int16).numpy()
        return openvino.Tensor(bits, openvino.Shape(list(tensor.shape)), element)
    return openvino.Tensor(tensor.numpy(), shared_memory=True)
