"""`multihead prune` as a command: the whole job on a tiny model, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")

import families
from ablated import outputs, zeroed
from multihead import cli
from multihead.cli.prune import RECORD, check_out, parse_share, split_rows, write
from multihead.errors import InputError, ModelError
from multihead.heads import load_pruned, mean_loss
from multihead.heads.removing.removal import remove
from multihead.heads.text import Tokens
from multihead.integrations import load, load_language_model
from requires import require
from test_checkpoint_folders import tokenizer

TEXT = "abcdefghij:jihgfedcba" * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer, and a text beside it."""
    require("models")
    made = tmp_path_factory.mktemp("tiny")
    families.build("llama").save_pretrained(made / "model")
    tokenizer().save_pretrained(made / "model")
    (made / "text.txt").write_text(TEXT, encoding="utf-8")
    return made


def command(folder: Path, out: Path, *more: str) -> list[str]:
    text = str(folder / "text.txt")
    return ["prune", str(folder / "model"), "--out", str(out), "--text", text, *more]


@pytest.fixture(scope="module")
def done(folder: Path) -> tuple[Path, dict[str, Any]]:
    """What one run wrote, and its document."""
    out = folder / "pruned"
    assert cli.main(command(folder, out, "--keep", "75%", "--max-tokens", "400", "--json")) == 0
    return out, json.loads((out / RECORD).read_text(encoding="utf-8"))


def test_the_model_that_is_written_is_the_masked_one(folder: Path, done: Any) -> None:
    out, document = done
    assert (document["units"], document["removed_units"], document["kind"]) == (4, 1, "kv_group")
    ((layer, heads),) = document["removed"].items()
    assert len(heads) == document["removed_heads"] == 3
    whole = load(folder / "model").model
    masked = zeroed(whole, {(int(layer), head) for head in heads})
    ids = torch.arange(14).view(2, 7)
    torch.testing.assert_close(outputs(load_pruned(out), ids), outputs(masked, ids))
    assert load(out).model.config.multihead_pruned_heads == document["removed"]


def test_the_figures_are_those_of_the_models(folder: Path, done: Any) -> None:
    out, document = done
    assert (document["scored_tokens"], document["tested_tokens"], document["row"]) == (
        200,
        200,
        200,
    )
    whole, small = load(folder / "model"), load(out)
    ids = whole.tokenizer(TEXT)["input_ids"][200:400]
    for loaded, loss, size in (
        (whole, document["loss_before"], document["before"]),
        (small, document["loss_after"], document["after"]),
    ):
        assert loss == pytest.approx(mean_loss(loaded.model, torch.tensor([ids])), abs=1e-5)
        assert size["parameters"] == sum(it.numel() for it in loaded.model.parameters())
        assert size["bytes"] == 4 * size["parameters"]
        assert min(size["prefill_tokens_per_s"], size["decode_tokens_per_s"]) > 0
    lost = document["before"]["parameters"] - document["after"]["parameters"]
    assert lost == (3 + 1 + 1 + 3) * 10 * 42  # three query heads, a key, a value, three columns
    assert (
        lost
        == document["before"]["attention_parameters"] - document["after"]["attention_parameters"]
    )
    cache = whole.model(torch.tensor([ids]), use_cache=True)
    cache = getattr(cache, "cache", None) or cache.past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert document["before"]["cache_bytes_per_token"] == held / 200
    assert document["after"]["cache_bytes_per_token"] == held / 200 * 3 / 4
    assert len(document["control_losses"]) == 3


