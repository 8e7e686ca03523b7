"""Continuing texts: batches and single prompts agree, whatever the padding, cache and chunks."""

import copy

import numpy
import pytest
import torch

import tiny
from multihead import ArgumentError, DtypeError, KeyPadding, ModelError
from multihead.models import generate, generate_steps
from multihead.models.prompts import batch_of

PROMPTS = tuple(tiny.tokens(length, seed=length).tolist() for length in (5, 3))
NEW = 5


def logits_of(model, prompts, **options):
    """The logits of every step, [B, steps, V]: of the prompt's last token, then of each new one."""
    steps = generate_steps(model, prompts, max_new_tokens=NEW, **options)
    return torch.stack([step.logits for step in steps], dim=1)


def alone(model, prompt):
    """What a row must give: the whole text anew for each token, in float64, without a cache."""
    exact = copy.deepcopy(model).double()
    text, rows = torch.tensor([prompt]), []
    for _ in range(NEW):
        with torch.no_grad():
            rows.append(exact(text)[0, -1])
        text = torch.cat((text, rows[-1].argmax()[None, None]), dim=1)
    return torch.stack(rows), text[0, len(prompt) :].tolist()


def padded(side, width, pad):
    """The prompts as a tensor, and which of its entries are tokens."""
    ids = torch.full((len(PROMPTS), width), pad)
    visible = torch.zeros_like(ids, dtype=torch.bool)
    for row, prompt in enumerate(PROMPTS):
        place = slice(width - len(prompt), width) if side == "left" else slice(len(prompt))
        ids[row, place] = torch.tensor(prompt)
        visible[row, place] = True
    return ids, KeyPadding(visible)


@pytest.mark.parametrize("positions", tiny.POSITIONS)
def test_a_prompt_alone(positions):
    model = tiny.language_model(positions)
    for prompt in PROMPTS:
        rows, text = alone(model, prompt)
        torch.testing.assert_close(logits_of(model, prompt)[0].double(), rows, rtol=0, atol=1e-5)
        assert generate(model, prompt, max_new_tokens=NEW) == [text]


@pytest.mark.parametrize("width", [5, 9])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("positions", tiny.POSITIONS)
def test_a_padded_batch_is_its_prompts_alone(positions, side, width):
    """The prefill's logits and those of each step; the pad id changes no bit."""
    model = tiny.language_model(positions)
    ids, padding = padded(side, width, pad=0)
    batch = logits_of(model, ids, padding=padding)
    for row, prompt in zip(batch, PROMPTS, strict=True):
        torch.testing.assert_close(row.double(), alone(model, prompt)[0], rtol=0, atol=1e-5)
    other, padding = padded(side, width, pad=77)
    assert torch.equal(logits_of(model, other, padding=padding), batch)


