"""Roles of heads: planted heads are found, others are not, and scores are those of the matrix."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import families
import multihead as mh
import planted
import random_heads
import tiny
from multihead import heads
from multihead.heads.probing.probe_scores import ROLES, Score, Scores, measure
from multihead.heads.probing.probes import Frame, Probes, draw
from multihead.heads.probing.role_thresholds import (
    FALSE_POSITIVES,
    SHIPPED,
    from_random,
    random_copy,
)
from requires import require

SHORT = Probes(length=64, periods=(13, 23))
FRONT, BACK = 1, 2


def encode(text):
    """A token for each letter."""
    return [7 + ord(letter) % 50 for letter in text]


class Tokenizer:
    """Knows one token for a start and one for an end, and puts them around every text."""

    all_special_ids = (FRONT, BACK)

    def __call__(self, text, add_special_tokens=True):
        ids = encode(text)
        return {"input_ids": [FRONT, *ids, BACK] if add_special_tokens else ids}


@pytest.fixture(scope="module")
def found():
    return heads.find_roles(planted.planted_model(), tokenizer=Tokenizer(), seeds=(0, 1))


def test_planted_heads_are_found_and_others_are_not(found) -> None:
    for layer, names in enumerate(planted.PLANTED):
        for head, name in enumerate(names):
            roles = {role.name for role in found.of(layer, head)}
            assert roles == planted.ROLES[name], f"layer {layer} head {head}: {name}"


def test_planted_heads_have_the_scores_that_they_were_given(found) -> None:
    for name in ("previous_token", "induction", "duplicate_token", "first_key", "second_sink"):
        [(_, _, role)] = found.having(name)
        assert role.score > 0.98
        assert role.control < 0.02
    offsets = {role.offset for _, _, role in found.having("positional")}
    assert offsets == {-1, -planted.FAR}


def test_an_induction_head_needs_the_head_below_it() -> None:
    model = planted.planted_model()
    with torch.no_grad():
        model.blocks[0].attention.out_proj.weight.zero_()
    roles = heads.find_roles(model, probes=SHORT, seeds=(0,))
    assert not roles.having("induction")
    assert roles.having("previous_token")


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "bert"])
def test_scores_are_those_of_the_whole_matrix(family) -> None:
    require("models")
    probes = Probes(length=48, periods=(9, 17), reach=4)
    frame = Frame((FRONT,), (BACK,), (0, FRONT, BACK), encode)
    model = families.build(family)
    scores = measure(model, probes, (3, 4), frame).by_role
    expected = dense_scores(model.double(), probes, (3, 4), frame)
    assert set(scores) == set(ROLES) == set(expected)
    for name, (score, control) in expected.items():
        # Counts of strongest keys are whole; others are means of float32 weights.
        np.testing.assert_allclose(scores[name].score, score, atol=3e-6, err_msg=name)
        np.testing.assert_allclose(scores[name].control, control, atol=3e-6, err_msg=name)


def dense_scores(model, probes, seeds, frame):
    """Score and control of each role [layers, heads], from eager's own matrices in float64."""
    model.set_attn_implementation("eager")
    drawn = draw(model, probes, seeds, frame)

    def weights(token_ids):
        outputs = families.output(model, input_ids=token_ids, output_attentions=True)
        return torch.stack(outputs.attentions)  # [layers, batch, heads, query, key]

    def at(matrix, rows, offset):
        cells = [matrix[..., row, row + offset] for row in rows]
        return torch.stack(cells, -1).mean((1, -1))

    length, start, reach = probes.length, probes.counted_from, probes.reach
    middle = (start + length) // 2
    plain, framed = weights(drawn.plain), weights(drawn.framed)
    both_ways = bool((plain[..., 0, 1:] > 0).any())
    rows = range(start, length - 2 * reach + 1 if both_ways else length)
    offsets = [k for k in range(1 - 2 * reach, 2 * reach) if k <= 0 or both_ways]
    near = {offset: at(plain, rows, offset) for offset in offsets}
    others = torch.stack([near[offset] for offset in offsets if offset != -1])
    keys = plain[..., start:, :].mean((1, -2))
    texts = weights(drawn.texts)
    early = texts[..., start:middle, 1:start].mean(-2)
    late = texts[..., middle:, 1:start].mean(-2)
    sink = late.gather(-1, early.argmax(-1, keepdim=True))[..., 0]
    found = {
        "previous_token": (near[-1], others.amax(0)),
        "first_key": (keys[..., 0], keys[..., 1 : reach + 1].mean(-1)),
        "second_sink": (sink.mean(1), ((late.sum(-1) - sink) / (start - 2)).mean(1)),
        "local": (
            sum(near[offset] for offset in offsets if abs(offset) < reach),
            sum(near[offset] for offset in offsets if abs(offset) >= reach),
        ),
        "positional": of_fixed_offset(plain[..., start:, :], start),
    }
    between = [
        weights_[..., drawn.middle.stop : length - 1, drawn.middle] for weights_ in (framed, plain)
    ]
    found["special_token"] = tuple(cells.sum(-1).mean((1, -1)) for cells in between)
    pairs, evenness = {"induction": [], "duplicate_token": []}, []
    for period in probes.periods:
        copies = [weights(drawn.repeated[period]), weights(drawn.shuffled[period])]
        second = range(1 + period, 1 + 2 * period)
        for name, offset in (("induction", 1 - period), ("duplicate_token", -period)):
            pairs[name] += [torch.stack([at(copy, second, offset) for copy in copies]) * period]
        evenness.append(entropy_share(copies[0], second) * period)
    for name, sums in pairs.items():
        found[name] = tuple(sum(sums) / sum(probes.periods))
    found["uniform"] = (
        entropy_share(plain, range(start, length)),
        sum(evenness) / sum(probes.periods),
    )
    return found


