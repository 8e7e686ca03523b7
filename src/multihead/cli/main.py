"""The entry point: runs the command line and turns every error into one paragraph.

Exit status: 0 done, 1 failure, 2 bad usage (an option, or a text, token or path that was given),
130 interrupted.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Sequence

from multihead.errors import InputError, MultiheadError

_EXTRA = ("typer", "rich")
_SHOW_TRACEBACK = "MULTIHEAD_TRACEBACK"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (the process's own when None) and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        _complain(
            f"the command line needs {' and '.join(missing)}; "
            "install with: pip install 'multihead[cli]'"
        )
        return 1
    _survive_narrow_encodings()
    try:
        from multihead.cli.commands import app

        status = app(arguments or ["--help"], prog_name="multihead", standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except BrokenPipeError:
        # The reader (`| head`) has gone: nobody is left to tell, also not at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except InputError as error:
        _complain(str(error))
        return 2
    except MultiheadError as error:
        _complain(str(error))
        return 1
    except Exception as error:
        if _is_out_of_memory(error):
            _complain(
                "out of memory. Fewer tokens at once need less: see --max-tokens, and for a corpus "
                "--context."
            )
            return 1
        return _other(error)


def _is_out_of_memory(error: Exception) -> bool:
    """Python's own error, or torch's, which has no class for memory of the CPU."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def _other(error: Exception) -> int:
    # Usage errors come from typer, whose classes moved between versions: known by what they carry.
    message = getattr(error, "format_message", None)
    if message is not None:
        # "Value error, " is how pydantic, under typer, begins.
        text = message().replace("Value error, ", "").rstrip(". \n")
        _complain(f"{text}. See: multihead --help")
        return int(getattr(error, "exit_code", 2))
    if type(error).__name__ == "Abort":
        return 130
    if os.environ.get(_SHOW_TRACEBACK):
        traceback.print_exception(error)
    _complain(
        f"unexpected {type(error).__name__}: {error}. This is a fault of multihead's own; "
        f"{_SHOW_TRACEBACK}=1 shows where it happened."
    )
    return 1


def _complain(message: str) -> None:
    """Write one paragraph to stderr, wrapped where a terminal shows it."""
    lines = (line.strip() for line in f"multihead: {message}".splitlines())
    text = " ".join(line for line in lines if line)
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        text = textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
    print(text, file=sys.stderr)


def _survive_narrow_encodings() -> None:
    """A stream that cannot write a character of a token shows `?` rather than failing."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
