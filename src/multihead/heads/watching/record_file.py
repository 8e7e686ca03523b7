"""Records of heads on disk: arrays as safetensors, all else as JSON in the file's metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import InputError
from ...files import write_whole
from ...integrations.extras import import_extra
from .histogram import BINS, BINS_OF
from .statistics import STATISTICS
from .totals import StatisticTotals

if TYPE_CHECKING:
    from .record import HeadRecord

FORMAT = 1
_KEY = "multihead.heads"
_KINDS = {"model": str, "dtype": str, "backend": str, "tokens": int, "texts": int}
_KINDS |= {"layers": list, "heads": list, "bins": dict}


def save(record: HeadRecord, path: Path) -> None:
    """Write `record`: first beside `path`, then in its place."""
    arrays, facts = parts_of(record)
    write_tensors(path, arrays, {_KEY: facts})


def load(path: Path) -> HeadRecord:
    """Read what `save` wrote."""
    arrays, metadata = read_tensors(path)
    if _KEY not in metadata:
        raise InputError(
            f"{path} is no record of heads, but another safetensors file. Records are written by "
            "HeadRecord.save."
        )
    return of_parts(path, arrays, words_of(path, metadata[_KEY]))


def parts_of(record: HeadRecord) -> tuple[dict[str, Any], dict[str, Any]]:
    """A record as named arrays and JSON values."""
    arrays = {"queries": record.queries}
    for name, totals in record.totals.items():
        arrays |= {f"{name}.{it}": getattr(totals, it) for it in StatisticTotals.arrays()}
    return arrays, {
        "format": FORMAT,
        "model": record.model,
        "dtype": record.dtype,
        "backend": record.backend,
        "layers": record.layers,
        "heads": record.heads,
        "tokens": record.tokens,
        "texts": record.texts,
        "bins": {name: _bins(name) for name in record.totals},
    }


def of_parts(path: Path, arrays: dict[str, Any], facts: dict[str, Any]) -> HeadRecord:
    """The record that `parts_of` took apart; `path` is named in errors."""
    from .record import HeadRecord

    _check(path, facts)
    _check_kinds(path, facts)
    heads = tuple(map(tuple, facts["heads"]))
    shape = (len(facts["layers"]), max(map(len, heads), default=0))
    try:
        queries = array_of(arrays, "queries", shape)
        totals = {
            name: StatisticTotals(
                **{
                    it: array_of(
                        arrays, f"{name}.{it}", (*shape, BINS) if it == "histogram" else shape
                    )
                    for it in StatisticTotals.arrays()
                }
            )
            for name in facts["bins"]
        }
    except (KeyError, ValueError) as error:
        raise InputError(f"{path} is damaged: {error} is missing or of another shape.") from error
    return HeadRecord(
        **{name: facts[name] for name in ("model", "dtype", "backend", "tokens", "texts")},
        layers=tuple(facts["layers"]),
        heads=heads,
        queries=queries,
        totals={name: totals[name] for name in STATISTICS if name in totals},
    )


def write_tensors(path: Path, arrays: dict[str, Any], facts: dict[str, dict[str, Any]]) -> None:
    """Arrays and JSON values as a safetensors file, whole or not at all."""
    safetensors = import_extra("safetensors.numpy")
    metadata = {key: json.dumps(value) for key, value in facts.items()}
    write_whole(path, safetensors.save(arrays, metadata=metadata))


def read_tensors(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The arrays and the metadata of a safetensors file."""
    safe_open = import_extra("safetensors").safe_open
    if not path.is_file():
        raise InputError(f"There is no file {path}.")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118
    except Exception as error:  # safetensors raises a class of its own, and OSError
        raise InputError(f"{path} is no record of heads: {error}") from error


def words_of(path: Path, text: str) -> dict[str, Any]:
    """What a file says of its record, from its metadata; InputError where it is damaged."""
    try:
        facts = json.loads(text)
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        raise InputError(f"{path} is damaged: what it says of its record is no JSON object.")
    return facts


def _check_kinds(path: Path, facts: dict[str, Any]) -> None:
    for name, kind in _KINDS.items():
        if not isinstance(facts.get(name), kind):
            raise InputError(f"{path} is damaged: it does not say the {name} of its record.")
    lists = [it for it in facts["heads"] if isinstance(it, list)]
    if not len(lists) == len(facts["heads"]) == len(facts["layers"]):
        raise InputError(f"{path} is damaged: it does not say the heads of every layer.")


def _check(path: Path, facts: dict[str, Any]) -> None:
    bins: dict[str, Any] = facts.get("bins", {})
    known = facts.get("format") == FORMAT and set(bins) <= set(STATISTICS)
    if not known or any(bins[name] != _bins(name) for name in bins):
        raise InputError(
            f"{path} was written by another version of multihead, whose statistics or bins are "
            "not those of this one. Record it again."
        )


def _bins(name: str) -> list[Any]:
    bins = BINS_OF[name]
    return [bins.scale.name, bins.low, bins.high, BINS]


def array_of(arrays: dict[str, Any], name: str, shape: tuple[int, ...]) -> Any:
    """An array of a file, read-only; KeyError or ValueError where it lacks it, or its shape."""
    array = arrays[name]
    if array.shape != shape:
        raise ValueError(name)
    array.flags.writeable = False
    return array
