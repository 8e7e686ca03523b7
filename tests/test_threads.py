"""Threads and forks: none at import, as many as torch is told, and a forked child that ends.

Each test is a fresh process, whose threads are nobody else's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

import multihead as mh
from requires import require

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")

SET_UP = """
import os, time
import torch

def tasks():
    return len(os.listdir("/proc/self/task"))

def draw(dtype=torch.float32):
    return torch.randn(3, 1, 8, 1031, 64, generator=torch.Generator().manual_seed(7)).to(dtype)

def call(inputs, threads):
    import multihead as mh
    torch.set_num_threads(threads)
    return mh.attention(*inputs, mask=mh.Causal(), backend="native")
"""


def run(code: str) -> str:
    """What `code` prints in a process of its own. Idle threads wait asleep, so that times tell."""
    require("native")
    done = subprocess.run(
        [sys.executable, "-c", SET_UP + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@linux
def test_neither_the_import_nor_one_thread_starts_another() -> None:
    code = """
        import threading
        inputs, before = draw(), tasks()
        import multihead
        from multihead.ops.backends import native
        print(tasks() - before, threading.active_count(), torch.get_num_threads())
        call(inputs, 1)
        print(tasks() - before, threading.active_count())
    """
    assert run(code).split() == ["0", "1", "1", "0", "1"]


@linux
def test_threads_are_as_many_as_torch_is_told() -> None:
    code = """
        inputs = draw()
        torch.set_num_threads(4)  # which starts threads of torch's own
        before = tasks()
        call(inputs, 4)
        print(tasks() - before, torch.get_num_threads())
    """
    assert run(code).split() == ["3", "4"]


def test_the_work_is_done_by_as_many_threads_as_torch_is_told() -> None:
    code = """
        inputs = draw()
        def share_of_others(threads):
            call(inputs, threads)
            every, own = time.process_time(), time.thread_time()
            for _ in range(5):
                call(inputs, threads)
            every, own = time.process_time() - every, time.thread_time() - own
            return (every - own) / every
        print(share_of_others(1), share_of_others(4), share_of_others(1))
    """
    before, several, after = (float(share) for share in run(code).split())
    assert max(before, after) < 0.05
    assert several > 0.3


@forks
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_forked_child_with_one_thread_ends(dtype: str) -> None:
    """Within 10 s, four of them at once, and the parent goes on."""
    code = f"""
        import signal
        inputs = draw(torch.{dtype})
        expected = call(inputs, 3)
        children = []
        for _ in range(4):
            child = os.fork()
            if child == 0:
                signal.alarm(10)
                os._exit(0 if torch.equal(call(inputs, 1), expected) else 1)
            children.append(child)
        print([os.waitpid(child, 0)[1] for child in children])
        print(torch.equal(call(inputs, 3), expected))
    """
    assert run(code).splitlines() == ["[0, 0, 0, 0]", "True"]


@forks
def test_workers_of_a_data_loader_may_use_it() -> None:
    code = """
        class Calls(torch.utils.data.Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                return call(inputs, torch.get_num_threads()), torch.get_num_threads()
        inputs = draw()
        expected = call(inputs, 2)
        loader = torch.utils.data.DataLoader(
            Calls(), batch_size=None, num_workers=2, timeout=10, multiprocessing_context="fork"
        )
        print([(torch.equal(out, expected), threads) for out, threads in loader])
    """
    assert run(code) == str([(True, 1)] * 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_calls_from_several_python_threads_do_not_disturb_one_another(dtype: torch.dtype) -> None:
    require("native")
    draw = torch.Generator().manual_seed(11)
    calls = [
        torch.randn(3, 2, 4, 257 + 31 * n, 40, generator=draw).to(dtype).unbind() for n in range(4)
    ]
    expected = [mh.attention(*inputs, mask=mh.Causal(), backend="native") for inputs in calls]
    wrong: list[int] = []

    def work(n: int) -> None:
        for _ in range(10):
            out = mh.attention(*calls[n], mask=mh.Causal(), backend="native")
            if not torch.equal(out, expected[n]):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_torch_and_the_kernels_share_one_openmp_runtime() -> None:
    """Otherwise torch.set_num_threads would not reach the kernels' threads."""
    require("native")
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("/proc/self/maps is needed")
    query = torch.ones(1, 1, 3, 5)
    mh.attention(query, query, query, backend="native")
    mapped = {line.split()[-1] for line in maps.read_text().splitlines()}
    assert len({path for path in mapped if "libgomp" in path}) == 1
