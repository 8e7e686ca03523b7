"""Pictures of what the terminal shows: each function draws on axes and returns them.

    from multihead.heads import figures
    axes = figures.grid(record, "entropy")
    axes.figure.savefig("entropy.png")

Without `axes` a function makes a figure of its own by matplotlib.pyplot; none shows or saves it.
All need the package matplotlib (extra `plot`) and raise MissingExtraError where it is not
installed, and ArgumentError for a statistic, a head or a table that there is not.

Shape suffixes: l layer, h head, r row bin, c column bin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from ..errors import ArgumentError
from ..ops.pooling import LIFT_BITS
from .drawing import (
    COLORS,
    EMPTY,
    Head,
    Source,
    bars,
    check_head,
    checked_table,
    head_numbers,
    heads_image,
    label_of,
    layers_and_heads,
    new_axes,
    norm_of,
    plain,
    record_place,
    title_of,
    token_name,
)
from .inspecting.inspection import Inspection
from .watching.histogram import BINS_OF
from .watching.record import HeadRecord

if TYPE_CHECKING:
    from .comparing.similarity import Linkage, Similarity
    from .probing.roles import Roles
    from .restricting.streaming import StreamingHeads
    from .watching.comparison import Comparison

__all__ = [
    "comparison",
    "distances",
    "grid",
    "histogram",
    "pooled_map",
    "ranking",
    "readers",
    "removal",
    "restriction",
    "roles",
    "top_keys",
]

MapKind = Literal["mass", "peak", "lift"]


def grid(source: Source, statistic: str, *, axes: Any = None) -> Any:
    """One statistic of every head in color: layers across, heads down.

    Shares are drawn from 0 to 1, distances and numbers of keys on a logarithmic scale; a head
    without a value stays gray.
    """
    table_lh = checked_table(source, statistic)
    axes = new_axes(axes, (2.2 + 0.24 * table_lh.shape[0], 1.3 + 0.24 * table_lh.shape[1]))
    norm = norm_of(table_lh, statistic)
    heads_image(axes, table_lh, head_numbers(source), label_of(statistic), norm=norm)
    axes.set_title(title_of(source), fontsize="medium")
    return axes


def ranking(source: Source, statistic: str, count: int = 20, *, axes: Any = None) -> Any:
    """The `count` heads that have most of a statistic, as bars, the largest on top."""
    if count < 1:
        raise ArgumentError(f"count must be at least 1; got {count}.")
    table_lh = checked_table(source, statistic)
    order = np.argsort(np.where(np.isnan(table_lh), np.inf, -table_lh), axis=None, kind="stable")
    total = int(np.isfinite(table_lh).sum())
    places = [np.unravel_index(it, table_lh.shape) for it in order[: min(count, total)]]
    numbers = head_numbers(source)
    axes = new_axes(axes, (5, 1.2 + 0.22 * len(places)))
    values = [float(table_lh[place]) for place in places]
    names = [f"L{layer}H{numbers[column]}" for layer, column in places]
    bars(axes, names, values, label_of(statistic))
    axes.set_title(f"{title_of(source)}: {len(places)} of {total} heads", fontsize="medium")
    return axes


def histogram(
    record: HeadRecord, statistic: str, heads: Sequence[Head], *, axes: Any = None
) -> Any:
    """How the queries of some heads (layer, head) are spread over a statistic.

    Each is drawn as density over the record's own bins, those that are empty at both ends left out.
    """
    checked_table(record, statistic)
    if not heads:
        raise ArgumentError("heads is empty; name at least one as (layer, head).")
    places = [record_place(record, head) for head in heads]
    totals, edges = record.totals[statistic], BINS_OF[statistic].edges
    axes = new_axes(axes, (6, 3.5))
    for number, (head, place) in enumerate(zip(heads, places, strict=True)):
        counts = totals.histogram[place]
        filled = np.flatnonzero(counts)
        if not len(filled):
            continue
        shown = slice(int(filled[0]), int(filled[-1]) + 1)
        bounds = edges[shown.start : shown.stop + 1].copy()
        # The outermost bins are open: they end where the values do.
        if shown.start == 0:
            bounds[0] = min(bounds[0], totals.lowest[place])
        if shown.stop == len(counts):
            bounds[-1] = max(bounds[-1], totals.highest[place])
        density = counts[shown] / (counts.sum() * np.diff(bounds))
        name = f"L{head[0]}H{head[1]} ({int(counts.sum()):,} queries)"
        color = COLORS[number % len(COLORS)]
        axes.stairs(density, bounds, color=color, label=name, linewidth=1.4)
    plain(axes, label_of(statistic, of_queries=True), "density of queries")
    axes.legend(frameon=False)
    axes.set_title(title_of(record), fontsize="medium")
    return axes


def pooled_map(
    inspection: Inspection, layer: int, head: int, kind: MapKind = "mass", *, axes: Any = None
) -> Any:
    """The whole matrix of weights of a head, pooled to bins of queries (down) and keys (across).

    "mass" is the weight a bin of keys gets from a query, "peak" the largest single weight, both
    colored by their root, so that small ones stay visible; "lift" is log2 of the mass over that of
    a head without preferences. What the mask hides stays gray.
    """
    if kind not in get_args(MapKind):
        raise ArgumentError(f"kind must be one of {', '.join(get_args(MapKind))}; got {kind!r}.")
    if not inspection.maps:
        raise ArgumentError(
            "The inspection has no maps; make it with inspect_model(..., report=True)."
        )
    check_head(inspection, layer, head)
    axes = new_axes(axes, (4.6, 4))
    colors = import_module("matplotlib.colors")
    cells_rc = inspection.maps["peak" if kind == "peak" else "mass"][layer, head]
    if kind == "lift":
        with np.errstate(divide="ignore"):
            lift_rc = np.log2(cells_rc / inspection.maps["uniform"])
        cells_rc = lift_rc.clip(-LIFT_BITS, LIFT_BITS)
        norm, cmap = colors.Normalize(-LIFT_BITS, LIFT_BITS), "RdBu_r"
    else:
        norm, cmap = colors.PowerNorm(0.5, 0.0, 1.0), "viridis"
    length = len(inspection.tokens)
    names = {"mass": "weight of a bin", "peak": "largest weight", "lift": "lift (bits)"}
    image = axes.imshow(
        np.ma.masked_invalid(cells_rc),
        cmap=cmap,
        norm=norm,
        extent=(0, length, length, 0),
        interpolation="nearest",
    )
    axes.set_facecolor(EMPTY)
    axes.figure.colorbar(image, ax=axes, label=names[kind])
    axes.set_xlabel("key (token)")
    axes.set_ylabel("query (token)")
    axes.set_title(f"L{layer}H{head}\n{title_of(inspection)}", fontsize="medium")
    return axes


def readers(inspection: Inspection, count: int = 8, *, axes: Any = None) -> Any:
    """What the inspection's token reads: how many heads rank each key first, as bars.

    The keys are the `count` that most heads rank first.
    """
    if count < 1:
        raise ArgumentError(f"count must be at least 1; got {count}.")
    token = inspection.token
    first_lh = token.top_keys[..., 0]
    keys, heads = np.unique(first_lh[first_lh >= 0], return_counts=True)
    order = np.argsort(-heads, kind="stable")[:count]
    names = [token_name(inspection, int(keys[it])) for it in order]
    axes = new_axes(axes, (5, 1.2 + 0.26 * len(names)))
    bars(axes, names, [int(heads[it]) for it in order], "heads that rank the key first")
    total = int((first_lh >= 0).sum())
    axes.set_title(
        f"{token_name(inspection, token.index)}: {total} heads, {len(keys)} first keys",
        fontsize="medium",
        parse_math=False,
    )
    return axes


def top_keys(inspection: Inspection, layer: int, head: int, *, axes: Any = None) -> Any:
    """The keys to which one head gives most for the inspection's token, and what is left over."""
    check_head(inspection, layer, head)
    token = inspection.token
    keys, weights = token.top_keys[layer, head], token.top_weights[layer, head]
    shown = [(int(key), float(it)) for key, it in zip(keys, weights, strict=True) if key >= 0]
    names = [token_name(inspection, key) for key, _ in shown]
    values = [it for _, it in shown]
    axes = new_axes(axes, (5, 1.4 + 0.26 * len(names)))
    bars(axes, [*names, "all others"], [*values, max(0.0, 1 - sum(values))], "weight")
    axes.patches[-1].set_color("#999999")
    axes.set_xlim(0, 1)
    title = f"L{layer}H{head} at {token_name(inspection, token.index)}"
    axes.set_title(title, fontsize="medium", parse_math=False)
    return axes