def entropy_share(weights, rows):
    entropy = torch.special.entr(weights).sum(-1)
    share = entropy / (weights > 0).sum(-1).clamp(min=2).double().log()
    return share[..., rows].mean((1, -1))


def of_fixed_offset(weights, start):
    rows, length = weights.shape[-2:]
    strongest = weights.argmax(-1) - torch.arange(start, start + rows)
    alone = weights.amax(-1).square() / weights.square().sum(-1) > 0.55
    shares = torch.stack(
        [
            ((strongest == offset) & alone).double().mean((1, -1))
            for offset in range(-length, length)
        ]
    )
    most = shares.topk(2, dim=0).values
    return most[0], most[1]


def test_special_tokens_are_told_from_their_places() -> None:
    model = planted.planted_model()
    with torch.no_grad():  # the uniform head now looks at tokens 1 and 2, wherever they stand
        weight = model.blocks[0].attention.qkv_proj.weight
        head = planted.PLANTED[0].index("uniform")
        weight[head * planted.HEAD_DIM, : planted.TOKENS] = 1.0
        weight[(8 + head) * planted.HEAD_DIM, [FRONT, BACK]] = planted.SHARP
    roles = heads.find_roles(model, tokenizer=Tokenizer(), seeds=(0,))
    [(layer, head, role)] = roles.having("special_token")
    assert planted.PLANTED[layer][head] == "uniform"
    assert role.control < 0.1 < 0.4 < role.score  # the first token of the text takes its share
    assert planted.PLANTED[0].index("first") not in {h for _, h, _ in roles.having("special_token")}


def test_roles_that_need_a_tokenizer_are_left_out_without_one() -> None:
    found = heads.find_roles(planted.planted_model(), probes=SHORT, seeds=(0,))
    assert set(found.scores) == set(ROLES) - {"second_sink", "special_token"}
    assert "second sink: it needs texts, hence a tokenizer." in found.table()
    assert found.to_json()["left_out"].keys() == {"second_sink", "special_token"}


