"""Whole transformers models to be timed: their shapes, weights and inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from multihead.bench.case import Entry
from multihead.bench.contest import OURS, ratios
from multihead.bench.limits import Limits
from multihead.bench.timing import Timing
from multihead.heads.text import built_in, tokenize
from multihead.integrations import load
from multihead.integrations.extras import import_extra
from multihead.models import LanguageModel
from multihead.models.checkpoints import from_checkpoint

HIGHER = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float64,
}
"""The dtype in which a model's answer counts as right for one that computes in another."""

PREPACKED = f"{OURS} prepacked"
OWN = f"{OURS} LanguageModel"
OWN_PREPACKED = f"{OWN} prepacked"

_SMALL = {"vocab_size": 307, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@dataclass(frozen=True)
class Shape:
    """How one model is made: its classes in transformers, its config, and what a call asks for."""

    title: str
    model: str
    config: str
    sizes: Mapping[str, Any]
    small: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self, dtype: torch.dtype, *, quick: bool) -> nn.Module:
        """The model in eval mode; its random weights are so wide that attention is not flat.

        Raises:
            MissingExtraError: transformers is not installed.
        """
        transformers = import_extra("transformers")
        sizes = {**_SMALL, **self.small} if quick else self.sizes
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            model = getattr(transformers, self.model)(getattr(transformers, self.config)(**sizes))
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim > 1:
                        parameter.normal_(0, parameter.shape[-1] ** -0.5)
        return model.to(dtype).eval()  # type: ignore[no-any-return]


MODERNBERT = Shape(
    "ModernBERT-base shape",
    "ModernBertModel",
    "ModernBertConfig",
    {},
    {
        "num_hidden_layers": 4,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_attention_heads": 3,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
)
GEMMA3 = Shape(
    "Gemma-3-270M shape",
    "Gemma3ForCausalLM",
    "Gemma3TextConfig",
    {
        "vocab_size": 262144,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "max_position_embeddings": 32768,
    },
    {
        "num_hidden_layers": 6,
        "hidden_size": 40,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "sliding_window": 16,
    },
    {"logits_to_keep": 1},
)
BERT = Shape(
    "BERT-base shape",
    "BertModel",
    "BertConfig",
    {},
    {
        "num_hidden_layers": 2,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_attention_heads": 3,
    },
)
_LLAMA = Shape(
    "a small Llama",
    "LlamaForCausalLM",
    "LlamaConfig",
    {},
    {
        "num_hidden_layers": 2,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    },
    {"logits_to_keep": 1},
)


def smollm2(dtype: torch.dtype, *, quick: bool) -> nn.Module:
    """SmolLM2-135M-Instruct with its own weights; a small Llama where it is about speed of tests.

    Raises:
        MissingExtraError: transformers or gguf is not installed.
        ModelError: the package that carries the weights is not installed.
    """
    if quick:
        return _LLAMA.build(dtype, quick=True)
    return _loaded(dtype)[0]


def text(tokens: int, *, quick: bool) -> Tensor:
    """The first tokens of the built-in text as SmolLM2 reads it, [1, tokens]; of any in quick."""
    if quick:
        generator = torch.Generator().manual_seed(tokens)
        return torch.randint(3, _SMALL["vocab_size"], (1, tokens), generator=generator)
    return torch.tensor([tokenize(_loaded(torch.bfloat16)[1], built_in(), tokens).ids])


def random_tokens(model: nn.Module, shape: tuple[int, int]) -> Tensor:
    """Random tokens [B, L] of the model's vocabulary, none of its special first ones."""
    generator = torch.Generator().manual_seed(shape[1])
    vocabulary: int = model.config.vocab_size  # type: ignore[union-attr, assignment]
    return torch.randint(5, vocabulary, shape, generator=generator)


def own(model: nn.Module) -> LanguageModel:
    """The same decoder as a `LanguageModel`; where weights lie alike they are shared."""
    config: Any = model.config
    made = from_checkpoint(config.to_dict(), model.state_dict())
    assert isinstance(made, LanguageModel)
    return made


def in_higher(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy that computes in a wider dtype, by torch's attention."""
    higher = copy.deepcopy(model).to(HIGHER[dtype])
    higher.set_attn_implementation("sdpa")  # type: ignore[operator]
    return higher


def too_slow(dtype: torch.dtype, limits: Limits) -> str | None:
    """Why this processor takes minutes for a long text in `dtype`; None if it does not.

    Without instructions for it torch's linear layers take ten times as long in bfloat16 as in
    float32, and nobody would run a model so.
    """
    if dtype is torch.bfloat16 and limits.dpbf16 is None and limits.amx is None:
        return "this processor has no products of bfloat16"
    return None


class Kept:
    """A call whose last result stays, so that what was timed is what is checked."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.result: Any = None

    def __call__(self) -> None:
        self.result = self._call()


def register() -> None:
    """Make `attn_implementation="multihead"` known to transformers.

    Raises:
        MissingExtraError: transformers is not installed.
    """
    import_module("multihead.integrations.transformers").register()


def compared(times: Mapping[str, Timing], errors: Mapping[str, float], tokens: int) -> Entry:
    """What a row of whole models says of its contestants; a call of each takes `tokens`."""
    return {
        "times": {name: timing.to_json() for name, timing in times.items()},
        "ratios": ratios(times),
        "tokens_per_second": {name: tokens / timing.median for name, timing in times.items()},
        "errors": dict(errors),
        "first_call_seconds": {},
    }


@lru_cache(maxsize=2)
def _loaded(dtype: torch.dtype) -> tuple[nn.Module, Any]:
    loaded = load(dtype=dtype)
    return loaded.model, loaded.tokenizer


def transformers() -> Any:
    """The package; raises MissingExtraError where it is not installed."""
    return import_extra("transformers")
