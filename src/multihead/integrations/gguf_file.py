"""GGUF files of Llama-like decoders: their metadata, and their weights in plain floating point.

A GGUF file holds quantized weights, the configuration and the tokenizer. Everything is read from
it; nothing is downloaded. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ModelError
from .extras import import_extra

SUPPORTED_ARCHITECTURES = ("llama",)

_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_PLAIN_TYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class ModelFacts:
    """What a report says of where a model came from."""

    name: str
    file: str
    architecture: str
    parameters: int
    context_length: int | None
    quantization: str | None = None
    """The type of most weight matrices in the file, such as "Q4_1"; None if not quantized."""
    tensor_types: tuple[tuple[str, int], ...] = ()
    """How many tensors the file holds of each type, most first."""


class GGUFFile:
    """One file of a Llama-like decoder, opened.

    Raises:
        ModelError: the file is missing, damaged, or not of a supported architecture.
        MissingExtraError: gguf is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.reader = open_reader(self.path)
        self.architecture = self.text("general.architecture")
        if self.architecture not in SUPPORTED_ARCHITECTURES:
            raise ModelError(
                f"{self.path.name} holds a model of architecture {self.architecture!r}; supported: "
                f"{', '.join(SUPPORTED_ARCHITECTURES)}. Load the original model's transformers "
                "folder."
            )

    def get(self, key: str) -> Any:
        """The value of a key; None without it."""
        field = self.reader.get_field(key)
        return None if field is None else field.contents()

    def text(self, key: str) -> str:
        """The text of a key; this and the like raise ModelError without it."""
        return str(self._need(key, str))

    def integer(self, key: str) -> int:
        """The integer of a key."""
        return int(self._need(key, int))

    def number(self, key: str) -> float:
        """The number of a key."""
        return float(self._need(key, int, float))

    def texts(self, key: str) -> list[str]:
        """The texts of a key."""
        # Of an array of strings, `contents` takes seconds: it looks up each element's type.
        field = self.reader.get_field(key)
        if field is None:
            raise self._missing(key)
        return [bytes(field.parts[index]).decode("utf-8") for index in field.data]

    def integers(self, key: str) -> list[int]:
        """The integers of a key."""
        return [int(value) for value in self._need(key, list)]

    def _need(self, key: str, *kinds: type) -> Any:
        value = self.get(key)
        if value is None:
            raise self._missing(key)
        if not isinstance(value, kinds):
            raise ModelError(
                f"{self.path.name} gives {key} as {type(value).__name__}; expected "
                f"{' or '.join(kind.__name__ for kind in kinds)}. Layers that differ from one "
                "another are not supported."
            )
        return value

    def _missing(self, key: str) -> ModelError:
        return ModelError(f"{self.path.name} lacks {key}, without which no model can be built.")

    def has_tensor(self, name: str) -> bool:
        """Whether the file holds a tensor."""
        return any(tensor.name == name for tensor in self.reader.tensors)

    def fields(self) -> dict[str, Any]:
        """What a transformers config of the model says.

        Raises:
            ModelError: a variant of the architecture that is not supported, or a missing key.
        """
        _refuse_variants(self)
        heads = self.integer("llama.attention.head_count")
        width = self.integer("llama.embedding_length")
        head_dim = self.get("llama.attention.key_length") or width // heads
        if self.get("llama.rope.dimension_count") not in (None, head_dim):
            raise ModelError(
                f"{self.path.name} rotates {self.get('llama.rope.dimension_count')} of each head's "
                f"{head_dim} dimensions; only rotation of all of them is supported."
            )
        kv_heads = self.get("llama.attention.head_count_kv")
        return {
            "vocab_size": len(self.reader.get_field("tokenizer.ggml.tokens").data),
            "hidden_size": width,
            "intermediate_size": self.integer("llama.feed_forward_length"),
            "num_hidden_layers": self.integer("llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": heads if kv_heads is None else kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": self.integer("llama.context_length"),
            "rms_norm_eps": self.number("llama.attention.layer_norm_rms_epsilon"),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.get("llama.rope.freq_base") or 10000.0,
            },
            "tie_word_embeddings": not self.has_tensor("output.weight"),
            "bos_token_id": self.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.get("tokenizer.ggml.padding_token_id"),
        }

    def facts(self, parameters: int) -> ModelFacts:
        """Where the model comes from, and how it is stored; `parameters` is their number."""
        tensors = self.reader.tensors
        types = Counter(tensor.tensor_type.name for tensor in tensors)
        matrices = Counter(t.tensor_type.name for t in tensors if len(t.shape) > 1)
        kind = matrices.most_common(1)[0][0]
        return ModelFacts(
            name=self.path.stem.removesuffix(f".{kind}").removesuffix(f"-{kind}"),
            file=str(self.path),
            architecture=self.architecture,
            parameters=parameters,
            context_length=self.integer("llama.context_length"),
            quantization=None if kind in _PLAIN_TYPES else kind,
            tensor_types=tuple(types.most_common()),
        )


