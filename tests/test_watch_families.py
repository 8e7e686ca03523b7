"""Statistics of every transformers family against its own eager attention in float64.

Eager's code gives the weights, whole and in float64, from which each statistic is computed as it is
defined; the same in the watched dtype is what an error is measured by.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import families
import multihead as mh
from close import assert_close
from dense_heads import Dense, of_weights, over_queries

transformers = pytest.importorskip("transformers", reason="the extra 'transformers' is missing")

LENGTHS = (5, 13, 11)
DTYPES = (torch.float32, torch.bfloat16)
OF_TEXTS = (*families.DECODERS, *families.ENCODERS)
NOT_PACKED = ("gpt_oss",)  # which transformers lets look over the borders of packed texts
TABLE = [
    *((family, padding) for family in OF_TEXTS for padding in ("none", "left", "right")),
    *((family, "packed") for family in families.DECODERS if family not in NOT_PACKED),
    *((family, padding) for family in ("bart", "t5") for padding in ("none", "right")),
]


class Recorder:
    """An attention implementation that calls eager's code and keeps what passed through it."""

    calls: list[tuple[nn.Module, dict[str, Any]]] | None = None

    def __call__(self, module, query, key, value, mask, **options):
        eager = sys.modules[type(module).__module__].eager_attention_forward
        out, weights = eager(module, query, key, value, mask, **options)
        assert self.calls is not None
        self.calls.append((module, dict(query=query, key=key, weights=weights, **options)))
        return out, weights

    @contextlib.contextmanager
    def recording(self, model: nn.Module) -> Iterator[list[dict[str, Any]]]:
        """The calls of the block, in the order of the model's modules when it ends."""
        self.calls, found = [], []
        model.set_attn_implementation("recorder")
        yield found
        order = {module: place for place, module in enumerate(model.modules())}
        found += [call for _, call in sorted(self.calls, key=lambda it: order[it[0]])]


RECORDER = Recorder()
# Made after the pass, from queries, keys and lse.
FROM_LSE = ("previous_token", "first_key")


@pytest.fixture(scope="module", autouse=True)
def _register() -> None:
    masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    transformers.AttentionInterface.register("recorder", RECORDER)
    transformers.AttentionMaskInterface.register("recorder", masks["eager"])


@functools.cache
def built(family: str) -> nn.Module:
    return families.build(family)


def model_of(family: str, dtype: torch.dtype) -> nn.Module:
    return copy.deepcopy(built(family)).to(dtype)


def inputs_of(family: str, padding: str) -> tuple[dict[str, Any], Tensor, Tensor]:
    """A model's inputs, which of their tokens are real and where each one's text begins."""
    if padding == "packed":
        ids, _ = families.padded((sum(LENGTHS),), "right")
        position = torch.cat([torch.arange(length) for length in LENGTHS])[None]
        inputs = dict(input_ids=ids, position_ids=position, use_cache=False)
        return inputs, torch.ones_like(ids, dtype=torch.bool), torch.arange(len(ids[0])) - position
    lengths = (max(LENGTHS),) * 3 if padding == "none" else LENGTHS
    ids, mask = families.padded(lengths, "left" if padding == "left" else "right")
    inputs = dict(input_ids=ids)
    if padding != "none":
        inputs["attention_mask"] = mask
    first = mask.argmax(-1)[:, None].expand(ids.shape)
    if family in ("bart", "t5"):
        inputs["decoder_input_ids"], _ = families.padded((7, 7, 7), "right", seed=5)
    return inputs, mask.bool(), first


def expected(
    model: nn.Module, inputs: dict[str, Any], real: Tensor, first: Tensor
) -> list[dict[str, Tensor]]:
    """Each layer's statistics of heads, in float64 arithmetic on what eager computed."""
    with RECORDER.recording(model) as calls:
        families.output(model, **inputs)
    return [of_call(call, real, first) for call in calls]


