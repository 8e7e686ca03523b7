"""The command line itself, and the options that several commands share."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
CacheKind = Literal["growing", "static", "window", "paged", "int8"]

app = typer.Typer(
    name="multihead",
    help="See and count what every attention head of a model does.",
    add_completion=False,
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")
]


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    from multihead import __version__

    typer.echo(f"multihead {__version__}")
    raise typer.Exit


@app.callback()
def common(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """See and count what every attention head of a model does."""
