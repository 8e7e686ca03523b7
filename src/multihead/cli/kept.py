"""`multihead inspect FILE`: what an earlier reading of a corpus kept with --out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from multihead.cli.inspect import parse_head
from multihead.cli.output import print_json, stdout_console
from multihead.cli.statistics import DEFAULT, StatisticName
from multihead.errors import InputError

if TYPE_CHECKING:
    from multihead.heads import CorpusRecord

_SUFFIX = ".safetensors"
_BUILT_IN = "smollm2"  # a model, whatever lies in the working directory
_GGUF = b"GGUF"


def is_kept(model: str) -> bool:
    """Whether what stands for a model is a record: no model but a GGUF file is a lone file."""
    if model == _BUILT_IN:
        return False
    path = Path(model).expanduser()
    try:
        if path.is_file():
            with path.open("rb") as file:
                return file.read(len(_GGUF)) != _GGUF
    except OSError:  # no name that a file can have, or none to read
        pass
    return path.suffix == _SUFFIX


def refuse_record(other: str) -> None:
    """Raise InputError where a model shall be compared with a record: before any work."""
    if is_kept(other):
        raise InputError(
            f"--compare {other} is a record, which is compared with another record: "
            f"multihead inspect RECORD --compare {other}."
        )


def run(
    path: str,
    *,
    compare: str | None,
    head: str | None,
    sort: StatisticName,
    as_json: bool,
    given: Mapping[str, bool],
) -> None:
    """Print the record at `path`, or with `compare` what differs from the record there.

    `given` says of each option that a record leaves nothing to do whether it was given.

    Raises:
        InputError: an option that is for reading, a file that keeps no record, a head that there
            is not, or records of different heads.
        MissingExtraError: safetensors is not installed.
    """
    for option, wanted in given.items():
        if wanted:
            raise InputError(
                f"{option} is for reading, but {path} keeps what was read. Leave it out, or name "
                "a model."
            )
    place = None if head is None else parse_head(head)
    record = _load(path)
    if compare is not None:
        _compare(record, compare, head is not None or sort != DEFAULT, as_json)
        return
    if place is not None:
        _check_head(record, *place)
    if as_json:
        print_json(record.to_json())
    else:
        from multihead.cli.terminal.corpus import print_corpus

        print_corpus(stdout_console(), record, sort=sort, head=place)


def _compare(record: CorpusRecord, other: str, chosen: bool, as_json: bool) -> None:
    if not is_kept(other):
        raise InputError(
            f"--compare {other}: a record is compared with another one, a file that "
            "`multihead inspect --text ... --out FILE` kept."
        )
    if chosen:
        raise InputError("--head and --sort are about one record; --compare has two. Leave it out.")
    there = _load(other)
    if (record.heads.layers, record.heads.heads) != (there.heads.layers, there.heads.heads):
        raise InputError(
            f"{record.heads.model} and {there.heads.model} differ in their layers or heads, which "
            "are compared one by one: name records of two checkpoints of one architecture, or of "
            "two texts."
        )
    from multihead.cli.compare import print_records

    print_records(record.heads, there.heads, as_json=as_json)


def _load(path: str) -> CorpusRecord:
    from multihead.heads import CorpusRecord

    return CorpusRecord.load(Path(path).expanduser())


def _check_head(record: CorpusRecord, layer: int, head: int) -> None:
    heads = record.heads.heads
    if not (layer < len(heads) and head < len(heads[layer])):
        raise InputError(
            f"There is no head L{layer}H{head} in {record.heads.model}: it has {len(heads)} layers "
            f"of {max(map(len, heads))} heads, counted from 0."
        )
