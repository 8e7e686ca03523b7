"""`multihead doctor`: what this installation can do, and what is missing."""

from __future__ import annotations

from multihead.cli.app import Json, app


@app.command(short_help="What this installation can do, and what is missing.")
def doctor(json: Json = False) -> None:
    """Say what this machine and this installation can do, and what is missing."""
    from multihead.cli.doctor import run

    run(as_json=json)
