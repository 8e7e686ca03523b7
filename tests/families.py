"""Tiny, randomly initialized transformers models, one a family, with distinct odd sizes."""

import copy

import torch
from torch.overrides import TorchFunctionMode

VOCABULARY = 101
_SIZES = {"vocab_size": VOCABULARY, "intermediate_size": 37, "num_hidden_layers": 2}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_GROUPED = {**_SIZES, **_TOKENS, "num_attention_heads": 6, "num_key_value_heads": 2}
_GEMMA = {**_GROUPED, "head_dim": 10, "hidden_size": 42, "sliding_window": 5}
_ENCODER = {**_SIZES, "num_attention_heads": 3, "hidden_size": 33, "pad_token_id": 0}


def _decoders(t):
    yield "llama", t.LlamaForCausalLM, t.LlamaConfig(**_GROUPED, hidden_size=42, head_dim=10)
    yield (
        "gpt2",
        t.GPT2LMHeadModel,
        t.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=33,
            n_head=3,
            n_layer=2,
            n_positions=61,
            scale_attn_by_inverse_layer_idx=True,
            **_TOKENS,
        ),
    )
    yield "qwen2", t.Qwen2ForCausalLM, t.Qwen2Config(**_GROUPED, hidden_size=60)
    yield "qwen3", t.Qwen3ForCausalLM, t.Qwen3Config(**_GROUPED, hidden_size=42, head_dim=10)
    yield (
        "mistral",
        t.MistralForCausalLM,
        t.MistralConfig(**_GROUPED, hidden_size=42, head_dim=10, sliding_window=5),
    )
    yield (
        "gemma2",
        t.Gemma2ForCausalLM,
        t.Gemma2Config(**_GEMMA, query_pre_attn_scalar=7, attn_logit_softcapping=3.0),
    )
    yield (
        "gemma3",
        t.Gemma3ForCausalLM,
        t.Gemma3TextConfig(**_GEMMA, layer_types=["sliding_attention", "full_attention"]),
    )
    yield (
        "gpt_oss",
        t.GptOssForCausalLM,
        t.GptOssConfig(**_GEMMA, num_local_experts=3, num_experts_per_tok=2),
    )
    yield (
        "deepseek_v3",  # latent attention: keys are wider than values
        t.DeepseekV3ForCausalLM,
        t.DeepseekV3Config(
            **_SIZES,
            **_TOKENS,
            hidden_size=42,
            num_attention_heads=3,
            num_key_value_heads=3,
            q_lora_rank=17,
            kv_lora_rank=13,
            qk_nope_head_dim=7,
            qk_rope_head_dim=6,
            v_head_dim=5,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            moe_intermediate_size=11,
        ),
    )


def _others(t):
    yield "bert", t.BertModel, t.BertConfig(**_ENCODER, max_position_embeddings=61)
    yield (
        "modernbert",
        t.ModernBertModel,
        t.ModernBertConfig(
            **(_ENCODER | {"hidden_size": 42}),
            bos_token_id=1,
            eos_token_id=2,
            cls_token_id=1,
            sep_token_id=2,
            max_position_embeddings=61,
            layer_types=["full_attention", "sliding_attention"],
            local_attention=6,
        ),
    )
    yield (
        "bart",
        t.BartForConditionalGeneration,
        t.BartConfig(
            vocab_size=VOCABULARY,
            d_model=33,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=3,
            decoder_attention_heads=3,
            encoder_ffn_dim=37,
            decoder_ffn_dim=37,
            max_position_embeddings=61,
            decoder_start_token_id=2,
            forced_eos_token_id=None,
            **_TOKENS,
        ),
    )
    yield (
        "t5",
        t.T5ForConditionalGeneration,
        t.T5Config(
            vocab_size=VOCABULARY,
            d_model=33,
            d_kv=11,
            d_ff=37,
            num_layers=2,
            num_heads=3,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=2,
        ),
    )


DECODERS = ("llama", "gpt2", "qwen2", "mistral", "gemma2", "gemma3", "gpt_oss", "deepseek_v3")
ENCODERS = ("bert", "modernbert")
WITHOUT_SDPA = ("gemma2", "gpt_oss")  # sdpa has no softcap and no sinks


def build(family, **changes):
    """The family's model in eval mode, its weights so wide that attention is far from flat."""
    import transformers

    everything = (*_decoders(transformers), *_others(transformers))
    model_class, config = next((m, c) for name, m, c in everything if name == family)
    for name, value in changes.items():
        setattr(config, name, value)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the grouped product asks for multiples of 16 bytes
    torch.manual_seed(7)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def trio(family, **changes):
    """(ours in float32, a baseline in float32, eager in float64), all with the same weights."""
    from multihead.integrations.transformers import use

    baseline = build(family, **changes)
    ours, expected = copy.deepcopy(baseline), copy.deepcopy(baseline).double()
    use(ours)
    if family not in WITHOUT_SDPA:
        baseline.set_attn_implementation("sdpa")
    return ours, baseline, expected


class Float64Throughout(TorchFunctionMode):
    """Keeps a float64 model in float64 where its code asks for float32: softmax and norms.

    Without it eager is no better than float32 in its softmax, and float64's lowest number, which
    fills its masks, becomes -inf there: a row of padding turns to NaN and spreads through its
    value to every row. Rotary angles stay as they are in float32; they are part of the model.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if isinstance(args[0] if args else None, torch.Tensor) and args[0].dtype == torch.float64:
            if function is torch.nn.functional.softmax:
                kwargs.pop("dtype", None)
            elif function is torch.Tensor.to and args[1:] == (torch.float32,):
                return args[0]
        return function(*args, **kwargs)


def output(model, **inputs):
    """The model's output, without gradients, in the model's precision from end to end."""
    with torch.no_grad(), Float64Throughout():
        return model(**inputs)


def padded(lengths, side, seed=3):
    """(input_ids, attention_mask) of a batch whose rows have these lengths."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(3, VOCABULARY, (len(lengths), longest), generator=generator)
    column = torch.arange(longest)
    if side == "left":
        column = column.flip(0)
    mask = (column < torch.tensor(lengths)[:, None]).long()
    return ids * mask, mask
