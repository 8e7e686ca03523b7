"""Llama-like decoders from GGUF files, as transformers models in plain floating point.

A GGUF file holds quantized weights, the configuration and the tokenizer. Everything is read from
it; nothing is downloaded. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type


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


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A transformers model in eval mode, its tokenizer, and where they came from."""

    model: Any
    tokenizer: Any
    facts: ModelFacts


def load_gguf(path: str | Path, *, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Read the model and the tokenizer of a GGUF file.

    Weights are dequantized one tensor at a time into `dtype`; beside the model itself, memory
    holds one tensor.

    Raises:
        ModelError: the file is missing, damaged, or not of a supported architecture.
        MissingExtraError: transformers (5.4 or newer) or gguf is not installed.
    """
    path = Path(path)
    reader = _open(path)
    metadata = _Metadata(path, reader)
    architecture = metadata.text("general.architecture")
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ModelError(
            f"{path.name} holds a model of architecture {architecture!r}; supported: "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}. Load the original model's transformers folder."
        )
    model = _build(metadata, dtype)
    types = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    matrices = Counter(t.tensor_type.name for t in reader.tensors if len(t.shape) > 1)
    kind = matrices.most_common(1)[0][0]
    facts = ModelFacts(
        name=path.stem.removesuffix(f".{kind}").removesuffix(f"-{kind}"),
        file=str(path),
        architecture=architecture,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        context_length=model.config.max_position_embeddings,
        quantization=None if kind in _PLAIN_TYPES else kind,
        tensor_types=tuple(types.most_common()),
    )
    return LoadedModel(model, _tokenizer(metadata), facts)


class _Metadata:
    """Typed access to the key-value pairs of one file."""

    def __init__(self, path: Path, reader: Any) -> None:
        self.path = path
        self.reader = reader

    def get(self, key: str) -> Any:
        field = self.reader.get_field(key)
        return None if field is None else field.contents()

    def text(self, key: str) -> str:
        return str(self._need(key, str))

    def integer(self, key: str) -> int:
        return int(self._need(key, int))

    def number(self, key: str) -> float:
        return float(self._need(key, int, float))

    def texts(self, key: str) -> list[str]:
        # Of an array of strings, `contents` takes seconds: it looks up each element's type.
        field = self.reader.get_field(key)
        if field is None:
            raise self._missing(key)
        return [bytes(field.parts[index]).decode("utf-8") for index in field.data]

    def integers(self, key: str) -> list[int]:
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


def _open(path: Path) -> Any:
    gguf = import_extra("gguf")
    if not path.is_file():
        raise ModelError(f"There is no file {path}.")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file: it starts with {magic!r}, not b'GGUF'.")
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ModelError(f"{path} is damaged or incomplete: {error}") from error


def _build(metadata: _Metadata, dtype: torch.dtype) -> Any:
    transformers = import_extra("transformers")
    llama = import_extra("transformers.models.llama.modeling_llama")
    try:
        config = _config(metadata, transformers, dtype)
    except ModelError:
        raise
    except Exception as error:  # transformers' validation raises classes of several packages
        raise ModelError(f"{metadata.path.name} describes no possible llama: {error}") from error
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    weights = _weights(metadata, config, shapes, dtype)
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    # Its buffers are computed at construction, and on the meta device have no values.
    model.model.rotary_emb = llama.LlamaRotaryEmbedding(config)
    return model.eval()


def _config(metadata: _Metadata, transformers: Any, dtype: torch.dtype) -> Any:
    _refuse_variants(metadata)
    heads = metadata.integer("llama.attention.head_count")
    width = metadata.integer("llama.embedding_length")
    head_dim = metadata.get("llama.attention.key_length") or width // heads
    if metadata.get("llama.rope.dimension_count") not in (None, head_dim):
        raise ModelError(
            f"{metadata.path.name} rotates {metadata.get('llama.rope.dimension_count')} of each "
            f"head's {head_dim} dimensions; only rotation of all of them is supported."
        )
    kv_heads = metadata.get("llama.attention.head_count_kv")
    return transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype=dtype,
        vocab_size=len(metadata.reader.get_field("tokenizer.ggml.tokens").data),
        hidden_size=width,
        intermediate_size=metadata.integer("llama.feed_forward_length"),
        num_hidden_layers=metadata.integer("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        max_position_embeddings=metadata.integer("llama.context_length"),
        rms_norm_eps=metadata.number("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": metadata.get("llama.rope.freq_base") or 10000.0,
        },
        tie_word_embeddings=not _has_tensor(metadata, "output.weight"),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=metadata.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=metadata.get("tokenizer.ggml.padding_token_id"),
    )


def _refuse_variants(metadata: _Metadata) -> None:
    scaling = metadata.get("llama.rope.scaling.type")
    variants = {
        "a mixture of experts": bool(metadata.get("llama.expert_count")),
        "scaled rotary positions": scaling not in (None, "none")
        or metadata.get("llama.rope.scale_linear") not in (None, 1.0)
        or _has_tensor(metadata, "rope_freqs.weight"),
    }
    for variant, present in variants.items():
        if present:
            raise ModelError(
                f"{metadata.path.name} is a llama with {variant}, which the GGUF reader does not "
                "support. Load the original model's transformers folder."
            )
    if metadata.reader.get_field("tokenizer.ggml.tokens") is None:
        raise ModelError(f"{metadata.path.name} holds no tokenizer (tokenizer.ggml.tokens).")


def _has_tensor(metadata: _Metadata, name: str) -> bool:
    return any(tensor.name == name for tensor in metadata.reader.tensors)


def _weights(
    metadata: _Metadata, config: Any, shapes: dict[str, torch.Size], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Every parameter of the model by its name, in `dtype`."""
    file = metadata.path.name
    weights = {}
    for tensor in metadata.reader.tensors:
        name = _parameter_name(tensor.name)
        if name not in shapes:
            raise ModelError(
                f"{file} holds the tensor {tensor.name}, which a plain llama does not have; "
                "leaving it out would change the model's output."
            )
        weight = _dequantize(tensor, file)
        if tensor.name.endswith("attn_q.weight"):
            weight = _halves_from_pairs(weight, config.num_attention_heads)
        elif tensor.name.endswith("attn_k.weight"):
            weight = _halves_from_pairs(weight, config.num_key_value_heads)
        if weight.shape != shapes[name]:
            raise ModelError(
                f"{file} holds {tensor.name} as {tuple(weight.shape)}, but its metadata ask for "
                f"{tuple(shapes[name])}."
            )
        weights[name] = weight.to(dtype)
    missing = sorted(shapes.keys() - weights.keys())
    if missing:
        raise ModelError(f"{file} lacks {len(missing)} tensors of the model, {missing[0]} first.")
    return weights


def _parameter_name(tensor: str) -> str | None:
    block = re.fullmatch(r"blk\.(\d+)\.(.+)", tensor)
    if block is None:
        return _TENSORS.get(tensor)
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


def _tokenizer(metadata: _Metadata) -> Any:
    """A fast tokenizer from the file's metadata.

    The SmolLM vocabulary is built here: its merges were learned with every digit on its own, which
    transformers' reader of GGUF files leaves out (5.24: "a  1" comes out differently). All others
    are left to transformers.
    """
    transformers = import_extra("transformers")
    if metadata.get("tokenizer.ggml.pre") != "smollm":
        return transformers.AutoTokenizer.from_pretrained(
            metadata.path.parent, gguf_file=metadata.path.name, local_files_only=True
        )
    tokenizers = import_extra("tokenizers")
    tokens = metadata.texts("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in metadata.texts("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    kinds = metadata.integers("tokenizer.ggml.token_type")
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            special = kind == _CONTROL
            added = tokenizers.AddedToken(token, normalized=False, special=special)
            (backend.add_special_tokens if special else backend.add_tokens)([added])

    def named(key: str) -> str | None:
        index = metadata.get(f"tokenizer.ggml.{key}")
        return None if index is None else tokens[index]

    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=named("bos_token_id"),
        eos_token=named("eos_token_id"),
        unk_token=named("unknown_token_id"),
        pad_token=named("padding_token_id"),
        chat_template=metadata.get("tokenizer.chat_template"),
        add_bos_token=bool(metadata.get("tokenizer.ggml.add_bos_token")),
        clean_up_tokenization_spaces=False,
    )
