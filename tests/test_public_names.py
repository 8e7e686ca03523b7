"""The public face: which names there are, and how they present themselves."""

from __future__ import annotations

import inspect

import multihead as mh

NAMES = """
    ALiBi ArgumentError AttentionResult BackendError BlockConfig Cache Causal Dense DeviceError
    Documents DtypeError DynamicNTKScaling Encoder EncoderConfig EncoderDecoder
    EncoderDecoderConfig Explanation FeedForward GatedFeedForward InputError KVCache KeyLengths
    KeyPadding KeyValues LanguageModel LanguageModelConfig LatentAttention LatentKVCache
    LearnedPositions LinearScaling Llama3Scaling LongRoPEScaling Mask MaskError
    MissingExtraError ModelError MultiHeadAttention MultiheadError NTKScaling PagedKVCache
    Positions PrefixCausal Prepacked
    QuantizedKVCache QueryStart RoPE Rotation STATISTICS Sampling SinusoidalPositions
    SlidingWindow StaticKVCache TransformerBlock Window WindowKVCache YaRNScaling alibi_slopes
    apply_rope attention attention_map attention_stats attention_weights attention_with_stats
    explain generate generate_steps merge_attention prepack received_attention replace_sdpa unpack
    watch
"""


def test_names() -> None:
    assert sorted(mh.__all__) == sorted(NAMES.split())
    assert all(hasattr(mh, name) for name in mh.__all__)


def test_each_name_is_documented_and_says_multihead() -> None:
    for name in mh.__all__:
        thing = getattr(mh, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert inspect.getdoc(thing), name
            assert thing.__module__ == "multihead", name


def test_errors_are_also_what_python_would_raise() -> None:
    kinds = {
        mh.ArgumentError: ValueError,
        mh.DtypeError: TypeError,
        mh.DeviceError: ValueError,
        mh.MaskError: ValueError,
        mh.BackendError: RuntimeError,
        mh.MissingExtraError: ImportError,
        mh.ModelError: RuntimeError,
        mh.InputError: ValueError,
    }
    assert set(kinds) == set(mh.MultiheadError.__subclasses__())
    assert all(issubclass(ours, builtin) for ours, builtin in kinds.items())
