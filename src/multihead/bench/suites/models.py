"""The suite `models`: whole models, with nothing changed but who computes attention."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from multihead.bench import whole
from multihead.bench.case import Entry
from multihead.bench.contest import OURS, TORCH, Setting
from multihead.bench.suites.row import Row
from multihead.bench.timing import alternate
from multihead.bench.verify import differing, judge_whole
from multihead.bench.whole import OWN, OWN_PREPACKED, PREPACKED, Kept, compared, register
from multihead.errors import MissingExtraError, ModelError
from multihead.models import LanguageModel
from multihead.nn import prepack

_BF16, _F32 = torch.bfloat16, torch.float32

# A forward pass of seconds scatters little, and there are a dozen of them.
_LEAST, _MORE_TIME = 3, 4.0


@dataclass(frozen=True)
class Pass:
    """One forward pass to be timed: the model, what it reads, and whether packing may help it."""

    kind: str
    what: str
    dtype: torch.dtype
    build: Callable[[], nn.Module]
    inputs: Callable[[nn.Module], Mapping[str, Tensor]]
    tokens: int
    options: Mapping[str, Any] = field(default_factory=dict)
    decodes: bool = False

    @property
    def dtype_name(self) -> str:
        """`float32` or `bfloat16`."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def name(self) -> str:
        """What `--only` looks into."""
        return f"{self.kind}-{self.dtype_name}"


def rows(*, quick: bool) -> list[Row]:
    """Encoders and prefills."""
    return [
        Row(it.name, partial(_measure, it, quick)) for it in (*_encoders(quick), *_prefills(quick))
    ]


def _encoders(quick: bool) -> list[Pass]:
    long = 192 if quick else 8192
    batch, padded = (3, 40) if quick else (16, 512)

    def build(shape: whole.Shape) -> Callable[[], nn.Module]:
        return partial(shape.build, _BF16, quick=quick)

    def one(model: nn.Module) -> dict[str, Tensor]:
        return {"input_ids": whole.random_tokens(model, (1, long))}

    def many(model: nn.Module) -> dict[str, Tensor]:
        ids = whole.random_tokens(model, (batch, padded))
        lengths = torch.linspace(padded / 8, padded, batch).long()
        visible = (torch.arange(padded) < lengths[:, None]).long()
        return {"input_ids": ids * visible, "attention_mask": visible}

    bert_tokens = int(torch.linspace(padded / 8, padded, batch).long().sum())
    modern, gemma, bert = whole.MODERNBERT, whole.GEMMA3, whole.BERT
    of_long = f"{long} tokens"
    of_padded = f"{batch} texts of {padded // 8} to {padded} tokens, padded"
    return [
        Pass(f"modernbert-{long}", f"{modern.title}, {of_long}", _BF16, build(modern), one, long),
        Pass(
            f"gemma3-{long}",
            f"{gemma.title}, {of_long}",
            _BF16,
            build(gemma),
            one,
            long,
            gemma.options,
        ),
        Pass(
            f"bert-{batch}x{padded}-padded",
            f"{bert.title}, {of_padded}",
            _BF16,
            build(bert),
            many,
            bert_tokens,
        ),
    ]


def _prefills(quick: bool) -> list[Pass]:
    return [
        Pass(
            f"smollm2-prefill-{tokens}",
            f"SmolLM2-135M, prefill of {tokens} tokens",
            dtype,
            partial(whole.smollm2, dtype, quick=quick),
            lambda model, tokens=tokens: {"input_ids": whole.text(tokens, quick=quick)},  # type: ignore[misc]
            tokens,
            {"logits_to_keep": 1, "use_cache": True},
            decodes=True,
        )
        for dtype in (_BF16, _F32)
        for tokens in ((64, 96) if quick else (2048, 8000))
    ]


def _measure(it: Pass, quick: bool, setting: Setting) -> Entry:
    entry: Entry = {
        "name": it.name,
        "kind": it.kind,
        "what": it.what,
        "dtype": it.dtype_name,
        "tokens": it.tokens,
    }
    reason = None if quick else whole.too_slow(it.dtype, setting.limits)
    if reason is not None:
        return {**entry, "not_measurable": reason}
    try:
        model = it.build()
        register()
    except (MissingExtraError, ModelError) as error:
        return {**entry, "not_measurable": str(error)}
    inputs = it.inputs(model)

    def call(of: nn.Module, implementation: str) -> Tensor:
        of.set_attn_implementation(implementation)  # type: ignore[operator]
        out: Tensor = of(**inputs, **it.options)[0]
        return out

    calls: dict[str, Callable[[], Tensor]] = {
        OURS: partial(call, model, OURS),
        TORCH: partial(call, model, "sdpa"),
    }
    if it.decodes:
        calls |= _for_decoders(it, model, inputs["input_ids"], call, entry)
    kept = {name: Kept(function) for name, function in calls.items()}
    with torch.inference_mode():
        times = alternate(kept, seconds=_MORE_TIME * setting.seconds, least=_LEAST)
        results = {name: function.result for name, function in kept.items()}
        right = call(whole.in_higher(model, it.dtype), "sdpa")
    visible = inputs.get("attention_mask")
    errors = {name: differing(out, right, visible) for name, out in results.items()}
    judge_whole(it.name, errors, it.dtype, TORCH)
    return entry | compared(times, errors, it.tokens) | {"declined": {}}


def _for_decoders(
    it: Pass,
    model: nn.Module,
    ids: Tensor,
    call: Callable[[nn.Module, str], Tensor],
    entry: Entry,
) -> dict[str, Callable[[], Tensor]]:
    """Our own model of the same weights, and packed ones where that serves so many tokens."""

    def read(own: LanguageModel) -> Tensor:
        logits: Tensor = own(ids, caches=own.make_caches(), rows="last")
        return logits

    calls: dict[str, Callable[[], Tensor]] = {OWN: partial(read, whole.own(model))}
    packed, packed_own = copy.deepcopy(model), whole.own(model)
    found, found_own = prepack(packed), prepack(packed_own)
    if found.serves(it.tokens):
        entry["packed_bytes"] = found.nbytes
        calls[PREPACKED] = partial(call, packed, OURS)
    if found_own.serves(it.tokens):
        calls[OWN_PREPACKED] = partial(read, packed_own)
    return calls
