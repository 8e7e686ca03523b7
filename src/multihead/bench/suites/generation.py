"""The suite `generation`: texts that go on, token by token, and requests in one batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import takewhile
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from multihead.bench import llama, whole
from multihead.bench.case import Entry
from multihead.bench.contest import OURS, TORCH, Declined, Setting
from multihead.bench.suites.row import Row
from multihead.bench.timing import alternate
from multihead.bench.verify import differing, judge_whole, off_by_too_much
from multihead.bench.whole import OWN, OWN_PREPACKED, PREPACKED, Kept, compared, register
from multihead.errors import BackendError, MissingExtraError, ModelError
from multihead.integrations.sdpa import replace_sdpa
from multihead.models import LanguageModel
from multihead.nn import prepack

# Tokens of one sample: enough that a sample is longer than the scheduler's tick.
_STEPS = 8

_LEAST = 3

_PAGE, _BATCH_TOKENS = 64, 512

# Near-ties fall either way: of two right implementations not every token must be the same.
_SAME_TOKENS = 0.9


class Decoder(Protocol):
    """A model that has read a context and goes on from there, again and again."""

    def run(self) -> Tensor:
        """Read the next tokens one by one, forget them, and return logits [B, steps, V].

        Of the last steps, at least one.
        """
        ...


@dataclass(frozen=True)
class Decoding:
    """One row: `batch` rows of the same `context`, continued by the text's next tokens."""

    dtype: torch.dtype
    batch: int
    context: int

    @property
    def name(self) -> str:
        """What `--only` looks into."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"smollm2-decode-{self.batch}x{self.context}-{dtype}"


def rows(*, quick: bool) -> list[Row]:
    """SmolLM2 at batch 1 and 8, context 128 and 4096; 16 requests of mixed length."""
    contexts = (16, 24) if quick else (128, 4096)
    cases = [
        Decoding(dtype, batch, context)
        for dtype in (torch.bfloat16, torch.float32)
        for batch in (1, 8)
        for context in contexts
    ]
    return [
        Row("smollm2-generate-batch-16-float32", partial(_requests, quick)),
        *(Row(case.name, partial(_decode, case, quick)) for case in cases),
    ]


# --- token by token ------------------------------------------------------------------------------


class Transformers:
    """A transformers model with its own growing cache."""

    def __init__(
        self, model: nn.Module, implementation: str, ids: Tensor, batch: int, context: int
    ) -> None:
        self._model: Any = model
        self._implementation = implementation
        self._next = ids[:, context:].expand(batch, -1)
        model.set_attn_implementation(implementation)  # type: ignore[operator]
        self._argument = _cache_argument(model)
        read = self._model(ids[:, :context], use_cache=True, logits_to_keep=1)
        self._cache = read[self._argument]
        self._cache.batch_repeat_interleave(batch)

    def run(self) -> Tensor:
        """See `Decoder`."""
        self._model.set_attn_implementation(self._implementation)
        logits = []
        for token in self._next.split(1, dim=1):
            read = self._model(token, **{self._argument: self._cache}, use_cache=True)
            logits.append(read.logits)
        self._cache.crop(-self._next.shape[1])
        return torch.cat(logits, dim=1)


class Own:
    """Our own model with its growing caches."""

    def __init__(self, model: LanguageModel, ids: Tensor, batch: int, context: int) -> None:
        self._model = model
        self._next = ids[:, context:].expand(batch, -1)
        self._context = context
        self._caches = model.make_caches()
        model(ids[:, :context], caches=self._caches, rows="last")
        for cache in self._caches:
            cache.reorder([0] * batch)

    def run(self) -> Tensor:
        """See `Decoder`."""
        logits = [self._model(token, caches=self._caches) for token in self._next.split(1, dim=1)]
        for cache in self._caches:
            cache.crop(self._context)
        return torch.cat(logits, dim=1)


def _llama(
    ids: Tensor, batch: int, context: int, threads: int, declined: dict[str, str]
) -> Decoder:
    if not llama.is_installed():
        raise Declined("not measurable here: llama-cpp-python is not installed")
    failure = llama.fails_reordered(threads)
    if failure is not None:
        declined[llama.REORDERED] = failure
    return llama.Llama(ids, batch, context, threads, reordered=failure is None)


def _cache_argument(model: nn.Module) -> str:
    """What a model of the installed transformers calls its cache."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