def test_sequences_are_those_of_their_seeds_and_without_special_tokens() -> None:
    model = planted.planted_model()
    frame = Frame.of(Tokenizer())
    assert frame == Frame((FRONT,), (BACK,), (FRONT, BACK))
    drawn, again = draw(model, SHORT, (0, 1), frame), draw(model, SHORT, (1, 0), frame)
    assert torch.equal(drawn.plain, again.plain.flip(0))
    assert not torch.isin(drawn.plain, torch.tensor([FRONT, BACK])).any()
    assert all(len(set(row.tolist())) == SHORT.length for row in drawn.plain)
    assert torch.equal(drawn.texts, again.texts.flip(0))
    assert drawn.texts.shape == (2, SHORT.length)
    assert (drawn.texts[:, 0] == FRONT).all()
    for period in SHORT.periods:
        whole, other = drawn.repeated[period], drawn.shuffled[period]
        first, second = whole[:, 1 : 1 + period], whole[:, 1 + period : -1]
        assert torch.equal(first, second)
        assert torch.equal(other[:, : 1 + period], whole[:, : 1 + period])
        assert torch.equal(other[:, 1 + period : -1].sort().values, second.sort().values)
        assert (other[:, 1 + period : -1] != second).all()


def test_table_and_json_say_the_same(found) -> None:
    table = found.table()
    assert "L0H0 1.00/0.00" in table
    assert "16 heads, 8 of them without a role" in table
    assert "0.0%" in table
    assert "chance: share of 144 to 1,068 heads with random weights" in table
    assert max(map(len, table.splitlines()[:9])) <= 80
    document = json.loads(json.dumps(found.to_json(), allow_nan=False))
    names = [[{role["name"] for role in head} for head in layer] for layer in document["heads"]]
    assert names == [[planted.ROLES[name] for name in layer] for layer in planted.PLANTED]
    offsets = dict(
        zip(planted.PLANTED[0], document["scores"]["positional"]["offset"][0], strict=True)
    )
    assert (offsets["far"], offsets["uniform"]) == (-planted.FAR, 0)


def test_layers_may_have_different_numbers_of_heads() -> None:
    torch.manual_seed(1)
    blocks = tuple(mh.BlockConfig(24, count, 24, head_dim=6) for count in (4, 3))
    config = mh.LanguageModelConfig(101, blocks, positions="learned", max_positions=64)
    roles = heads.find_roles(mh.LanguageModel(config), probes=SHORT, seeds=(0,))
    assert [len(layer) for layer in roles.heads] == [4, 3]
    json.dumps(roles.to_json(), allow_nan=False)
    with pytest.raises(
        mh.ArgumentError, match=r"no head \(1, 3\): the model has 2 layers of 3 or 4"
    ):
        roles.of(1, 3)


@pytest.mark.parametrize("theirs", [False, True])
def test_pruned_heads_leave_gaps_at_their_first_numbers(theirs) -> None:
    probes = Probes(length=32, periods=(4, 6), reach=4)
    if theirs:
        require("models")
        model = families.build("llama").double()
    else:
        model = tiny.language_model().double()
    gone = {(0, head) for head in range(6)} | {(1, 0), (1, 1), (1, 2)}
    heads.prune(model, gone)
    given = measure(model, probes, (0,), Frame())
    found = heads.find_roles(model, probes=probes, seeds=(0,))
    assert len(found.layers) == 2
    assert given.layers[-1] == found.layers[1]
    for name, score in found.scores.items():
        assert np.isnan(score.score[0]).all()
        assert np.isnan(score.score[1, :3]).all()
        np.testing.assert_array_equal(score.score[1, 3:], given.by_role[name].score[-1])
        np.testing.assert_array_equal(score.control[1, 3:], given.by_role[name].control[-1])
    assert found.of(1, 0) == found.of(0, 5) == ()
    assert found.notes()[0].startswith("3 heads, ")
    assert {(layer, head) for name in ROLES for layer, head, _ in found.having(name)} <= {
        (1, 3),
        (1, 4),
        (1, 5),
    }


