"""`multihead inspect --compare`: two models on one text, head by head."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multihead.cli.output import print_json, stdout_console
from multihead.cli.progress import Advance, progress
from multihead.errors import InputError

if TYPE_CHECKING:
    from multihead.heads import HeadRecord


def run(
    model: str,
    other: str,
    *,
    text: Path | None,
    prompt: str | None,
    max_tokens: int | None,
    dtype: str,
    as_json: bool,
) -> None:
    """Watch `model` and `other` read the same text, and print what differs.

    Raises:
        InputError: a text or a number of tokens that cannot be used, or models of different heads.
        ModelError: a model that is not here or cannot be watched.
        MissingExtraError: transformers or gguf is not installed.
    """
    records: list[HeadRecord] = []
    with progress() as advance:
        for place, name in enumerate((model, other)):
            records.append(
                _record(
                    name,
                    records[0] if records else None,
                    text=text,
                    prompt=prompt,
                    max_tokens=max_tokens,
                    dtype=dtype,
                    advance=advance,
                    begun=place / 2,
                )
            )
    print_records(*records, as_json=as_json)


def print_records(here: HeadRecord, there: HeadRecord, *, as_json: bool) -> None:
    """Print what differs between the heads of two records of the same layers and heads."""
    comparison = here.compare(there)
    if as_json:
        print_json(
            {
                "here": here.facts(),
                "there": there.facts(),
                "differences": [asdict(it) for it in comparison],
            }
        )
    else:
        from multihead.cli.terminal.comparison import print_comparison

        print_comparison(stdout_console(), here, there, comparison)


def _record(
    name: str,
    before: HeadRecord | None,
    *,
    text: Path | None,
    prompt: str | None,
    max_tokens: int | None,
    dtype: str,
    advance: Advance,
    begun: float,
) -> HeadRecord:
    """What the heads of the model `name` do on the text."""
    import torch

    from multihead.heads import text as texts
    from multihead.heads import watch
    from multihead.heads.forward import position_count
    from multihead.heads.inspecting.inspection import MAX_TOKENS
    from multihead.integrations import load

    advance(f"loading {name}", begun)
    loaded = load(name, dtype=getattr(torch, dtype))
    config = loaded.model.config.get_text_config()
    if before is not None:
        _check_shape(name, config, before)
    if prompt is not None:
        content = texts.from_prompt(prompt)
    else:
        content = texts.built_in() if text is None else texts.from_file(text)
    positions = position_count(loaded.model)
    if max_tokens is None:  # the second model reads as many as the first has read
        max_tokens = before.tokens if before else min(MAX_TOKENS, positions or MAX_TOKENS)
    if positions is not None and max_tokens > positions:
        raise InputError(
            f"{max_tokens:,} tokens were asked for, but {name} has {positions:,} positions. "
            f"Ask for {positions:,} or fewer."
        )
    tokens = texts.tokenize(loaded.tokenizer, content, max_tokens)
    advance(f"{name} reads {len(tokens.ids):,} tokens", begun + 0.1)
    loaded.model.eval()
    with torch.inference_mode(), watch(loaded.model) as heads:
        input_ids = torch.tensor([tokens.ids], device=loaded.model.device)
        loaded.model.base_model(input_ids=input_ids, use_cache=False)
    return heads.record(name)


def _check_shape(name: str, config: Any, before: HeadRecord) -> None:
    """Raise InputError where a model has other layers or heads than the one before."""
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    most = max(map(len, before.heads))
    if (layers, heads) != (len(before.layers), most):
        raise InputError(
            f"{before.model} has {len(before.layers)} layers of {most} heads and {name} has "
            f"{layers} layers of {heads}. Heads are compared one by one: name two checkpoints of "
            "one architecture."
        )
