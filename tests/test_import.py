"""What `import multihead` brings along, seen from a fresh process."""

import subprocess
import sys
import textwrap


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_optional_packages_are_left_alone() -> None:
    code = """
        import sys
        import multihead
        print([name for name in ("transformers", "typer", "rich", "gguf") if name in sys.modules])
    """
    assert run(code) == "[]"


def test_no_thread_is_started() -> None:
    code = """
        import os
        import numpy, torch
        before = len(os.listdir("/proc/self/task"))
        import multihead
        print(len(os.listdir("/proc/self/task")) - before)
    """
    assert run(code) == "0"


def test_attention_does_not_load_sympy() -> None:
    """Which some of torch's functions of shapes do, for a quarter of a second and 40 MiB."""
    code = """
        import sys
        import torch
        import multihead as mh

        query, ids = torch.randn(2, 1, 5, 3), torch.arange(5)
        for mask in (None, mh.Window(2, 1), mh.Documents(ids, ids) & mh.Documents(ids[None], ids)):
            result = mh.attention_with_stats(query, query, query, mask=mask, stats=("lse",))
            result.weights([0], slice(None))
            mh.attention_map(query, query, result.lse, mask=mask)
        mh.attention(query, query, query, bias=torch.zeros(1, 5), backend="chunked")
        print("sympy" in sys.modules)
    """
    assert run(code) == "False"


def test_attention_works_without_the_extension() -> None:
    code = """
        import sys

        class Hide:
            def find_spec(self, name, path=None, target=None):
                if name == "multihead._native":
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Hide())
        import torch
        import multihead as mh

        query = torch.randn(1, 2, 5, 3)
        out = mh.attention(query, query, query, mask=mh.Causal())
        exact = mh.attention(*[query.double()] * 3, mask=mh.Causal(), backend="reference")
        print("multihead._native" in sys.modules, (out - exact).abs().max().item() < 1e-6)
        try:
            mh.attention(query, query, query, backend="native")
        except mh.BackendError as error:
            print("extension" in str(error))
    """
    assert run(code).split() == ["False", "True", "True"]