def test_the_model_is_left_as_it_was() -> None:
    require("models")
    model = families.build("llama").train()
    ids = torch.arange(3, 20)[None]
    before = model(ids).logits
    heads.find_roles(model, probes=Probes(length=40, periods=(9, 11), reach=4), seeds=(0,))
    assert model.training
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(ids).logits, before)


def test_random_copies_have_the_same_numbers_in_another_order() -> None:
    model = random_heads.small("rope", seed=3)
    before = [parameter.clone() for parameter in model.parameters()]
    other = random_copy(model, seed=0)
    for mine, theirs, old in zip(model.parameters(), other.parameters(), before, strict=True):
        assert torch.equal(mine, old)
        assert torch.equal(mine.flatten().sort().values, theirs.flatten().sort().values)
        assert mine.unique().numel() == 1 or not torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": ()}, "seeds must be at least one"),
        ({"probes": Probes(length=256)}, r"256 tokens are needed, but the model has 137 positions"),
        ({"tokenizer": object()}, "tokenizer must be one of transformers"),
    ],
)
def test_what_does_not_fit_is_refused(options, message) -> None:
    with pytest.raises(mh.MultiheadError, match=message):
        heads.find_roles(planted.planted_model(), **options)


def test_small_vocabularies_ask_for_shorter_periods() -> None:
    config = mh.LanguageModelConfig(11, (mh.BlockConfig(8, 2, 8),))
    with pytest.raises(mh.ArgumentError, match=r"period of 64 needs .* the model has 11"):
        heads.find_roles(mh.LanguageModel(config))
    roles = heads.find_roles(mh.LanguageModel(config), probes=Probes(periods=(5, 7)), seeds=(0,))
    assert roles.scores["induction"].n == 12


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"length": 63}, "length must be at least 8"),
        ({"periods": (9,)}, "at least two different"),
        ({"periods": (9, 3)}, "4 or more"),
        ({"reach": 1}, "reach must be at least 2"),
    ],
)
def test_probes_that_prove_nothing_are_refused(fields, message) -> None:
    with pytest.raises(mh.ArgumentError, match=message):
        Probes(**fields)


def test_models_that_cannot_be_probed_say_why() -> None:
    with pytest.raises(mh.ModelError, match="tells no size of a vocabulary"):
        heads.find_roles(mh.MultiHeadAttention(8, 2))
    with pytest.raises(mh.ArgumentError, match="Unknown role 'copy'"):
        heads.find_roles(planted.planted_model(), probes=SHORT, seeds=(0,)).having("copy")


def test_encoder_decoders_are_refused() -> None:
    require("models")
    with pytest.raises(mh.ModelError, match="an encoder with a decoder"):
        heads.find_roles(
            families.build("bart"), probes=Probes(length=32, periods=(5, 7), reach=2), seeds=(0,)
        )


def test_modules_of_ones_own_are_probed() -> None:
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Embedding(131, 12), mh.MultiHeadAttention(12, 3))
    roles = heads.find_roles(model, probes=SHORT, seeds=(0,))
    assert roles.layers == ("1",)
    assert len(roles.heads[0]) == 3


def test_tokenizers_of_ours_name_their_special_tokens() -> None:
    known = SimpleNamespace(special=True)
    backend = SimpleNamespace(
        encode=lambda text, add_special_tokens=True: SimpleNamespace(ids=[9]),
        get_added_tokens_decoder=lambda: {0: known, 4: known, 8: SimpleNamespace(special=False)},
    )
    tokenizer = SimpleNamespace(backend=backend, encode=lambda text: [4, 9])
    assert Frame.of(tokenizer) == Frame((4,), (), (0, 4))


