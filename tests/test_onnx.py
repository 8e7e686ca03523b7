"""The ONNX `Attention` operator's own cases, all of them: expected values that others computed.

An adapter turns the operator's inputs and attributes into one call of ours. What the operator
leaves to its caller (splitting heads, joining a past, a mask shorter than the keys) is done here.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor

import multihead as mh
from close import assert_close

EXPECTED_CASES = 93
STAGES = {0: "scores", 1: "capped", 2: "biased", 3: "softmax"}


def collect() -> list[Any]:
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        everything = collect_testcases(None)
    graphs = [(case, case.model.graph.node) for case in everything if case.model is not None]
    return [case for case, nodes in graphs if [n.op_type for n in nodes] == ["Attention"]]


CASES = collect()


def to_tensor(array: Any) -> Tensor:
    array = np.ascontiguousarray(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def split_heads(x: Tensor, heads: int | None) -> Tensor:
    return x if x.ndim == 4 else x.unflatten(-1, (heads, -1)).transpose(1, 2)


def widened(mask: Tensor, keys: int) -> Tensor:
    """Four dimensions, and hidden beyond the columns that the mask has."""
    mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
    missing = keys - mask.shape[-1]
    if missing <= 0 or mask.shape[-1] == 1:
        return mask
    hidden = False if mask.dtype == torch.bool else -torch.inf
    return torch.nn.functional.pad(mask, (0, missing), value=hidden)


def attend(inputs: Mapping[str, Tensor], attributes: Mapping[str, Any]) -> dict[str, Tensor]:
    """The operator by our function: every output it can have, by name."""
    query = split_heads(inputs["Q"], attributes.get("q_num_heads"))
    key = split_heads(inputs["K"], attributes.get("kv_num_heads"))
    value = split_heads(inputs["V"], attributes.get("kv_num_heads"))
    past = 0
    if "past_key" in inputs:
        past = inputs["past_key"].shape[2]
        key = torch.cat((inputs["past_key"], key), dim=2)
        value = torch.cat((inputs["past_value"], value), dim=2)
    queries, keys = query.shape[2], key.shape[2]

    mask: mh.Mask = mh.QueryStart(past)
    if "nonpad_kv_seqlen" in inputs:
        filled = inputs["nonpad_kv_seqlen"]
        mask = mh.QueryStart(filled - queries) & mh.KeyPadding(torch.arange(keys) < filled[:, None])
    if attributes.get("is_causal"):
        mask = mask & mh.Causal()
    left, right = (attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    mask = mask & mh.Window(None if left < 0 else left, None if right < 0 else right)
    bias = None
    if "attn_mask" in inputs:
        given = widened(inputs["attn_mask"], keys)
        if given.dtype == torch.bool:
            mask = mask & mh.Dense(given)
        else:
            bias = given
    options = {
        "mask": mask,
        "bias": bias,
        "scale": attributes.get("scale"),
        "softcap": attributes.get("softcap") or None,
    }
    result = mh.attention_with_stats(query, key, value, stats=("lse",), **options)
    out = result.out if inputs["Q"].ndim == 4 else result.out.transpose(1, 2).flatten(2)
    stage = STAGES[attributes.get("qk_matmul_output_mode", 0)]
    everything = {"rows": slice(None), "columns": slice(None)}
    matrix = mh.attention_weights(query, key, result.lse, stage=stage, **everything, **options)
    if stage == "biased":
        matrix = matrix.masked_fill(~mask.to_dense(queries, keys), -torch.inf)
    return {"Y": out, "present_key": key, "present_value": value, "qk_matmul_output": matrix}


def test_every_case_is_here() -> None:
    assert len(CASES) == EXPECTED_CASES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.removeprefix("test_attention_"))
def test_onnx(case: Any) -> None:
    node = case.model.graph.node[0]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    for arrays, expected in case.data_sets:
        names = [name for name in node.input if name]
        inputs = dict(zip(names, map(to_tensor, arrays), strict=True))
        found = attend(inputs, attributes)
        outputs = [name for name in node.output if name]
        for name, want in zip(outputs, map(to_tensor, expected), strict=True):
            if want.dtype == torch.bfloat16:
                # The suite's own values carry bfloat16's rounding of every step.
                assert_close(found[name], exact(inputs, attributes)[name], want, what=name)
            else:
                got, want = found[name].double().numpy(), want.double().numpy()
                np.testing.assert_allclose(got, want, rtol=case.rtol, atol=case.atol, err_msg=name)


def exact(inputs: Mapping[str, Tensor], attributes: Mapping[str, Any]) -> dict[str, Tensor]:
    """The operator in float64."""
    double = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    return attend(double, attributes)
