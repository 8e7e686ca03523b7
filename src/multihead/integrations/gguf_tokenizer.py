"""Tokenizers out of GGUF files."""

from __future__ import annotations

from typing import Any

from .extras import import_extra
from .gguf_file import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def transformers_tokenizer(file: GGUFFile) -> Any:
    """transformers' fast tokenizer from a file's metadata.

    The SmolLM vocabulary is built here: its merges were learned with every digit on its own, which
    transformers' reader of GGUF files leaves out (5.24: "a  1" comes out differently). All others
    are left to transformers.
    """
    transformers = import_extra("transformers")
    if not is_smollm(file):
        return transformers.AutoTokenizer.from_pretrained(
            file.path.parent, gguf_file=file.path.name, local_files_only=True
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=smollm_tokenizer(file),
        chat_template=file.get("tokenizer.chat_template"),
        add_bos_token=bool(file.get("tokenizer.ggml.add_bos_token")),
        clean_up_tokenization_spaces=False,
        **special_tokens(file),
    )


def is_smollm(file: GGUFFile) -> bool:
    """Whether the vocabulary is SmolLM's."""
    return bool(file.get("tokenizer.ggml.pre") == "smollm")


def special_tokens(file: GGUFFile) -> dict[str, str | None]:
    """The tokens that begin and end texts, by the names that chat templates have for them."""
    tokens = file.reader.get_field("tokenizer.ggml.tokens")
    found: dict[str, str | None] = {}
    for name, key in _SPECIAL.items():
        index = file.get(f"tokenizer.ggml.{key}")
        part = None if index is None else tokens.parts[tokens.data[index]]
        found[name] = None if part is None else bytes(part).decode("utf-8")
    return found


def smollm_tokenizer(file: GGUFFile) -> Any:
    """SmolLM's tokenizer, of the package tokenizers."""
    tokenizers = import_extra("tokenizers")
    tokens = file.texts("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in file.texts("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    kinds = file.integers("tokenizer.ggml.token_type")
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            special = kind == _CONTROL
            added = tokenizers.AddedToken(token, normalized=False, special=special)
            (backend.add_special_tokens if special else backend.add_tokens)([added])
    return backend