def test_heads_of_random_weights_have_few_roles() -> None:
    [found] = random_heads.small_scores(1)
    for role in set(ROLES) - {"uniform", "special_token", "second_sink"}:
        held = sum(int(SHIPPED.held(role, scores.by_role[role]).sum()) for scores in found)
        assert held <= 1, f"{role}: {held} of 96"


def test_every_role_but_uniform_passes_by_chance_in_less_than_one_of_a_hundred() -> None:
    for role in set(ROLES) - {"uniform"}:
        assert SHIPPED.rate(role) < FALSE_POSITIVES
        assert SHIPPED.margin[role] >= 0.5 * SHIPPED.score[role]


@pytest.mark.proof
def test_shipped_thresholds_are_made_of_random_heads() -> None:
    require("models")
    require("minilm")
    small = random_heads.small_scores(random_heads.COPIES)
    shuffled = random_heads.shuffled_scores(random_heads.COPIES // 2)
    setting, counting = (
        [scores for copy in [*small[half::2], *shuffled[half::2]] for scores in copy]
        for half in (0, 1)
    )
    made = from_random(setting, counting, SHIPPED.source)
    assert made.heads == SHIPPED.heads
    for role in ROLES:
        assert made.margin[role] == pytest.approx(SHIPPED.margin[role], abs=1e-3)
        assert abs(made.false_positives[role] - SHIPPED.false_positives[role]) <= 2


def test_margins_leave_few_of_those_that_set_them() -> None:
    random = np.random.default_rng(0)
    score = Score(random.uniform(0, 1, (20, 50)), np.zeros((20, 50)), n=1)
    chance = Scores(("layer",) * 20, (50,) * 20, {"induction": score}, tokens=1)
    made = from_random([chance], [chance], "uniform numbers")
    assert made.margin["induction"] == np.nextafter(np.sort(score.score, None)[-5], 1)
    assert made.false_positives["induction"] == 4  # below 0.5 % of 1000
    assert made.margin["local"] == 0.25  # none was asked
    assert made.rate("local") is None


def test_thresholds_of_ones_own_model() -> None:
    model = random_heads.small("learned", seed=2)
    made = heads.calibrate_roles(model, probes=SHORT, seeds=(0,), copies=2)
    assert made.heads["induction"] == 32
    roles = heads.find_roles(model, probes=SHORT, seeds=(0,), thresholds=made)
    assert roles.thresholds is made
    assert "2 copies of LanguageModel" in roles.table()
    with pytest.raises(mh.ArgumentError, match="copies must be 2 or another even number"):
        heads.calibrate_roles(model, copies=3)


@pytest.mark.slow
def test_roles_of_smollm2_and_minilm() -> None:
    require("models")
    require("minilm")
    (ours, frame), (theirs, framed) = random_heads.sources()
    assert frame.front == frame.back == ()
    assert framed.front == (101,)
    assert framed.back == (102,)
    probes, seeds = Probes(length=64, periods=(16, 24)), (0,)
    found = measure(ours, probes, seeds, frame).by_role
    held = {role: SHIPPED.held(role, score) for role, score in found.items()}
    assert held["previous_token"][16, 0]
    assert held["induction"][18, 6]
    assert held["induction"][17, 3]
    assert held["duplicate_token"][14, 3]
    assert 0.5 < held["first_key"].mean() < 0.9
    assert 0.1 < held["second_sink"].mean() < 0.5
    encoder = measure(theirs, probes, seeds, framed).by_role
    assert SHIPPED.held("positional", encoder["positional"])[0, 2]
    assert encoder["positional"].offset[0, 2] == -1
    # What goes to the first place goes there without [CLS], too; in the middle the token counts.
    assert SHIPPED.held("first_key", encoder["first_key"]).mean() > 0.4
    assert SHIPPED.held("special_token", encoder["special_token"]).mean() > 0.4
