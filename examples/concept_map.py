"""The map of multi-head attention: each concept, what does it here, and the claim that shows it.

    python examples/concept_map.py

draws docs/images/concept-map.svg; docs/concept-map.md has the same as a table.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "concept-map.svg"


@dataclass(frozen=True, slots=True)
class Concept:
    """A node: its place, what does it, the claim that shows it, and the card that explains it."""

    name: str
    column: int
    row: int
    does: str
    claim: str
    card: str


CONCEPTS = (
    Concept(
        *("Self / cross", 1, 0, "multihead.MultiHeadAttention", "parameters"),
        "Self-attention or cross-attention?",
    ),
    Concept(
        *("Head size", 2, 0, "multihead.cost", "head_size"),
        "Why are heads mostly 64 to 128 wide?",
    ),
    Concept(
        *("Masks", 3, 0, "multihead.masks", "softmax_rows"),
        "How does a decoder keep from seeing the future?",
    ),
    Concept(
        *("Positions", 0, 1, "multihead.RoPE", "softmax_rows"),
        "Does attention know the order of the tokens?",
    ),
    Concept(
        *("Projections", 1, 1, "multihead.MultiHeadAttention", "parameters"),
        "How many parameters does it have?",
    ),
    Concept(
        *("Heads", 2, 1, "multihead.MultiHeadAttention", "reshape"),
        "How are heads split?",
    ),
    Concept(
        *("Attention", 3, 1, "multihead.attention", "one_ranking"),
        "Why several heads and not one wide one?",
    ),
    Concept(
        *("Cost", 0, 2, "multihead.cost", "crossover"),
        "From which length on is attention most of the work?",
    ),
    Concept(
        *("KV heads and cache", 1, 2, "multihead.KVCache", "kv_sharing"),
        "What are GQA and MQA?",
    ),
    Concept(
        *("O(N) memory", 2, 2, "multihead.ops", "linear_memory"),
        "Is FlashAttention an approximation?",
    ),
    Concept(
        *("W_O", 3, 2, "multihead.MultiHeadAttention", "identical_heads"),
        "What does W_O do?",
    ),
    Concept(
        *("Pruning", 1, 3, "multihead.heads", "pruning"),
        "Can heads be removed?",
    ),
    Concept(
        *("Visualization", 2, 3, "multihead.watch", "cat_mat"),
        "How do I see what heads do without storing N x N?",
    ),
    Concept(
        *("Encoder layer", 3, 3, "multihead.TransformerBlock", "language_heads"),
        "What stands around attention in an encoder layer?",
    ),
)

# From, to, and what the arrow says.
LINKS = (
    ("Self / cross", "Projections", "whose tokens"),
    ("Head size", "Heads", "d / h lanes"),
    ("Masks", "Attention", "who may see whom"),
    ("Positions", "Projections", "add, or rotate"),
    ("Projections", "Heads", "split"),
    ("Heads", "Attention", "a softmax each"),
    ("Attention", "W_O", "concatenate"),
    ("W_O", "Encoder layer", "norm, residual"),
    ("Projections", "KV heads and cache", "keep K and V"),
    ("KV heads and cache", "Cost", "bytes"),
    ("Projections", "Cost", "4 d^2"),
    ("Attention", "O(N) memory", "in blocks"),
    ("O(N) memory", "Visualization", "any piece"),
    ("Visualization", "Pruning", "which matter"),
)

_WIDE, _HIGH = 2.2, 0.95
_ACROSS, _DOWN = 3.5, 1.75


def digest() -> str:
    """What a picture of these concepts carries in its description."""
    return hashlib.sha256(repr((CONCEPTS, LINKS)).encode()).hexdigest()[:16]


def markdown() -> str:
    """The map as a table."""
    lines = ["| concept | what does it | claim that shows it | card |", "| --- | --- | --- | --- |"]
    for concept in CONCEPTS:
        card = f"[{concept.card}](questions.md#{anchor(concept.card)})"
        claim = f"[{concept.claim}](../examples/claims/{concept.claim}.py)"
        lines.append(f"| {concept.name} | `{concept.does}` | {claim} | {card} |")
    return "\n".join(lines) + "\n"


def anchor(title: str) -> str:
    """The address that Markdown gives a heading."""
    kept = "".join(c for c in title.lower() if c.isalnum() or c in "-_ ")
    return kept.replace(" ", "-")


def draw(path: Path = PICTURE) -> str:
    """Draw the map; say what was done, or why not."""
    try:
        import matplotlib
    except ImportError:
        return "Map: left as it is, since matplotlib is not installed"
    matplotlib.use("svg")
    from matplotlib import pyplot

    # The same map gives the same file: ids from a constant, no date, text as text.
    with pyplot.rc_context({"svg.hashsalt": "multihead", "svg.fonttype": "none", "font.size": 9}):
        figure, axes = pyplot.subplots(figsize=(9.8, 5.0), layout="constrained")
        draw_on(axes)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None, "Description": digest()})
        pyplot.close(figure)
    return f"Map: {path.name}"


def draw_on(axes: Any) -> None:
    """The boxes and arrows, on axes without a frame."""
    places = {c.name: (c.column * _ACROSS, -c.row * _DOWN) for c in CONCEPTS}
    for concept in CONCEPTS:
        _box(axes, concept, *places[concept.name])
    for start, end, said in LINKS:
        _arrow(axes, places[start], places[end], said)
    axes.text(
        *(-_WIDE / 2, -3 * _DOWN),
        "concept\nwhat does it here\nclaim that shows it",
        va="center",
        fontsize=7.5,
        color="#555555",
    )
    axes.set_xlim(-_WIDE / 2 - 0.1, 3 * _ACROSS + _WIDE / 2 + 0.3)
    axes.set_ylim(-3 * _DOWN - _HIGH / 2 - 0.1, _HIGH / 2 + 0.1)
    axes.set_aspect("equal")
    axes.axis("off")


def _box(axes: Any, concept: Concept, x: float, y: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    axes.add_patch(
        FancyBboxPatch(
            *((x - _WIDE / 2, y - _HIGH / 2), _WIDE, _HIGH),
            boxstyle="round,pad=0,rounding_size=0.12",
            facecolor="#eaf2f9",
            edgecolor="#0b5fa5",
        )
    )
    axes.text(x, y + 0.24, concept.name, ha="center", va="center", weight="bold", fontsize=9)
    axes.text(x, y - 0.04, concept.does, ha="center", va="center", fontsize=6.5, color="#0b5fa5")
    axes.text(x, y - 0.29, concept.claim, ha="center", va="center", fontsize=7, color="#8a3d08")


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], said: str) -> None:
    tail, head = _border(start, end), _border(end, start)
    axes.annotate("", head, tail, arrowprops={"arrowstyle": "-|>", "color": "#555555", "lw": 1})
    x, y = (tail[0] + head[0]) / 2, (tail[1] + head[1]) / 2
    if tail[1] == head[1]:
        place: dict[str, Any] = dict(x=x, y=y + 0.08, ha="center", va="bottom")
    elif tail[0] == head[0]:
        place = dict(x=x + 0.1, y=y, ha="left", va="center")
    else:
        place = dict(x=x - 0.2, y=y + 0.05, ha="right", va="bottom")
    axes.text(s=said, fontsize=7, color="#333333", **place)


def _border(of: tuple[float, float], towards: tuple[float, float]) -> tuple[float, float]:
    """Where the line between two boxes leaves the first."""
    dx, dy = towards[0] - of[0], towards[1] - of[1]
    share = min(
        _WIDE / 2 / abs(dx) if dx else float("inf"), _HIGH / 2 / abs(dy) if dy else float("inf")
    )
    return of[0] + share * dx, of[1] + share * dy


if __name__ == "__main__":
    print(draw())
