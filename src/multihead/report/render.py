"""Write an inspection as one HTML file that needs nothing else and asks for nothing.

The script and the style are the files in `assets`, inlined. Everything that comes from the model
or from the text travels as JSON, in which no `<` is left, and reaches the page as text only.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from multihead.errors import InputError
from multihead.files import write_whole
from multihead.ops.pooling import bin_edges
from multihead.report.pack import pack_linear, pack_log, pack_raw, without_sinks

if TYPE_CHECKING:
    from multihead.heads.inspecting.inspection import Inspection

# One module each; a file imports only from those before it.
SCRIPTS = (
    "dom.js",
    "format.js",
    "color.js",
    "data.js",
    "statistics.js",
    "token.js",
    "grid.js",
    "table.js",
    "map.js",
    "strips.js",
    "links.js",
    "head.js",
    "provenance.js",
    "main.js",
)

STYLES = (
    "base.css",
    "token.css",
    "overview.css",
    "figure.css",
    "links.css",
    "made.css",
    "print.css",
)


def render(inspection: Inspection, path: str | os.PathLike[str]) -> Path:
    """Write the page of `inspection` to `path`, whole or not at all, and return the path.

    Raises InputError where the file cannot be written, or where the inspection has no maps.
    """
    target = Path(path)
    write_whole(target, page(inspection).encode("utf-8", errors="replace"), "The report")
    return target


def page(inspection: Inspection) -> str:
    """Return the page of `inspection` as one HTML document.

    Its size depends on layers x heads and on the text, not on the square of the context.
    Raises InputError where the inspection was made without maps.
    """
    script = _script()
    style = "\n".join(_asset(name) for name in STYLES)
    parts = {
        "title": html.escape(f"Every head of {inspection.provenance.get('model', 'the model')}"),
        "policy": (
            f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
            "base-uri 'none'; form-action 'none'"
        ),
        "style": style,
        "data": _json(contents(inspection)),
        "script": script,
    }
    # In one pass, so that a text which contains {{script}} stays a text.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("report.html"))


def contents(inspection: Inspection) -> dict[str, object]:
    """Return what the page shows, as JSON values; arrays are packed (see `report.pack`).

    Raises InputError where the inspection was made without maps.
    """
    sinks, received = inspection.sinks, inspection.received
    if not inspection.maps or sinks is None or received is None:
        raise InputError("The report needs the heads' maps, and this inspection was made without.")
    length = len(inspection.tokens)
    uniform = np.asarray(inspection.maps["uniform"])
    visible = np.isfinite(uniform)
    map_edges = bin_edges(length, uniform.shape[-1])
    columns = [int(column) for column in sinks.columns]
    sink_strips = np.asarray(sinks.strips)
    rest = without_sinks(inspection.maps["mass"], sink_strips, columns, map_edges)
    strips = {name: np.asarray(values) for name, values in inspection.strips.items()}
    strip_bins = next(iter(strips.values())).shape[-1]
    token, links = inspection.token, inspection.links
    return {
        "provenance": {**inspection.provenance, "file": _file_name(inspection.provenance)},
        "cost": dict(inspection.cost),
        "tokens": list(inspection.tokens),
        "layers": inspection.layers,
        "heads": inspection.heads,
        "kvHeads": inspection.kv_heads,
        "statistics": {
            name: pack_raw(np.asarray(values, dtype=np.float32))
            for name, values in inspection.statistics.items()
        },
        "token": {
            "index": int(token.index),
            "keys": pack_raw(np.asarray(token.top_keys)),
            "weights": pack_raw(np.asarray(token.top_weights, dtype=np.float32)),
            "meanKeys": pack_raw(np.asarray(token.mean_top_keys)),
            "meanWeights": pack_raw(np.asarray(token.mean_top_weights, dtype=np.float32)),
        },
        "map": {
            "edges": map_edges,
            "uniform": pack_raw(uniform.astype(np.float32)),
            # Only cells that a query can see are kept, in the order of `uniform`'s finite ones.
            "rest": pack_log(rest[..., visible]),
            "peak": pack_log(np.asarray(inspection.maps["peak"])[..., visible], bits=8),
        },
        "sinks": {
            "columns": columns,
            "mean": pack_raw(np.asarray(sinks.mean, dtype=np.float32)),
            "strips": pack_log(sink_strips),
        },
        "strips": {
            "edges": bin_edges(length, strip_bins),
            **{name: pack_linear(values) for name, values in strips.items()},
        },
        "received": {
            "edges": bin_edges(length, received.shape[-1]),
            "mean": pack_log(np.asarray(received)),
        },
        "links": {
            "rows": [int(row) for row in links.rows],
            "keys": pack_raw(np.asarray(links.keys)),
            "weights": pack_log(np.asarray(links.weights)),
        },
    }


def _file_name(provenance: Mapping[str, object]) -> str | None:
    """The model's file without its folders: a page is passed on, and they say who made it."""
    file = provenance.get("file")
    return re.split(r"[\\/]", str(file))[-1] if file else None


def _json(value: object) -> str:
    text = json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _finite(value: object) -> object:
    """Give JSON values for `value`: NaN and infinities, which JSON has no word for, become null."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, np.generic):
        return _finite(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _script() -> str:
    """Join the modules into one: inside a single file there is nothing to import from."""
    modules = [_asset(name) for name in SCRIPTS]
    joined = "\n".join(re.sub(r"^import [^;]*;\n", "", text, flags=re.M) for text in modules)
    return re.sub(r"^export ", "", joined, flags=re.M)


def _asset(name: str) -> str:
    return resources.files("multihead.report").joinpath("assets", name).read_text("utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode()
    return f"sha256-{digest}"
