"""Which model `multihead cost` counts: one that a file describes, or one of plain options."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path

from multihead import cost
from multihead.errors import ArgumentError, InputError, ModelError

_PLAIN = "--d-model 4096 --heads 32 --layers 32"


@dataclass(frozen=True)
class PlainSizes:
    """A model given by options alone; None where an option was not given."""

    d_model: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    layers: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    window: int | None = None
    gated: bool = False
    untied: bool = False
    encoder: bool = False

    def given(self) -> list[str]:
        """The options that were given, as they are written."""
        return [
            "--" + field.name.replace("_", "-")
            for field in fields(self)
            if getattr(self, field.name) not in (None, False)
        ]


def read_model(name: str | None, sizes: PlainSizes) -> cost.Model:
    """The model of a name or path, or that of `sizes`.

    Raises:
        InputError: both, neither, or sizes that do not fit together.
        ModelError: a file that is missing, or that describes nothing that can be counted.
    """
    given = sizes.given()
    if name is not None and given:
        raise InputError(
            f"{name} already says how large the model is; leave out {', '.join(given)}, or ask "
            "with --what-if how another size would do."
        )
    if name is not None:
        return _of_file(name)
    if sizes.d_model is None or sizes.heads is None:
        raise InputError(
            "Which model shall be counted? Name 'smollm2', a config.json, a folder with one, or a "
            f".gguf file; or give its sizes, at least --d-model and --heads: {_PLAIN}."
        )
    try:
        return _of_sizes(sizes, sizes.d_model, sizes.heads)
    except ArgumentError as error:
        raise InputError(_in_options(str(error))) from error


def _of_sizes(sizes: PlainSizes, d_model: int, heads: int) -> cost.Model:
    attention = cost.Attention.of(
        d_model, heads, sizes.kv_heads, sizes.head_dim, window=sizes.window, rotary=True
    )
    if sizes.encoder and sizes.window:
        attention = replace(attention, window_ahead=sizes.window - 1)
    ffn = cost.FeedForward(d_model, sizes.ffn or 4 * d_model, gated=sizes.gated)
    return cost.Model(
        (cost.Layer(attention, ffn),) * (sizes.layers or 1),
        vocab=sizes.vocab or 0,
        causal=not sizes.encoder,
        head=bool(sizes.vocab) and not sizes.encoder,
        tied=bool(sizes.vocab) and not (sizes.encoder or sizes.untied),
        name="a model of the given sizes",
    )


def _in_options(message: str) -> str:
    for name, option in (("embed_dim", "--d-model"), ("kv_heads", "--kv-heads")):
        message = message.replace(name, option)
    return message.replace("head_dim", "--head-dim")


def _of_file(name: str) -> cost.Model:
    from multihead.integrations.loading import SMOLLM2, absent, smollm2_file

    path = smollm2_file() if name == SMOLLM2 else Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(
                f"{path} holds no config.json. Give a folder that transformers' save_pretrained "
                "wrote, a config.json itself, or a .gguf file."
            )
        return _of_config(path / "config.json", path.resolve().name)
    if not path.is_file():
        raise absent(name, also="a config.json")
    if path.suffix == ".json":
        return _of_config(path, path.resolve().parent.name)
    from multihead.integrations.cost_gguf import describe_gguf

    return describe_gguf(path)


def _of_config(path: Path, name: str) -> cost.Model:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as a config: {error}.") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} is no config: it holds no object with fields.")
    name = str(config.get("_name_or_path") or name)
    text = config.get("text_config")
    if isinstance(text, dict) and config.get("model_type") not in cost.MODEL_TYPES:
        config, name = text, f"{name} (its text model alone)"
    try:
        return cost.from_transformers(config, name=name)
    except ArgumentError as error:
        raise ModelError(f"{path}: {error}") from error
