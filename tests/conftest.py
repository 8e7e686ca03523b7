import functools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from multihead.ops.backends import native
from requires import require

settings.register_profile("multihead", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("multihead")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what crosses float64 with the native kernels, which refuse it by design.

    Of the modules that ask whether a backend serves; others test the refusal itself.
    """

    def exists(item: pytest.Item) -> bool:
        call = getattr(item, "callspec", None)
        asked = call.params if call and hasattr(item.module, "require_serving") else {}
        return (asked.get("backend"), asked.get("dtype")) != ("native", torch.float64)

    config.hook.pytest_deselected(items=[item for item in items if not exists(item)])
    items[:] = filter(exists, items)


@functools.cache
def _sets() -> list[str]:
    return native.instruction_sets()


@pytest.fixture(params=["baseline", "avx2", "avx512", "avx512_bf16", "avx512_amx"])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each set in turn; the choice is undone afterwards."""
    require("native")
    name = str(request.param)
    if name not in _sets():
        pytest.skip(f"this processor does not run {name}")
    native.use_instruction_set(name)
    yield name
    native.use_instruction_set(None)
    native.use_decoder(True)
