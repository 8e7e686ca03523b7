"""Tokenizers without transformers: from a GGUF file or a folder, by the package tokenizers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError, ModelError
from .checkpoints import read_json
from .extras import import_extra
from .gguf_file import GGUFFile
from .gguf_tokenizer import is_smollm, smollm_tokenizer, special_tokens, transformers_tokenizer

_TOKENIZER, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, eq=False)
class TextTokenizer:
    """Text to tokens and back.

    Attributes:
        backend: a `tokenizers.Tokenizer`.
        chat_template: how a conversation is written for the model, in Jinja; None if it says none.
        special: the tokens that templates name: "bos_token" and the like.
        starts: tokens that go before every text.
    """

    backend: Any
    chat_template: str | None = None
    special: Mapping[str, str | None] = field(default_factory=dict)
    starts: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with those that the model wants at its start."""
        return [*self.starts, *self.backend.encode(text).ids]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones left out; halves of characters are U+FFFD."""
        return str(self.backend.decode(list(tokens), skip_special_tokens=True))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens of a conversation, up to where the assistant's answer begins.

        Args:
            messages: each has a "role" ("system", "user", "assistant") and a "content".

        Raises:
            InputError: the model has no chat template, or the template refuses the messages.
        """
        text = self.render_chat(messages)
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation as the model's template writes it; raises as `encode_chat`."""
        if self.chat_template is None:
            raise InputError("The model has no chat template. Give it plain text, without a chat.")
        jinja2 = import_extra("jinja2")
        sandbox = import_extra("jinja2.sandbox")
        # As transformers renders them; a template is a program of strangers, hence the sandbox.
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        try:
            template = environment.from_string(self.chat_template)
            return str(
                template.render(messages=messages, add_generation_prompt=True, **self.special)
            )
        except jinja2.TemplateError as error:
            raise InputError(f"The model's chat template cannot be used: {error}") from error


def gguf_text_tokenizer(file: GGUFFile) -> TextTokenizer:
    """The tokenizer of a GGUF file; of vocabularies other than SmolLM's by transformers."""
    template = file.get("tokenizer.chat_template")
    special = special_tokens(file)
    if not is_smollm(file):
        theirs = transformers_tokenizer(file)
        return TextTokenizer(theirs.backend_tokenizer, template, special)
    starts: tuple[int, ...] = ()
    if file.get("tokenizer.ggml.add_bos_token"):
        starts = (file.integer("tokenizer.ggml.bos_token_id"),)
    return TextTokenizer(smollm_tokenizer(file), template, special, starts)


def folder_text_tokenizer(folder: Path) -> TextTokenizer:
    """The tokenizer of a folder that `save_pretrained` wrote: its tokenizer.json.

    Raises:
        ModelError: the file is missing or damaged.
        MissingExtraError: tokenizers is not installed.
    """
    tokenizers = import_extra("tokenizers")
    path = folder / _TOKENIZER
    if not path.is_file():
        raise ModelError(
            f"{folder} has no {_TOKENIZER}, so text cannot be turned into tokens. "
            "save_pretrained of a fast tokenizer writes it."
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises plain Exceptions
        raise ModelError(f"{path} cannot be read: {error}") from error
    settings = folder / _TOKENIZER_CONFIG
    fields = read_json(settings) if settings.is_file() else {}
    template = fields.get("chat_template")
    if (folder / _TEMPLATE).is_file():
        template = (folder / _TEMPLATE).read_text(encoding="utf-8")
    special = {name: _content(fields.get(name)) for name in _NAMED}
    return TextTokenizer(backend, template if isinstance(template, str) else None, special)


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **options)


def _refuse(message: str) -> None:
    raise InputError(f"The model's chat template refuses this conversation: {message}")