@pytest.mark.parametrize("positions", tiny.POSITIONS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_model_itself_counts_visible_tokens_alone(positions, side):
    """With a KeyPadding as mask, and no positions given."""
    model = tiny.language_model(positions)
    ids, padding = padded(side, 9, pad=5)
    with torch.no_grad():
        batch = model(ids, mask=padding)
    for row, real, prompt in zip(batch, padding.visible, PROMPTS, strict=True):
        with torch.no_grad():
            single = model(torch.tensor([prompt]))[0]
        torch.testing.assert_close(row[real], single, rtol=0, atol=1e-5)


def test_all_forms_of_prompts_are_one():
    model = tiny.language_model()
    expected = [alone(model, prompt)[1] for prompt in PROMPTS]
    ids, padding = padded("right", 9, pad=1)
    inner = KeyPadding(torch.tensor([[True, False] * 5, [False, True] * 3 + [False] * 4])[:, :9])
    spread = torch.zeros(2, 9, dtype=torch.int64)
    for row, prompt in enumerate(PROMPTS):
        spread[row, inner.visible[row]] = torch.tensor(prompt)
    forms = (
        (list(PROMPTS), None),
        ([torch.tensor(prompt) for prompt in PROMPTS], None),
        ([torch.tensor(prompt, dtype=torch.int32) for prompt in PROMPTS], None),
        (ids, padding),
        (spread, inner),
    )
    for prompts, padding in forms:
        assert generate(model, prompts, max_new_tokens=NEW, padding=padding) == expected
    single = expected[:1]
    for prompt in (PROMPTS[0], torch.tensor(PROMPTS[0]), torch.tensor([PROMPTS[0]])):
        assert generate(model, prompt, max_new_tokens=NEW) == single


@pytest.mark.parametrize(
    ("positions", "window"), [*((kind, None) for kind in tiny.POSITIONS), ("rope", 4)]
)
def test_chunks_change_nothing(positions, window):
    """Neither with one prompt nor with padding, some chunks of which are padding alone."""
    model = tiny.language_model(positions, window=window)
    prompts = [tiny.tokens(length, seed=length).tolist() for length in (23, 7)]
    whole = logits_of(model, prompts)
    for chunk in (1, 5, 40):
        torch.testing.assert_close(logits_of(model, prompts, chunk=chunk), whole, rtol=0, atol=1e-5)
        single = logits_of(model, prompts[0], chunk=chunk)
        torch.testing.assert_close(single, whole[:1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kind", ["static", "window", "paged"])
def test_every_cache_gives_the_same(kind, window):
    """In padded batches and in chunks too, also where the window's cache has rolled."""
    model = tiny.language_model(window=window)
    prompts = [tiny.tokens(length, seed=length).tolist() for length in (23, 7)]
    expected = logits_of(model, prompts)
    for chunk in (None, 3):
        got = logits_of(model, prompts, cache=kind, chunk=chunk)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    single = logits_of(model, prompts[0], cache=kind)
    torch.testing.assert_close(single, expected[:1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
def test_a_cache_of_bytes_treats_rows_alike(window):
    """Its rounding belongs to a token, so that a row has the same one alone and in a batch."""
    model = tiny.language_model(window=window)
    prompts = [tiny.tokens(length, seed=length).tolist() for length in (23, 7)]
    batch = logits_of(model, prompts, cache="int8")
    for row, prompt in zip(batch, prompts, strict=True):
        single = logits_of(model, prompt, cache="int8")[0]
        torch.testing.assert_close(row, single, rtol=0, atol=2e-5)


def test_rows_end_at_their_own_stop_tokens():
    model = tiny.language_model()
    whole = generate(model, PROMPTS, max_new_tokens=12)
    stops = {whole[0][4], whole[1][7]}
    expected = []
    for text in whole:
        end = next(index for index, token in enumerate(text) if token in stops)
        expected.append(text[: end + 1])
    assert len(expected[0]) != len(expected[1])
    assert generate(model, PROMPTS, max_new_tokens=12, stop=stops) == expected
    steps = list(generate_steps(model, PROMPTS, max_new_tokens=12, stop=stops))
    assert len(steps) == max(map(len, expected))
    assert [step.tokens for step in steps][-1].count(None) == 1
    first = whole[0][0]
    assert generate(model, PROMPTS[0], max_new_tokens=12, stop=first) == [[first]]


def test_stop_tokens_in_every_form():
    """A tensor's elements equal no integer by hash: compared as they are, nothing would stop."""
    model = tiny.language_model()
    first = generate(model, PROMPTS[0], max_new_tokens=1)[0][0]
    forms = torch.tensor(first), torch.tensor([first, 0]), numpy.int64(first), range(101)
    for stop in forms:
        assert generate(model, PROMPTS[0], max_new_tokens=3, stop=stop) == [[first]]


def test_other_models_are_refused():
    for model in (tiny.encoder_decoder(), torch.nn.Linear(2, 2)):
        with pytest.raises(DtypeError, match=f"LanguageModel; got {type(model).__name__}"):
            generate(model, [3], max_new_tokens=1)


def test_a_prefix_stays_as_it_is():
    """One prefix, two continuations: each as if it were the only one; the caches keep no trace."""
    model = tiny.language_model()
    start = tiny.tokens(13, seed=13).tolist()
    prefix = model.make_caches()
    with torch.no_grad():
        model.hidden(torch.tensor([start]), caches=prefix)
    before = [cache.nbytes for cache in prefix]
    for prompt in PROMPTS:
        whole = generate(model, start + prompt, max_new_tokens=NEW)
        assert generate(model, prompt, max_new_tokens=NEW, prefix=prefix) == whole
    assert [cache.length for cache in prefix] == [13, 13]
    assert [cache.nbytes for cache in prefix] == before


@pytest.mark.parametrize("kind", ["growing", "static", "window", "paged", "int8"])
def test_a_conversation_goes_on_from_its_caches(kind):
    model = tiny.language_model(window=7)
    first, second = (tiny.tokens(9, seed=seed).tolist() for seed in (5, 6))
    caches = model.make_caches(kind, capacity=40)
    (answer,) = generate(model, first, max_new_tokens=NEW, cache=caches)
    assert {cache.length for cache in caches} == {9 + NEW - 1}
    (reply,) = generate(model, answer[-1:] + second, max_new_tokens=NEW, cache=caches)
    (whole,) = generate(model, first + answer + second, max_new_tokens=NEW, cache=kind)
    assert reply == whole


@pytest.mark.parametrize("positions", ["rope", "learned", "sinusoidal"])
def test_prompts_of_any_lengths_behind_a_prefix(positions):
    model = tiny.language_model(positions)
    start = tiny.tokens(13, seed=13).tolist()
    prefix = model.make_caches()
    with torch.no_grad():
        model.hidden(torch.tensor([start, start]), caches=prefix)
    batch = logits_of(model, PROMPTS, prefix=prefix)
    for row, prompt in zip(batch, PROMPTS, strict=True):
        expected = alone(model, start + prompt)[0]
        torch.testing.assert_close(row.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["static", "paged"])
def test_prompts_of_any_lengths_behind_prefixes_of_any_lengths(kind, monkeypatch):
    """Padding begins where each row's own part of the prefix ends, not where the longest does."""
    model = tiny.language_model()
    starts = [tiny.tokens(length, seed=length).tolist() for length in (2, 7)]
    prefix = model.make_caches(kind, batch=2, capacity=30)
    ids = torch.tensor([start + [0] * (7 - len(start)) for start in starts])
    with torch.no_grad(), monkeypatch.context() as patch:
        update, lengths = type(prefix[0]).update, torch.tensor([2, 7])
        patch.setattr(type(prefix[0]), "update", lambda self, k, v: update(self, k, v, lengths))
        model.hidden(ids, caches=prefix)
    for prompts in (PROMPTS, PROMPTS[::-1]):
        batch = logits_of(model, prompts, prefix=prefix, chunk=2)
        for row, start, prompt in zip(batch, starts, prompts, strict=True):
            expected = alone(model, start + prompt)[0]
            torch.testing.assert_close(row.double(), expected, rtol=0, atol=1e-5)


def test_what_a_prefix_refuses():
    model = tiny.language_model("alibi")
    prefix = model.make_caches()
    with torch.no_grad():
        model.hidden(tiny.tokens(2, 3), caches=prefix)
    with pytest.raises(ArgumentError, match="one at a time"):
        generate(model, PROMPTS, max_new_tokens=1, prefix=prefix)
    with pytest.raises(ArgumentError, match="each of the model's 2 layers; got 1"):
        generate(model, PROMPTS[0], max_new_tokens=1, prefix=prefix[:1])
    with pytest.raises(ArgumentError, match="cache must hold a cache for each"):
        generate(model, PROMPTS[0], max_new_tokens=1, cache=[])
    with pytest.raises(ArgumentError, match="leave their padding in your caches"):
        generate(model, PROMPTS, max_new_tokens=1, cache=model.make_caches())
    with pytest.raises(ArgumentError, match="cache and prefix both"):
        generate(model, PROMPTS[0], max_new_tokens=1, prefix=prefix, cache=prefix)
    with pytest.raises(ArgumentError, match=r"cache='int8'.*make_caches\('int8'\)"):
        generate(model, PROMPTS[0], max_new_tokens=1, prefix=prefix, cache="int8")


def test_targets_of_a_source():
    """Each row as its source and start alone, without a cache; the source is encoded once."""
    model = tiny.encoder_decoder()
    source = tiny.tokens(2, 11)
    padding = KeyPadding(torch.arange(11) < torch.tensor([[11], [7]]))
    reading = model.reading(source, source_mask=padding)
    batch = logits_of(reading, PROMPTS)
    assert torch.equal(logits_of(reading, PROMPTS), batch)
    exact = copy.deepcopy(model).double()
    for index, (prompt, real) in enumerate(zip(PROMPTS, padding.visible, strict=True)):
        text = torch.tensor([prompt])
        for row in batch[index]:
            with torch.no_grad():
                expected = exact(text, source[index : index + 1, real])[0, -1]
            torch.testing.assert_close(row.double(), expected, rtol=0, atol=1e-5)
            text = torch.cat((text, expected.argmax()[None, None]), dim=1)


def test_drawn_tokens_follow_the_seed():
    model = tiny.language_model()

    def draw(seed, **options):
        generator = torch.Generator().manual_seed(seed)
        return generate(
            model, PROMPTS, max_new_tokens=9, temperature=1.5, generator=generator, **options
        )

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)
    assert draw(3, top_k=1) == generate(model, PROMPTS, max_new_tokens=9)


def test_half_precision():
    model = tiny.language_model(dtype=torch.bfloat16)
    assert logits_of(model, PROMPTS).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["growing", "static", "paged"])
def test_autocast(kind):
    """Keys and values come in its dtype, also to memory that is taken before."""
    model = tiny.language_model()
    with torch.autocast("cpu", torch.bfloat16):
        found = logits_of(model, PROMPTS, cache=kind)
        expected = logits_of(model, PROMPTS)
    assert torch.equal(found, expected)


def test_no_new_tokens():
    model = tiny.language_model()
    assert generate(model, PROMPTS[0], max_new_tokens=0) == [[]]
    assert generate(model, PROMPTS, max_new_tokens=0) == [[], []]


def test_gradients_are_left_alone():
    model = tiny.language_model()
    assert not logits_of(model, PROMPTS).requires_grad
    assert torch.is_grad_enabled()
    steps = generate_steps(model, PROMPTS, max_new_tokens=NEW)
    next(steps)
    assert torch.is_grad_enabled()
    assert model(torch.tensor([PROMPTS[0]])).requires_grad


def test_a_table_of_positions_ends():
    model = tiny.language_model("learned")
    prompt = tiny.tokens(50).tolist()
    assert len(generate(model, prompt, max_new_tokens=12)[0]) == 12
    with pytest.raises(ArgumentError, match="need 62 positions, and the model's table has 61"):
        generate(model, prompt, max_new_tokens=13)


@pytest.mark.parametrize(
    ("prompts", "options", "error", "named"),
    [
        ([], {}, ArgumentError, "at least one row"),
        ([[1, 2], []], {}, ArgumentError, "prompt 1 has no token"),
        (torch.zeros(2, 0, dtype=torch.int64), {}, ArgumentError, "prompt 0 has no token"),
        (torch.zeros(1, 2, 3, dtype=torch.int64), {}, ArgumentError, r"\(1, 2, 3\)"),
        ([torch.zeros(2, 3, dtype=torch.int64)], {}, ArgumentError, r"\(2, 3\)"),
        ([1.5], {}, DtypeError, "integers"),
        (torch.ones(1, 3), {}, DtypeError, "integers"),
        ([[101]], {}, ArgumentError, "from 0 to 100; got 101"),
        ([[3, -1]], {}, ArgumentError, "from 0 to 100; got -1"),
        ([3], {"max_new_tokens": -1}, ArgumentError, "max_new_tokens"),
        ([3], {"chunk": 0}, ArgumentError, "chunk"),
        ([3], {"chunk": 2.5}, DtypeError, "chunk must be an integer"),
        ([3], {"max_new_tokens": None}, DtypeError, "max_new_tokens must be an integer"),
        ([3], {"temperature": None}, DtypeError, "0 takes the likeliest"),
        ([3], {"temperature": "hot"}, DtypeError, "temperature must be a number; got 'hot'"),
        ([3], {"top_k": 2.5}, DtypeError, "top_k must be an integer"),
        ([3], {"top_p": "all"}, DtypeError, "top_p must be a number"),
        ([3], {"stop": "</s>"}, DtypeError, "stop must be a token's integer.*got '</s>'"),
        ([3], {"stop": None}, DtypeError, "Leave it out for none"),
        ([3], {"stop": torch.tensor([2.0])}, DtypeError, "stop must be a token's integer"),
        ([3], {"stop": (2, 101)}, ArgumentError, "from 0 to 100; got 101"),
        ([3], {"prefix": tiny.language_model(layers=1).make_caches()[0]}, DtypeError, "got KVC"),
        ("text", {}, DtypeError, "A text is encoded first"),
        ({"input_ids": [[3]]}, {}, DtypeError, "got dict.*input_ids"),
        (numpy.ones((1, 3), dtype=int), {}, DtypeError, r"torch\.as_tensor\(array\)"),
        ([3, [4]], {}, DtypeError, r"row of integers; got \[3, \[4\]\]"),
        (torch.ones(1, 3).long(), {"padding": torch.ones(1, 3).bool()}, DtypeError, "KeyPadding"),
        ([3], {"temperature": -1.0}, ArgumentError, "temperature"),
        ([3], {"cache": "endless"}, ArgumentError, "'endless'; there are growing, static"),
        ([3], {"padding": KeyPadding(torch.ones(1, 1).bool())}, ArgumentError, "Leave it out"),
        (
            torch.ones(2, 3).long(),
            {"padding": KeyPadding(torch.ones(2, 4).bool())},
            ArgumentError,
            r"\(2, 3\); got \(2, 4\)",
        ),
        (
            torch.ones(2, 3).long(),
            {"padding": KeyPadding(torch.tensor([[True] * 3, [False] * 3]))},
            ArgumentError,
            "prompt 1 has no token",
        ),
    ],
)
def test_arguments_that_are_refused(prompts, options, error, named):
    model = tiny.language_model(layers=1)
    with pytest.raises(error, match=named):
        generate(model, prompts, **{"max_new_tokens": 1, **options})


def test_steps_refuse_at_once():
    """Not at the first step, which may be far from the call."""
    with pytest.raises(ArgumentError, match="chunk"):
        generate_steps(tiny.language_model(layers=1), [3], max_new_tokens=1, chunk=-1)


def test_logits_that_are_not_finite():
    model = tiny.language_model(layers=1)
    with torch.no_grad():
        model.norm.weight[3] = float("nan")
    with pytest.raises(ModelError, match="not finite"):
        generate(model, [3], max_new_tokens=1)


def test_a_batch_ends_in_one_column():
    batch = batch_of([[1, 2, 3], [4]])
    assert batch.token_ids.tolist() == [[1, 2, 3], [0, 0, 4]]
    assert batch.visible.tolist() == [[True] * 3, [False, False, True]]
    assert batch_of([[1, 2], [3, 4]]).visible is None