class GGUFTensors(Mapping[str, Tensor]):
    """The weights of a file under transformers' names, each dequantized when it is looked up.

    Beside what is looked up, memory holds one tensor in float32.

    Args:
        file: the file.
        fields: what `file.fields()` says.
        dtype: of the tensors.

    Raises:
        ModelError: a tensor that a plain llama does not have.
    """

    def __init__(self, file: GGUFFile, fields: Mapping[str, Any], dtype: torch.dtype) -> None:
        self._file = file.path.name
        self._dtype = dtype
        self._heads = {
            "attn_q.weight": fields["num_attention_heads"],
            "attn_k.weight": fields["num_key_value_heads"],
        }
        self._tensors = {}
        for tensor in file.reader.tensors:
            name = _parameter_name(tensor.name, fields["num_hidden_layers"])
            if name is None:
                raise ModelError(
                    f"{self._file} holds the tensor {tensor.name}, which a plain llama does not "
                    "have; leaving it out would change the model's output."
                )
            self._tensors[name] = tensor

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        weight = _dequantize(tensor, self._file)
        for ending, heads in self._heads.items():
            if tensor.name.endswith(ending):
                weight = _halves_from_pairs(weight, heads)
        return weight.to(self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def stored_name(self, name: str) -> str:
        """What the file calls a tensor."""
        return str(self._tensors[name].name)


def open_reader(path: Path) -> Any:
    """The reader of a GGUF file of any architecture; raises as `GGUFFile` does."""
    gguf = import_extra("gguf")
    if not path.is_file():
        raise ModelError(f"There is no file {path}.")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file: it starts with {magic!r}, not b'GGUF'.")
    try:
        return _reader(gguf, path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ModelError(f"{path} is damaged or incomplete: {error}") from error


def _reader(gguf: Any, path: Path) -> Any:
    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        """Reads plain arrays: of a memmap each of a vocabulary's slices takes microseconds."""

        data: Any

        def _get(self, *args: Any, **kwargs: Any) -> Any:
            if isinstance(self.data, np.memmap):
                self.data = self.data.view(np.ndarray)
            return super()._get(*args, **kwargs)

    return Reader(path)


def _refuse_variants(file: GGUFFile) -> None:
    scaling = file.get("llama.rope.scaling.type")
    variants = {
        "a mixture of experts": bool(file.get("llama.expert_count")),
        "scaled rotary positions": scaling not in (None, "none")
        or file.get("llama.rope.scale_linear") not in (None, 1.0)
        or file.has_tensor("rope_freqs.weight"),
    }
    for variant, present in variants.items():
        if present:
            raise ModelError(
                f"{file.path.name} is a llama with {variant}, which the GGUF reader does not "
                "support. Load the original model's transformers folder."
            )
    if file.reader.get_field("tokenizer.ggml.tokens") is None:
        raise ModelError(f"{file.path.name} holds no tokenizer (tokenizer.ggml.tokens).")


def _parameter_name(tensor: str, layers: int) -> str | None:
    block = re.fullmatch(r"blk\.(\d+)\.(.+)", tensor)
    if block is None:
        return _TENSORS.get(tensor)
    if int(block[1]) >= layers:
        return None
    suffix = _BLOCK_TENSORS.get(block[2])
    return suffix and f"model.layers.{block[1]}.{suffix}"


def _dequantize(tensor: Any, file: str) -> Tensor:
    """The tensor in float32, in memory of its own."""
    gguf = import_extra("gguf")
    try:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise ModelError(
            f"{file} holds {tensor.name} as {tensor.tensor_type.name}, which the package gguf "
            "cannot dequantize."
        ) from error
    # float32 tensors come back as a view of the file, which must not be written to.
    return torch.from_numpy(values if values.flags.owndata else values.copy())


def _halves_from_pairs(weight: Tensor, heads: int) -> Tensor:
    """Undo the row order of GGUF's q and k projections.

    llama.cpp rotates neighboring rows (2i, 2i + 1) of a head, transformers the rows (i, i + d/2).
    """
    rows, columns = weight.shape
    pairs = weight.view(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)
