"""`multihead bench`: our attention timed against that of others."""

from __future__ import annotations

from typing import Annotated

import typer

from multihead.cli.app import Json, app

# As multihead.bench.suites has them, which would bring torch with it; a test compares.
SUITES = (
    "prefill",
    "window",
    "packed",
    "decode",
    "small",
    "grouped",
    "layer",
    "models",
    "generation",
    "agreement",
    "removal",
    "restriction",
    "overhead",
    "memory",
    "cost",
    "inspect",
    "corpus",
)


@app.command(short_help="Our attention timed against that of others.")
def bench(
    suite: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Run only this suite; may be given again. One of: " + ", ".join(SUITES) + ".",
            show_default=False,
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(metavar="ROW", help="Run only rows whose name has this.", show_default=False),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Small shapes and few rounds, to see that all works; measures nothing."
        ),
    ] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Keep the results in benchmarks/results.")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads for every contestant.", show_default="torch's number"),
    ] = None,
    json: Json = False,
) -> None:
    """Time our attention against others', alternated in one process and checked against float64.

    All suites take some ninety minutes on two cores. The peers that are not installed are listed
    as such; pip install 'multihead[bench]' brings those that are optional.
    """
    from multihead.bench.run import run

    run(suite or (), only=only, quick=quick, record=record, as_json=json, threads=threads)
