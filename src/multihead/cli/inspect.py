"""`multihead inspect`: one model, one text, every head."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multihead.cli.output import print_json, print_note, stdout_console
from multihead.cli.progress import progress
from multihead.cli.statistics import DEFAULT, StatisticName
from multihead.errors import InputError
from multihead.files import check_writable

if TYPE_CHECKING:
    from multihead.heads import Roles
    from multihead.heads.inspecting.inspection import Inspection

# Loading's share of the bar; the layers have the rest, or with roles up to the second.
_LOADING, _LAYERS_WITH_ROLES = 0.15, 0.5


def run(
    model: str,
    *,
    compare: str | None,
    text: Path | None,
    prompt: str | None,
    token: str | None,
    head: str | None,
    max_tokens: int | None,
    sort: StatisticName,
    dtype: str,
    report: Path | None,
    roles: bool,
    as_json: bool,
) -> None:
    """Inspect `model` and print the result; with `report`, also write the page.

    With `roles`, also probe the heads for theirs. With `compare`, compare the heads with those of
    that model instead.

    Raises:
        InputError: an option, a text, a token, a head or a path that cannot be used.
        ModelError: a model that is not here or cannot be inspected.
        MissingExtraError: transformers or gguf is not installed.
    """
    if text is not None and prompt is not None:
        raise InputError("--text and --prompt both give the text to read. Leave out one of them.")
    if compare is not None:
        _compare(
            model,
            compare,
            {
                "--token": token,
                "--head": head,
                "--sort": None if sort == DEFAULT else sort,
                "--report": report,
                "--roles": roles or None,
            },
            text=text,
            prompt=prompt,
            max_tokens=max_tokens,
            dtype=dtype,
            as_json=as_json,
        )
        return
    place = None if head is None else parse_head(head)
    if report is not None:
        check_writable(report, "--report", "heads.html")
    inspection, found = _inspect(
        model,
        text=text if prompt is None else prompt,
        token=token,
        place=place,
        max_tokens=max_tokens,
        dtype=dtype,
        maps=report is not None,
        roles=roles,
    )
    if report is not None:
        from multihead.report import render

        render(inspection, report)
    if as_json:
        also = {} if found is None else {"roles": found.to_json()}
        print_json({**inspection.to_json(), **also})
    else:
        from multihead.cli.terminal import print_inspection, print_roles

        console = stdout_console()
        print_inspection(console, inspection, sort=sort, head=place)
        if found is not None:
            print_roles(console, found, place)
    if report is not None:
        print_note(f"Report: {report}", aside=as_json)


def _compare(model: str, other: str, given: Mapping[str, object], **options: Any) -> None:
    """Compare two models, for which there are none of the options that are `given`."""
    for name, value in given.items():
        if value is not None:
            raise InputError(
                f"{name} is about one model; --compare has two. Leave out one of them."
            )
    from multihead.cli.compare import run as run_comparison

    run_comparison(model, other, **options)


def _inspect(
    name: str,
    *,
    text: Path | str | None,
    token: str | None,
    place: tuple[int, int] | None,
    max_tokens: int | None,
    dtype: str,
    maps: bool,
    roles: bool,
) -> tuple[Inspection, Roles | None]:
    layers_end = _LAYERS_WITH_ROLES if roles else 1.0
    with progress() as advance:
        import torch

        from multihead.heads.inspecting.inspection import inspect_model
        from multihead.integrations import load

        advance(f"loading {name}", 0.0)
        loaded = load(name, dtype=getattr(torch, dtype))
        if place is not None:
            check_head(place, loaded.model.config)

        def layer_done(done: int, layers: int) -> None:
            share = _LOADING + (layers_end - _LOADING) * done / layers
            advance(f"layer {done} of {layers}", share)

        advance("reading the text", _LOADING)
        inspection = inspect_model(
            loaded.model,
            loaded.tokenizer,
            text=text,
            token=token,
            max_tokens=max_tokens,
            report=maps,
            facts=loaded.facts,
            progress=layer_done,
        )
        if not roles:
            return inspection, None
        from multihead.heads import find_roles

        def probe_done(done: int, probes: int) -> None:
            advance(f"probe {done} of {probes}", layers_end + (1 - layers_end) * done / probes)

        return inspection, find_roles(loaded.model, tokenizer=loaded.tokenizer, progress=probe_done)


def parse_head(name: str) -> tuple[int, int]:
    """Layer and head of a name such as "L3H8". Raises InputError for anything else."""
    match = re.fullmatch(r"L(\d{1,6})H(\d{1,6})", name.strip(), flags=re.IGNORECASE | re.ASCII)
    if match is None:
        raise InputError(
            f"--head {name!r} is no head. Write its layer and its number in the layer, both from "
            "0: L3H8."
        )
    return int(match[1]), int(match[2])


def check_head(place: tuple[int, int], config: Any) -> None:
    """Raise InputError where the model of `config` has no such head."""
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    layer, head = place
    if layer >= layers or head >= heads:
        raise InputError(
            f"There is no head L{layer}H{head}: the model has layers L0 to L{layers - 1}, each "
            f"with heads H0 to H{heads - 1}."
        )
