"""An induction head forms where a model learns to go on with sequences that repeat."""

import pytest
import torch
from torch.nn import functional as F

import multihead as mh
from multihead import heads

VOCABULARY, STEPS, WARM_UP, BATCH = 64, 300, 50, 32


@pytest.mark.slow
def test_an_induction_head_forms_in_the_second_layer() -> None:
    torch.manual_seed(0)
    block = mh.BlockConfig(64, 4, 64)
    config = mh.LanguageModelConfig(
        VOCABULARY, (block,) * 2, positions="learned", max_positions=64, tied=False
    )
    model = mh.LanguageModel(config)
    probes = heads.Probes(length=48, periods=(9, 15, 20), reach=6)
    before = heads.find_roles(model, probes=probes, seeds=(0, 1))
    losses = train(model)
    after = heads.find_roles(model, probes=probes, seeds=(0, 1))
    assert not before.having("induction")
    assert losses[0] > 4.0
    assert losses[-1] < 0.5
    found = after.having("induction")
    assert {layer for layer, _, _ in found} == {1}  # it reads what the first layer wrote
    assert found[0][2].score > 0.5
    assert found[0][2].control < 0.1


def train(model):
    """Losses over the steps; each sequence is random tokens twice, the loss is of the second."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    losses = []
    for step in range(STEPS):
        period = int(torch.randint(8, 21, (1,), generator=generator))
        once = torch.stack(
            [torch.randperm(VOCABULARY, generator=generator)[:period] for _ in range(BATCH)]
        )
        ids = torch.cat([once, once], 1)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / WARM_UP)
        logits = model(ids)[:, period:-1].flatten(0, 1)
        loss = F.cross_entropy(logits, ids[:, period + 1 :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