def removal(
    counts: Sequence[int], losses: Mapping[str, Sequence[float]], *, axes: Any = None
) -> Any:
    """Loss against the number of units removed, a line for each order of removal.

    `losses` holds under the name of an order what `removal_curve` gave for these `counts`.
    """
    wrong = [name for name, line in losses.items() if len(line) != len(counts)]
    if wrong or not losses:
        got = f"{len(losses[wrong[0]])} under {wrong[0]!r}" if wrong else "none"
        raise ArgumentError(
            f"losses must hold one loss for each of the {len(counts)} counts; got {got}."
        )
    axes = new_axes(axes, (6, 4))
    for number, (name, line) in enumerate(losses.items()):
        axes.plot(counts, line, "o-", color=COLORS[number % len(COLORS)], label=name)
    plain(axes, "units removed", "loss (nats a token)")
    axes.legend(frameon=False)
    return axes


def restriction(found: StreamingHeads, *, axes: Any = None) -> Any:
    """Change of the loss against the number of restricted units, as `streaming` tried them.

    Dots were tried where the number was chosen; the cross and the bars are the held-out text's:
    the chosen units, and as many drawn at random.
    """
    axes = new_axes(axes, (6, 4))
    tried = sorted(found.tried)
    axes.plot(*zip(*tried, strict=True), "o-", color=COLORS[0], label="tried, by far mass")
    axes.axhline(found.max_loss, color="#999999", linestyle="--", label="allowed")
    axes.plot([found.chosen], [found.change], "X", color=COLORS[3], ms=10, label="held-out text")
    axes.plot(
        [found.chosen] * len(found.random_changes),
        found.random_changes,
        "_",
        color=COLORS[1],
        ms=14,
        mew=2,
        label="held-out text, at random",
    )
    what = "KV heads" if found.unit == "kv" else "heads"
    window = f"{found.windows.window} keys and the first {found.windows.keep_first}"
    plain(axes, f"{what} of {found.units} that see {window}", "change of loss (nats a token)")
    axes.legend(frameon=False)
    return axes