def of_call(call: dict[str, Any], real: Tensor, first: Tensor) -> dict[str, Tensor]:
    query, key, weights = (call[name].double() for name in ("query", "key", "weights"))
    batch, heads, rows, columns = weights.shape
    itself = (rows, columns) == (real.shape[1], real.shape[1])
    qk = query @ key.repeat_interleave(heads // key.shape[1], 1).mT * (call["scaling"] or 1)
    softcap, bias = call.get("softcap"), call.get("position_bias")
    logits = qk if softcap is None else softcap * torch.tanh(qk / softcap)
    logits = logits if bias is None else logits + bias.double()
    position = torch.arange(rows).expand(batch, rows)
    dense = Dense(
        visible=(weights > 0).any(1),
        real=real if itself else torch.ones(batch, rows, dtype=torch.bool),
        position=position,
        first=first if itself else torch.zeros_like(position),
        previous=position - 1,
    )
    sink = 1 - weights.sum(-1) if call.get("s_aux") is not None else None
    found = over_queries(of_weights(weights, logits, qk, dense, sink))
    again = over_queries(of_weights(_from_lse(weights, logits), logits, qk, dense, sink))
    return found | {f"{name} from lse": again[name] for name in FROM_LSE}


def _from_lse(weights: Tensor, logits: Tensor) -> Tensor:
    """The weights as e^(logit - lse), both rounded to float32: what plain torch makes of pieces."""
    logits = logits.float()
    seen = torch.where(weights > 0, logits - weights.log().float(), torch.nan)
    lse = seen.nanmedian(-1, keepdim=True).values
    return torch.where(weights > 0, (logits - lse).exp(), 0).double()


def _baseline(name: str, plain: list[dict[str, Tensor]], right: Tensor) -> Tensor:
    """Plain torch's: of a piece of the matrix by either way to it, the one that rounds more."""
    names = (name, f"{name} from lse") if name in FROM_LSE else (name,)
    found = [torch.stack([layer[it] for layer in plain]) for it in names]
    return max(found, key=lambda it: float((it - right).abs().nan_to_num().max()))


@pytest.mark.parametrize(("family", "padding"), TABLE)
def test_statistics_are_those_of_eager_in_float64(family: str, padding: str) -> None:
    inputs, real, first = inputs_of(family, padding)
    exact = expected(model_of(family, torch.float64), inputs, real, first)
    for dtype in DTYPES:
        plain = expected(model_of(family, dtype), inputs, real, first)
        model = model_of(family, dtype)
        with torch.no_grad(), mh.watch(model) as heads:
            model(**inputs)
        found = heads.record()
        assert len(found.layers) == len(exact)
        assert found.dtype == str(dtype).removeprefix("torch.")
        for name, table in heads.statistics.items():
            right = torch.stack([layer[name] for layer in exact])
            assert_close(
                torch.from_numpy(table).to(dtype if dtype == torch.bfloat16 else torch.float32),
                right,
                _baseline(name, plain, right),
                factor=4.0,
                what=f"{name} in {dtype}",
            )
        queries = real.sum() if family in OF_TEXTS else None
        if queries is not None:
            assert (heads.queries == int(queries)).all()
            assert (found.tokens, found.texts) == (int(queries), 3)


def test_a_mask_of_four_axes_is_read_like_any_other() -> None:
    ids, mask = families.padded(LENGTHS, "right")
    real, length = mask.bool(), ids.shape[1]
    visible = torch.ones(length, length, dtype=torch.bool).tril() & real[:, None]
    lowest = torch.finfo(torch.float32).min
    inputs = dict(input_ids=ids, attention_mask=torch.where(visible[:, None], 0.0, lowest))
    first = torch.zeros_like(ids)
    exact = expected(families.build("llama").double(), inputs, real, first)
    plain = expected(families.build("llama"), inputs, real, first)
    model = families.build("llama")
    with torch.no_grad(), mh.watch(model) as heads:
        model(**inputs)
    assert (heads.queries == sum(LENGTHS)).all()
    for name, table in heads.statistics.items():
        exact_table, plain_table = (
            torch.stack([layer[name] for layer in layers]) for layers in (exact, plain)
        )
        assert_close(torch.from_numpy(table), exact_table, plain_table, factor=4.0, what=name)
