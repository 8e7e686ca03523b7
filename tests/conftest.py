import pytest
import torch
from hypothesis import settings

settings.register_profile("multihead", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("multihead")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
