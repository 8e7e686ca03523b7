"""Pages that show what examples give show what they give today."""

import doctest
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import concept_map
import multihead as mh
import page as claims_page
import worked_example
import write_docs
from close import assert_close
from common_mistakes import MISTAKES
from mistake import Mistake, told


@pytest.mark.parametrize("name", write_docs.PAGES)
def test_a_page_is_what_its_example_gives(name: str) -> None:
    text = write_docs.path_of(name).read_text(encoding="utf-8")
    assert f"<!-- written: {name} -->" in text
    assert write_docs.fill(text) == text, "run `python examples/write_docs.py`"


def by_hand(causal: bool) -> torch.Tensor:
    """The pass once more, in float64, from the weights alone."""
    layer = worked_example.layer()
    query, key, value = (
        x.reshape(1, 3, 2, 2).transpose(1, 2)
        for x in layer.qkv_proj(worked_example.X[None]).chunk(3, dim=-1)
    )
    heads = mh.attention(
        query, key, value, mask=mh.Causal() if causal else None, backend="reference"
    )
    return layer.out_proj(heads.transpose(1, 2).flatten(2))[0]


@pytest.mark.parametrize(("step", "causal"), [("Mix with W_O", False), ("Under a causal", True)])
def test_the_hand_computed_output_is_the_librarys(step: str, causal: bool) -> None:
    (found,) = [s for s in worked_example.steps() if s.title.startswith(step)]
    name = "Y, causal" if causal else "Y"
    start = found.lines.index(name) + 1
    shown = [[float(x) for x in line.split()[1:]] for line in found.lines[start : start + 3]]
    expected = by_hand(causal).detach()
    assert torch.equal(torch.tensor(shown), (expected * 1e4).round().div(1e4).float())


def test_the_layer_of_the_worked_example_gives_its_numbers() -> None:
    x = worked_example.X[None]
    layer = worked_example.layer()
    expected = by_hand(causal=False)[None]
    baseline = layer.float()(x.float()).double()
    assert_close(worked_example.layer()(x), expected, baseline)


def test_every_number_of_the_worked_example_has_four_digits() -> None:
    shown = [
        line for step in worked_example.steps() for line in step.lines if line.startswith("  ")
    ]
    assert len(shown) > 50
    for line in shown:
        assert all(re.fullmatch(r"-?\d+\.\d{4}", number) for number in line.split()[1:]), line
    assert not any("-0.0000" in line for line in shown)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.title)
def test_the_mistake_is_wrong_and_the_remedy_right(mistake: Mistake) -> None:
    torch.manual_seed(0)
    ran = mistake.run()
    assert told(ran.right, ran.answer) == "as it should be"
    assert re.match(r"off by \d\d+%|NaN in \d+ of", told(ran.wrong, ran.answer))
    assert mistake.symptom
    assert mistake.remedy
    assert "Ran(wrong, right" in mistake.code


def test_mistakes_are_told_apart() -> None:
    one = torch.ones(2, 2).double()
    assert told(one, one) == "as it should be"
    assert told(1.5 * one, one) == "off by 50% of the answer's norm"
    assert told(one / 0 * 0, one) == "NaN in 4 of 4 numbers"
    assert told(one[0], one) == "a shape of [2] instead of [2, 2]"


# --- questions.md --------------------------------------------------------------------------------

QUESTIONS = (write_docs.DOCS / "questions.md").read_text(encoding="utf-8")
PREAMBLE, *CARDS = re.split(r"^## ", QUESTIONS, flags=re.MULTILINE)


def code_of(text: str) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.splitlines()[0])
def test_the_code_of_a_card_gives_what_stands_below_it(card: str) -> None:
    names: dict[str, object] = {}
    runner = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF)
    for text in (PREAMBLE, card):
        code = code_of(text)
        test = doctest.DocTestParser().get_doctest(code, names, card.splitlines()[0], None, None)
        assert test.examples, "a card has code"
        said: list[str] = []
        runner.run(test, out=said.append, clear_globs=False)
        names = test.globs
        assert runner.summarize(verbose=False).failed == 0, "".join(said)


def test_there_are_cards_enough() -> None:
    titles = [card.splitlines()[0] for card in CARDS]
    assert len(titles) == len(set(titles)) >= 20
    assert all(title.endswith("?") for title in titles)


COMMANDS = [
    (path.name, command)
    for path in sorted(write_docs.DOCS.glob("*.md"))
    for command in re.findall(
        r"`((?:python|multihead) [\w/ .-]+)`", path.read_text(encoding="utf-8")
    )
]


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_command_of_the_docs_exists(page: str, command: str) -> None:
    program, first, *_ = command.split()
    if program == "python":
        script = write_docs.ROOT / first.replace("NAME", "claim")
        assert script.exists() or script.stem in claims_page.ORDER, page
    else:
        from multihead.cli.commands import app

        assert first in {each.name or each.callback.__name__ for each in app.registered_commands}


# --- concept-map.md ------------------------------------------------------------------------------

CONCEPTS = concept_map.CONCEPTS


@pytest.mark.parametrize("concept", CONCEPTS, ids=lambda concept: concept.name)
def test_what_a_concept_names_exists(concept: concept_map.Concept) -> None:
    assert pkgutil.resolve_name(concept.does)
    assert concept.claim in claims_page.ORDER
    assert f"\n## {concept.card}\n" in QUESTIONS


def test_the_map_is_whole() -> None:
    names = [concept.name for concept in CONCEPTS]
    places = {(concept.column, concept.row) for concept in CONCEPTS}
    assert len(set(names)) == len(names) == len(places)
    linked = {end for start, to, _ in concept_map.LINKS for end in (start, to)}
    assert linked == set(names)
    assert {concept.claim for concept in CONCEPTS} >= set(claims_page.ORDER) - {"head_rank"}


def test_the_picture_is_that_of_the_map(tmp_path: Path) -> None:
    assert concept_map.digest() in concept_map.PICTURE.read_text(encoding="utf-8"), (
        "run `python examples/write_docs.py`"
    )
    pytest.importorskip("matplotlib")
    drawn = [tmp_path / "a.svg", tmp_path / "b.svg"]
    assert concept_map.draw(drawn[0]) == "Map: a.svg"
    concept_map.draw(drawn[1])
    assert drawn[0].read_bytes() == drawn[1].read_bytes()