def roles(found: Roles, *, axes: Any = None) -> Any:
    """The roles of every head: layers across, heads down; a head with several is striped."""
    names = [name for name in found.scores if found.having(name)]
    most = max(map(len, found.heads))
    axes = new_axes(axes, (3.2 + 0.26 * len(found.heads), 1.3 + 0.26 * most))
    patches = import_module("matplotlib.patches")
    for layer, heads in enumerate(found.heads):
        for head, held in enumerate(heads):
            corner = layer - 0.45, head - 0.45
            axes.add_patch(patches.Rectangle(corner, 0.9, 0.9, color=EMPTY, linewidth=0))
            width = 0.9 / max(1, len(held))
            for place, role in enumerate(held):
                stripe = corner[0] + place * width, corner[1]
                color = COLORS[names.index(role.name) % len(COLORS)]
                axes.add_patch(patches.Rectangle(stripe, width, 0.9, color=color, linewidth=0))
    keys = [
        patches.Patch(
            color=COLORS[number % len(COLORS)],
            label=f"{name.replace('_', ' ')} ({len(found.having(name))})",
        )
        for number, name in enumerate(names)
    ]
    axes.set_xlim(-0.5, len(found.heads) - 0.5)
    axes.set_ylim(most - 0.5, -0.5)
    axes.set_aspect("equal")
    layers_and_heads(axes, len(found.heads), list(range(most)))
    if keys:
        axes.legend(
            handles=keys,
            frameon=False,
            loc="upper left",
            bbox_to_anchor=(1.0, 1.0),
            fontsize="small",
        )
    return axes


def comparison(found: Comparison, statistic: str, *, axes: Any = None) -> Any:
    """What one statistic gained (red) or lost (blue) in every head, from here to there."""
    differences = found.of(statistic)
    if not differences:
        known = ", ".join(dict.fromkeys(it.statistic for it in found)) or "none"
        raise ArgumentError(f"The comparison has no statistic {statistic!r}; it has {known}.")
    layers = 1 + max(it.layer for it in differences)
    numbers = sorted({it.head for it in differences})
    table_lh = np.full((layers, len(numbers)), np.nan)
    for it in differences:
        table_lh[it.layer, numbers.index(it.head)] = it.difference
    axes = new_axes(axes, (2.2 + 0.24 * layers, 1.3 + 0.24 * len(numbers)))
    most = float(np.nanmax(np.abs(table_lh), initial=0.0)) or 1.0
    norm = import_module("matplotlib.colors").Normalize(-most, most)
    label = f"change of {label_of(statistic)}"
    heads_image(axes, table_lh, numbers, label, norm=norm, cmap="RdBu_r")
    axes.set_title(f"{found.here} → {found.there}", fontsize="medium")
    return axes


def distances(
    found: Similarity, threshold: float = 0.2, linkage: Linkage = "average", *, axes: Any = None
) -> Any:
    """Distances between all heads, those of a group side by side, the groups framed.

    The groups, the largest first, are those of `found.groups(threshold, linkage)`; then come the
    heads that stand alone, in the model's order.
    """
    groups = found.groups(threshold, linkage)
    order = [head for group in groups for head in group.heads]
    order += [head for head in found.heads if head not in set(order)]
    places = [found.heads.index(head) for head in order]
    axes = new_axes(axes, (5.2, 4.4))
    table = found.distances[np.ix_(places, places)]
    image = axes.imshow(table, cmap="viridis_r", vmin=0.0, vmax=1.0, interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, label="Jensen-Shannon distance")
    patches, begin = import_module("matplotlib.patches"), 0
    for group in groups:
        corner = (begin - 0.5, begin - 0.5)
        frame = patches.Rectangle(corner, len(group), len(group), fill=False, color=COLORS[3])
        axes.add_patch(frame)
        begin += len(group)
    axes.set_xlabel("head, by group")
    axes.set_ylabel("head, by group")
    axes.set_title(
        f"{len(found.heads)} heads, groups at {threshold:g} ({linkage}): {len(groups)}",
        fontsize="medium",
    )
    return axes
