"""ONNX Runtime's contrib operator MultiHeadAttention."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from multihead.bench.case import Case
from multihead.bench.contest import Contestant, Declined
from multihead.bench.peers.shapes import only_full_or_causal

NAME = "onnxruntime"
PACKAGE = "onnxruntime"

_DTYPES = {torch.float32: "FLOAT", torch.float16: "FLOAT16"}


def contestant(case: Case, query: Tensor, key: Tensor, value: Tensor, threads: int) -> Contestant:
    """A session of one node on [B, L, H * D], the layout that the operator takes."""
    causal = only_full_or_causal(case)
    if case.dtype not in _DTYPES:
        raise Declined(f"has no {case.dtype_name} kernel on the CPU")
    runtime = import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = runtime.InferenceSession(
        _model(case, causal), options, providers=["CPUExecutionProvider"]
    )
    feed = {
        name: tensor.transpose(1, 2).reshape(case.batch, tensor.shape[2], -1).numpy()
        for name, tensor in (("query", query), ("key", key), ("value", value))
    }

    def result() -> Tensor:
        (out,) = session.run(None, feed)
        rows = (case.batch, case.queries, case.heads, case.width)
        return torch.from_numpy(out).reshape(rows).transpose(1, 2)

    return Contestant(lambda: session.run(None, feed), result)


def _model(case: Case, causal: bool) -> bytes:
    onnx = import_module("onnx")
    element = getattr(onnx.TensorProto, _DTYPES[case.dtype])

    def port(name: str, length: int) -> object:
        shape = [case.batch, length, case.heads * case.width]
        return onnx.helper.make_tensor_value_info(name, element, shape)

    node = onnx.helper.make_node(
        "MultiHeadAttention",
        ["query", "key", "value"],
        ["out"],
        domain="com.microsoft",
        num_heads=case.heads,
        unidirectional=int(causal),
    )
    inputs = [port("query", case.queries), port("key", case.keys), port("value", case.keys)]
    graph = onnx.helper.make_graph([node], "attention", inputs, [port("out", case.queries)])
    sets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=sets, ir_version=10)
    return bytes(model.SerializeToString())