def _decode(case: Decoding, quick: bool, setting: Setting) -> Entry:
    entry: Entry = {
        "name": case.name,
        "kind": f"smollm2-decode-{case.batch}x{case.context}",
        "what": f"SmolLM2-135M, decoding, batch {case.batch}, context {case.context}",
        "dtype": str(case.dtype).removeprefix("torch."),
        "tokens": case.batch * _STEPS,
    }
    try:
        model = whole.smollm2(case.dtype, quick=quick)
        register()
    except (MissingExtraError, ModelError) as error:
        return {**entry, "not_measurable": str(error)}
    ids = whole.text(case.context + _STEPS, quick=quick)
    packed, own, packed_own = copy.deepcopy(model), whole.own(model), whole.own(model)
    found, found_own = prepack(packed), prepack(packed_own)
    entry["packed_bytes"] = found.nbytes
    size = case.batch, case.context
    builders: dict[str, Callable[[], Decoder]] = {
        OURS: partial(Transformers, model, OURS, ids, *size),
        TORCH: partial(Transformers, model, "sdpa", ids, *size),
        OWN: partial(Own, own, ids, *size),
    }
    if found.serves(case.batch):
        builders[PREPACKED] = partial(Transformers, packed, OURS, ids, *size)
    if found_own.serves(case.batch):
        builders[OWN_PREPACKED] = partial(Own, packed_own, ids, *size)
    declined: dict[str, str] = {}
    if not quick:
        builders[llama.NAME] = partial(_llama, ids, *size, setting.threads, declined)
    with torch.inference_mode():
        decoders: dict[str, Decoder] = {}
        for name, build in builders.items():
            try:
                decoders[name] = build()
            except Declined as reason:
                declined[name] = str(reason)
        times = alternate(
            {name: decoder.run for name, decoder in decoders.items()}, seconds=setting.seconds
        )
        results = {name: decoder.run() for name, decoder in decoders.items()}
        higher = whole.in_higher(model, case.dtype)
        right = higher(ids, logits_to_keep=_STEPS)[0].expand(case.batch, -1, -1)
    errors = {name: differing(out, right[:, -out.shape[1] :]) for name, out in results.items()}
    for name in (PREPACKED, OWN_PREPACKED):  # torch's own kernels on reordered weights
        wrong = off_by_too_much(name, errors, case.dtype, TORCH) if name in errors else None
        if wrong is not None:
            declined[name] = wrong
            del times[name], errors[name]
    same_weights = {name: error for name, error in errors.items() if name != llama.NAME}
    judge_whole(case.name, same_weights, case.dtype, TORCH)
    return entry | compared(times, errors, case.batch * _STEPS) | {"declined": declined}


# --- requests of mixed length --------------------------------------------------------------------


def _requests(quick: bool, setting: Setting) -> Entry:
    """transformers' `generate_batch`, as it is and with torch's attention replaced by ours."""
    longest, new = (24, 4) if quick else (512, 16)
    entry: Entry = {
        "name": "smollm2-generate-batch-16-float32",
        "kind": "smollm2-generate-batch-16",
        "what": f"SmolLM2-135M, 16 requests of {longest // 8} to {longest} tokens in one batch",
        "dtype": "float32",
    }
    try:
        model = whole.smollm2(torch.float32, quick=quick)
        register()
    except (MissingExtraError, ModelError) as error:
        return {**entry, "not_measurable": str(error)}
    lengths = torch.linspace(longest / 8, longest, 16).long().tolist()
    text = whole.text(longest + 16, quick=quick)[0].tolist()
    prompts = [text[start : start + length] for start, length in enumerate(lengths)]
    tokens = sum(lengths) + 16 * new

    def plain() -> list[list[int]]:
        return _generated(model, prompts, new)

    def ours() -> list[list[int]]:
        with replace_sdpa(model):
            return _generated(model, prompts, new)

    calls = {OURS: Kept(ours), TORCH: Kept(plain)}
    model.set_attn_implementation("sdpa")  # type: ignore[operator]
    times = alternate(calls, seconds=setting.seconds, least=_LEAST)
    found, expected = calls[OURS].result, calls[TORCH].result
    same = _same(found, expected)
    if same < _SAME_TOKENS:
        raise BackendError(
            f"{entry['name']}: {100 * same:.0f} % of the tokens are those of torch's attention; at "
            f"least {100 * _SAME_TOKENS:.0f} % must be. Its time means nothing."
        )
    entry |= {"tokens": tokens, "same_tokens": same, "declined": {}}
    return entry | compared(times, {OURS: 1 - same, TORCH: 0.0}, tokens)


def _generated(model: nn.Module, prompts: list[list[int]], new: int) -> list[list[int]]:
    transformers = whole.transformers()
    config = transformers.GenerationConfig(
        max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    # Sized for these requests: by itself it takes most of the memory, and seconds to clear it.
    pages = sum(-(-(len(prompt) + new) // _PAGE) + 1 for prompt in prompts)
    batching = transformers.ContinuousBatchingConfig(
        page_size=_PAGE, num_blocks=pages, max_batch_tokens=_BATCH_TOKENS, use_cuda_graph=False
    )
    out = model.generate_batch(  # type: ignore[operator]
        inputs=prompts,
        generation_config=config,
        continuous_batching_config=batching,
        warmup=False,
        progress_bar=False,
    )
    return [list(result.generated_tokens) for _, result in sorted(out.items(), key=_number)]


def _number(item: tuple[str, Any]) -> int:
    """Requests are named in the order in which they were made."""
    return int(item[0].rpartition("_")[2])


def _same(found: list[list[int]], expected: list[list[int]]) -> float:
    """The share of tokens that are the same up to each request's first other one."""
    kept = sum(_agreeing(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    return kept / sum(map(len, expected))


def _agreeing(ours: list[int], theirs: list[int]) -> int:
    pairs = zip(ours, theirs, strict=False)  # a request that ended early lacks its last ones
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