def test_generate_and_inspect_take_the_folder(
    done: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    out, document = done
    assert (
        cli.main(["generate", "abc", "--model", str(out), "--max-new-tokens", "5", "--json"]) == 0
    )
    got = json.loads(capsys.readouterr().out)
    assert got["parameters"] == document["after"]["parameters"]
    ids = torch.tensor([load_language_model(out).tokenizer.encode("abc")])
    again = load_pruned(out).generate(ids, max_new_tokens=5, do_sample=False)
    assert again[0, 3:].tolist() == got["tokens"]
    capsys.readouterr()
    assert cli.main(["inspect", str(out), "--prompt", "abcdefabcdef", "--json"]) == 0
    captured = capsys.readouterr()
    assert "Loading weights" not in captured.err
    seen = json.loads(captured.out)
    ((layer, heads),) = document["removed"].items()
    entropy = seen["statistics"]["entropy"]
    assert (len(entropy), len(entropy[0])) == (2, 6)
    assert [h for h, value in enumerate(entropy[int(layer)]) if value is None] == heads
    assert None not in entropy[1 - int(layer)]
    assert cli.main(["inspect", str(out), "--prompt", "abcdefabcdef"]) == 0
    page = capsys.readouterr().out
    assert "= 12 heads on 2 key-value heads a layer, 3 pruned" in page
    assert "Its 9 heads rank" in page
    assert seen["cost"]["parameters_total"] == document["after"]["parameters"]
    held = document["after"]["cache_bytes_per_token"]
    assert seen["cost"]["kv_cache_bytes"] == len(seen["tokens"]) * held
    assert "KV cache" in page
    ranking = page[page.index("Ranked by") : page.index("Strongest links")]
    assert not any(f" L{layer}H{head} " in ranking for head in heads)


def test_a_layer_without_heads_is_inspected(folder: Path, tmp_path: Path, capsys: Any) -> None:
    from multihead.heads import prune

    loaded = load(folder / "model")
    prune(loaded.model, {(0, head) for head in range(6)})
    write(loaded, tmp_path / "out", {})
    page = str(tmp_path / "page.html")
    arguments = ["inspect", str(tmp_path / "out"), "--prompt", "abcdefabcdef", "--report", page]
    assert cli.main([*arguments, "--json"]) == 0
    entropy = json.loads(capsys.readouterr().out)["statistics"]["entropy"]
    assert entropy[0] == [None] * 6
    assert None not in entropy[1]
    assert cli.main(["cost", str(tmp_path / "out")]) == 1
    assert "leaves layer 0 no head" in capsys.readouterr().err
    assert Path(page).stat().st_size > 10_000


def test_the_terminal_says_what_it_cost_and_gained(
    folder: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "random"
    options = ["--by", "random", "--seed", "4", "--keep", "0.5", "--max-tokens", "300"]
    assert cli.main(command(folder, out, *options)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "model" in lines[0]
    text = " ".join(" ".join(lines).split())
    for words in (
        "2 of 4 KV groups kept · 6 of 12 query heads · chosen by random",
        "tested on 150 others of text.txt · rows of 150",
        "before after change",
        "of them attention",
        "as many groups at random: loss",
        "Heads that are gone, by layer",
        f"Written: {out}",
    ):
        assert words in text
    assert "scored on" not in text


def test_leaving_out_ranks_by_the_loss_without_each_group(
    folder: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "left"
    options = ["--by", "leave-one-out", "--keep", "75%", "--max-tokens", "200", "--json"]
    assert cli.main(command(folder, out, *options)) == 0
    document = json.loads(capsys.readouterr().out)
    loaded = load(folder / "model")
    ids = torch.tensor([loaded.tokenizer(TEXT)["input_ids"][:100]])
    losses = {
        (layer, group): mean_loss(
            zeroed(loaded.model, {(layer, 3 * group + head) for head in range(3)}), ids
        )
        for layer in range(2)
        for group in range(2)
    }
    layer, group = min(losses, key=losses.__getitem__)
    assert document["removed"] == {str(layer): [3 * group, 3 * group + 1, 3 * group + 2]}


def test_rows_as_long_as_the_model_has_positions(folder: Path, tmp_path: Path) -> None:
    families.build("gpt2").save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    out, text = tmp_path / "out", str(folder / "text.txt")
    options = ["--out", str(out), "--text", text, "--keep", "60%", "--json"]
    assert cli.main(["prune", str(tmp_path / "model"), *options]) == 0
    document = json.loads((out / RECORD).read_text(encoding="utf-8"))
    assert (document["row"], document["kind"]) == (61, "head")
    assert (document["heads"], document["removed_heads"]) == (6, 2)


REFUSED = [
    (["--keep", "70"], "--keep 70 is no share .* Did you mean 70%?"),
    (["--keep", "0%"], "--keep 0% is no share"),
    (["--keep", "100%"], "--keep 100% is no share"),
    (["--keep", "many"], "--keep many is no share"),
    (["--keep", "99%"], "nothing to remove, or nothing to keep"),
    (["--seed", "3"], "--seed would do nothing: --by gate-gradient draws nothing"),
    (["--text", "/nowhere/text"], "There is no text file /nowhere/text"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_options_that_cannot_be_used(
    options: list[str], message: str, folder: Path, tmp_path: Path, capsys: Any
) -> None:
    assert cli.main(command(folder, tmp_path / "out", *options)) == 2
    import re

    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_folders_that_cannot_be_written(folder: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine", encoding="utf-8")
    for out, message in (
        (tmp_path / "full", "is a folder with files in it, and nothing is overwritten"),
        (tmp_path / "full" / "notes.txt", "is a file. Name a new folder"),
        (tmp_path / "no" / "out", "there is no folder"),
    ):
        assert cli.main(command(folder, out)) == 2
        assert message in capsys.readouterr().err
    assert (tmp_path / "full" / "notes.txt").read_text(encoding="utf-8") == "mine"


def test_a_full_disk_is_said_to_be_full(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import SafetensorError

    loaded = load(folder / "model")

    def refuse(part: Path) -> None:
        (part / "model.safetensors").write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(loaded.model, "save_pretrained", refuse)
    with pytest.raises(InputError, match=r"out cannot be written: i/o error: no space left"):
        write(loaded, tmp_path / "out", {})
    assert not list(tmp_path.iterdir())


def test_a_link_to_an_empty_folder_is_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    check_out(tmp_path / "out")
    write(load(folder / "model"), tmp_path / "out", {"a": 1})
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk" / RECORD).exists()
    with pytest.raises(InputError, match="is a folder with files in it"):
        check_out(tmp_path / "out")


def test_nothing_is_left_where_writing_fails(folder: Path, tmp_path: Path) -> None:
    loaded = load(folder / "model")

    class Refusing:
        def save_pretrained(self, part: Path) -> None:
            (part / "half").write_text("half", encoding="utf-8")
            raise OSError(28, "No space left on device")

    broken = type(loaded)(loaded.model, Refusing(), loaded.facts)
    with pytest.raises(InputError, match=r"out cannot be written: no space left on device\."):
        write(broken, tmp_path / "out", {})
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()  # an empty folder will do
    write(loaded, tmp_path / "out", {"a": 1})
    assert (tmp_path / "out" / RECORD).exists()
    assert (tmp_path / "out").stat().st_mode & 0o500 == 0o500


def test_a_model_that_cannot_be_pruned_is_refused_before_any_work(tmp_path: Path) -> None:
    require("models")
    model, ids = families.build("deepseek_v3"), torch.arange(40).view(2, 20)
    with pytest.raises(ModelError, match="DeepseekV3Attention, cannot be pruned, only ablated"):
        remove(model, ids, ids, keep=0.5, report=lambda *_: pytest.fail("work was done"))


def test_shares() -> None:
    for text, share in (("70%", 0.7), ("0.7", 0.7), (" 12.5 % ", 0.125), (".5", 0.5)):
        assert parse_share(text) == pytest.approx(share)


def tokens(count: int, start: bool) -> Tokens:
    ids = list(range(count))
    return Tokens(ids, ["x"] * count, "x" if start else None, 0)


def test_a_text_is_cut_into_rows_of_which_each_half_has_its_own() -> None:
    scored, tested = split_rows(tokens(1700, False), 512, "a text")
    assert (scored.shape, tested.shape) == ((1, 512), (2, 512))
    assert torch.equal(torch.cat((scored, tested)).flatten(), torch.arange(1536))
    scored, tested = split_rows(tokens(401, True), 512, "a text")
    assert (scored.shape, tested.shape) == ((1, 201), (1, 201))
    assert scored[0, 0] == tested[0, 0] == 0  # the start token begins every row
    assert torch.equal(torch.cat((scored[0, 1:], tested[0, 1:])), torch.arange(1, 401))
    with pytest.raises(InputError, match=r"a text\) is 63 tokens long, too short .* Give 64"):
        split_rows(tokens(63, False), 512, "a text")
