"""Records of corpora on disk, finished ones and those that a reading goes on from."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...errors import InputError
from ..watching.record import HeadRecord
from ..watching.record_file import (
    array_of,
    of_parts,
    parts_of,
    read_tensors,
    words_of,
    write_tensors,
)
from .links import SampledLinks, StrongestLinks
from .record import CorpusFacts, CorpusRecord

FORMAT = 1
_KEY, _HEADS, _STATE = "multihead.corpus", "multihead.heads", "multihead.corpus.unfinished"
_KINDS: dict[str, type[StrongestLinks] | type[SampledLinks]] = {
    "strongest": StrongestLinks,
    "sampled": SampledLinks,
}


def save(record: CorpusRecord, path: Path, *, unfinished: bool = False) -> None:
    """Write `record` in the place of `path`, whole or not at all."""
    arrays, heads = parts_of(record.heads)
    arrays["firsts"] = record.firsts
    for kind in _KINDS:
        links = getattr(record, kind)
        arrays |= {f"{kind}.{name}": getattr(links, name) for name in links.names()}
    facts = {
        "format": FORMAT,
        "facts": asdict(record.facts),
        "names": {str(number): name for number, name in record.names.items()},
        "pieces": {str(token): piece for token, piece in record.pieces.items()},
    }
    state: dict[str, dict[str, Any]] = {_STATE: {}} if unfinished else {}
    write_tensors(path, arrays, {_KEY: facts, _HEADS: heads, **state})


def load(path: Path, *, unfinished: bool = False) -> CorpusRecord:
    """Read what `save` wrote; InputError for a file of the other kind."""
    arrays, metadata = read_tensors(path)
    _check_kind(path, metadata, unfinished)
    content = words_of(path, metadata[_KEY])
    if content.get("format") != FORMAT:
        raise InputError(f"{path} was written by another version of multihead. Read it again.")
    heads = of_parts(path, arrays, words_of(path, metadata.get(_HEADS, "")))
    try:
        facts = content["facts"] | {"special": tuple(content["facts"]["special"])}
        links: dict[str, Any] = {kind: _links(arrays, kind, heads) for kind in _KINDS}
        return CorpusRecord(
            heads=heads,
            facts=CorpusFacts(**facts),
            firsts=array_of(arrays, "firsts", heads.queries.shape),
            **links,
            names={int(number): name for number, name in content["names"].items()},
            pieces={int(token): piece for token, piece in content["pieces"].items()},
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path} is damaged: a part of it is missing or of another kind ({error})."
        ) from error


def _check_kind(path: Path, metadata: dict[str, str], unfinished: bool) -> None:
    if _KEY not in metadata:
        raise InputError(
            f"{path} is no record of a corpus. Those are written by CorpusRecord.save."
        )
    if unfinished and _STATE not in metadata:
        raise InputError(f"{path} is a finished record, from which no reading goes on.")
    if not unfinished and _STATE in metadata:
        raise InputError(
            f"{path} is the state of an unfinished reading. read_corpus(..., state=...) with the "
            "same arguments goes on from it."
        )


def _links(arrays: dict[str, Any], kind: str, heads: HeadRecord) -> StrongestLinks | SampledLinks:
    """The arrays of one kind of links, of the shapes that those of these heads have."""
    none = _KINDS[kind].empty(*heads.queries.shape)
    found = {
        name: array_of(arrays, f"{kind}.{name}", getattr(none, name).shape) for name in none.names()
    }
    return _KINDS[kind](**found)
