"""`multihead prune`: a model without the heads that a text misses least, written to a folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multihead.cli.output import print_json, stdout_console
from multihead.cli.progress import Advance, progress
from multihead.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from multihead.heads.removing.removal import By, Removal

ROW = 512
LEAST_ROW = 32
RECORD = "multihead_prune.json"

_LOADING, _WRITING = 0.05, 0.97


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    keep: str
    text: Path | None
    out: Path
    by: By = "gate-gradient"
    max_tokens: int = 8192
    seed: int = 0


def run(model: str, options: Options, *, dtype: str, as_json: bool) -> None:
    """Prune `model` and print what that cost and gained.

    Raises:
        InputError: a share, a text or a folder that cannot be used.
        ModelError: a model that is not here or cannot be pruned.
        MissingExtraError: transformers or gguf is not installed.
    """
    keep = parse_share(options.keep)
    if options.text is not None and not options.text.exists():
        raise InputError(f"There is no text file {options.text}. Give the path of a UTF-8 text.")
    check_out(options.out)
    if options.seed and options.by != "random":
        raise InputError(f"--seed would do nothing: --by {options.by} draws nothing at random.")
    with progress() as advance:
        document = _prune(model, keep, options, dtype, advance)
    if as_json:
        print_json(document)
    else:
        from multihead.cli.terminal.pruning import print_removal

        print_removal(stdout_console(), document)


def _prune(
    name: str, keep: float, options: Options, dtype: str, advance: Advance
) -> dict[str, Any]:
    import torch

    from multihead.errors import ArgumentError
    from multihead.heads import text as texts
    from multihead.heads.removing.removal import remove
    from multihead.integrations import load

    text = texts.built_in() if options.text is None else texts.from_file(options.text)
    advance(f"loading {name}", 0.0)
    loaded = load(name, dtype=getattr(torch, dtype))
    tokens = texts.tokenize(loaded.tokenizer, text, options.max_tokens)
    longest = loaded.facts.context_length
    scored, tested = split_rows(tokens, ROW if longest is None else min(ROW, longest), text.source)

    def report(what: str, share: float) -> None:
        advance(what, _LOADING + (_WRITING - _LOADING) * share)

    try:
        removal = remove(
            loaded.model,
            scored,
            tested,
            keep=keep,
            by=options.by,
            seed=options.seed,
            report=report,
        )
    except ArgumentError as error:
        raise InputError(f"--keep {options.keep}: {error}") from error
    document = _document(loaded, options, text.source, dtype, removal)
    advance("writing the model", _WRITING)
    write(loaded, options.out, document)
    return document


def parse_share(text: str) -> float:
    """A share such as "70%" or "0.7". Raises InputError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(%?)", text.strip())
    share = float(match[1]) / (100 if match[2] else 1) if match else None
    if share is None or not 0 < share < 1:
        hint = " Did you mean 70%?" if match and not match[2] and 1 < float(match[1]) < 100 else ""
        hint = hint.replace("70", match[1]) if match else hint
        raise InputError(
            f"--keep {text} is no share of the heads to keep. Write one above 0% and below 100%, "
            f"such as 70% or 0.7.{hint}"
        )
    return share


def check_out(out: Path) -> None:
    """Raise InputError where the folder cannot be written, before any work."""
    if out.is_dir() and any(out.iterdir()):
        raise InputError(
            f"--out {out} is a folder with files in it, and nothing is overwritten. Name a new one."
        )
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file. Name a new folder.")
    parent = out.resolve().parent
    if not parent.is_dir():
        raise InputError(f"--out {out}: there is no folder {parent}.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"--out {out}: no permission to write in {parent}.")


def split_rows(tokens: Any, row: int, source: str) -> tuple[Tensor, Tensor]:
    """The first half of a text, and the second, as rows [n, length] of tokens.

    A token that the tokenizer puts before every text begins every row. Raises InputError for a text
    that is too short for two rows.
    """
    from multihead.heads import token_rows

    start = None if tokens.start_token is None else tokens.ids[0]
    ids = tokens.ids if start is None else tokens.ids[1:]
    extra = int(start is not None)
    row = min(row, len(ids) // 2 + extra)
    if row < LEAST_ROW:
        raise InputError(
            f"The text ({source}) is {len(ids)} tokens long, too short to score heads on one half "
            f"and to test on the other. Give {2 * LEAST_ROW} tokens at least; thousands tell more."
        )
    rows = len(ids) // (row - extra)
    pieces = token_rows(ids, row, rows, start=start)
    return pieces[: rows // 2], pieces[rows // 2 :]


def write(loaded: Any, out: Path, document: dict[str, Any]) -> None:
    """Write model, tokenizer and `document` to the folder `out`, whole or not at all.

    Raises:
        InputError: the disk refuses.
    """
    from safetensors import SafetensorError

    from multihead.integrations.loading import without_progress_bars

    target = out.resolve()
    try:
        part = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            with without_progress_bars():
                loaded.model.save_pretrained(part)
                loaded.tokenizer.save_pretrained(part)
            record = json.dumps(document, indent=2) + "\n"
            (part / RECORD).write_text(record, encoding="utf-8")
            part.chmod(0o777 & ~_umask())
            part.replace(target)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    except (OSError, SafetensorError) as error:  # the second is what a full disk gives for weights
        reason = (getattr(error, "strerror", None) or str(error)).lower().rstrip(".")
        raise InputError(f"--out {out} cannot be written: {reason}. Nothing is left.") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _document(
    loaded: Any, options: Options, source: str, dtype: str, removal: Removal
) -> dict[str, Any]:
    import torch

    return {
        "model": loaded.facts.name,
        "file": loaded.facts.file,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "text": source,
        "keep": options.keep,
        "seed": options.seed if options.by == "random" else None,
        "out": str(options.out),
        **removal.to_json(),
    }
