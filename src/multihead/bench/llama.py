"""llama.cpp on the GGUF file that SmolLM2 comes in, by the package llama-cpp-python.

It multiplies weights of four bits by rows of eight: it reads a quarter of what bfloat16 does.

`python -m multihead.bench.llama THREADS` is one try of it, with weights reordered for this
processor as it does by itself.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from multihead.bench.contest import Declined
from multihead.errors import BackendError, ModelError
from multihead.integrations.loading import smollm2_file

NAME = "llama.cpp"
REORDERED = f"{NAME} with reordered weights"

_TRY_SECONDS = 120


def is_installed() -> bool:
    """Whether llama-cpp-python is there; its import loads llama.cpp."""
    return find_spec("llama_cpp") is not None


@cache
def fails_reordered(threads: int) -> str | None:
    """How a process ends in which llama.cpp reorders its weights; None if it goes well.

    Its kernels for AMX, which read such weights, were seen to end the process.
    """
    command = [sys.executable, "-m", "multihead.bench.llama", str(threads)]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=_TRY_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no result after {_TRY_SECONDS} s"
    if done.returncode == 0:
        return None
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
    return f"does not run here: its process ends with {how}"


class Llama:
    """A context of `batch` sequences that have read the same tokens.

    Raises:
        Declined: the model's package is not installed.
    """

    def __init__(
        self, ids: Tensor, batch: int, context: int, threads: int, *, reordered: bool
    ) -> None:
        try:
            file = smollm2_file()
        except ModelError as error:
            raise Declined(str(error)) from None
        self._lib: Any = import_module("llama_cpp")
        lib = self._lib
        lib.llama_backend_init()
        lib.llama_log_set(_silent(lib), None)
        self._tokens = ids[0].tolist()
        self._batch, self._context = batch, context
        options = lib.llama_model_default_params()
        options.use_extra_bufts = reordered
        self._model = lib.llama_model_load_from_file(str(file).encode(), options)
        sizes = lib.llama_context_default_params()
        sizes.n_ctx = len(self._tokens) * batch + 64
        sizes.n_batch = sizes.n_ubatch = 512
        sizes.n_seq_max = batch
        sizes.n_threads = sizes.n_threads_batch = threads
        sizes.kv_unified = True
        self._state = lib.llama_init_from_model(self._model, sizes)
        self._memory = lib.llama_get_memory(self._state)
        self.vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._read()

    def _read(self) -> None:
        for start in range(0, self._context, 512):
            part = self._tokens[start : min(start + 512, self._context)]
            self._decode(part, range(start, start + len(part)), [0] * len(part))
        for sequence in range(1, self._batch):
            self._lib.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)

    def run(self) -> Tensor:
        """Read the next tokens one by one, forget them, and return the last logits [B, 1, V]."""
        sequences = range(self._batch)
        for place in range(self._context, len(self._tokens)):
            token = [self._tokens[place]] * self._batch
            self._decode(token, [place] * self._batch, sequences)
        logits = torch.stack([self._logits(row) for row in sequences])[:, None]
        for sequence in sequences:
            self._lib.llama_memory_seq_rm(self._memory, sequence, self._context, -1)
        return logits

    def prefill(self) -> Tensor:
        """Forget everything, read the context again, and return the last logits [1, V]."""
        self._lib.llama_memory_clear(self._memory, True)
        self._read()
        return self._logits(-1)[None]

    def _decode(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int]
    ) -> None:
        batch = self._lib.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            last = {sequence: row for row, sequence in enumerate(sequences)}
            for row, (token, position, sequence) in enumerate(
                zip(tokens, positions, sequences, strict=True)
            ):
                batch.token[row], batch.pos[row] = token, position
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
                batch.logits[row] = row == last[sequence]
            status = self._lib.llama_decode(self._state, batch)
        finally:
            self._lib.llama_batch_free(batch)
        if status:
            raise BackendError(f"llama.cpp failed to decode {len(tokens)} tokens: {status}.")

    def _logits(self, row: int) -> Tensor:
        pointer = self._lib.llama_get_logits_ith(self._state, row)
        return torch.tensor(pointer[: self.vocabulary])

    def __del__(self) -> None:
        if hasattr(self, "_state"):
            self._lib.llama_free(self._state)
            self._lib.llama_model_free(self._model)


def _silent(lib: Any) -> Any:
    """A log callback that says nothing, kept alive with the module."""
    if not hasattr(lib, "_multihead_silent"):
        lib._multihead_silent = lib.llama_log_callback(lambda level, text, data: None)
    return lib._multihead_silent


def main(threads: int) -> None:
    """Read forty tokens at once and a few one by one, for two sequences."""
    Llama(torch.arange(100, 144)[None], 2, 40, threads, reordered=True).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
