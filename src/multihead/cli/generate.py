"""`multihead generate`: a language model continues a text, as fast as it can be read."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from multihead.cli.numbers import rate, seconds, short_bytes
from multihead.cli.output import print_json, stderr_console
from multihead.cli.progress import progress
from multihead.cli.tokens import printable
from multihead.errors import InputError

if TYPE_CHECKING:
    from multihead.integrations import LoadedLanguageModel, TextTokenizer
    from multihead.models.caches import CacheKind

# Columns that are read at once: memory of long prompts is bounded, and nothing is slower.
_CHUNK = 2048


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    chat: bool = False
    cache: CacheKind = "growing"


@dataclass
class Run:
    """What came out, as far as it is."""

    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    stopped: str = "length"
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


def run(model: str, prompt: str | None, options: Options, *, dtype: str, as_json: bool) -> None:
    """Continue `prompt`, or what stands on stdin, and print the new text as it comes.

    Raises:
        InputError: no prompt, or options that cannot be used.
        ModelError: a model that is not here or cannot continue texts.
        MissingExtraError: a package that its file needs is not installed.
    """
    check(options)
    text = read_prompt(prompt)
    with progress() as advance:
        advance(f"loading {model}", 0.0)
        began = time.perf_counter()
        import torch

        from multihead.integrations import load_language_model

        loaded = load_language_model(model, dtype=getattr(torch, dtype))
        loading = time.perf_counter() - began
    tokens = encode(loaded, text, options)
    seed = options.seed
    if seed is None:
        seed = torch.Generator().seed() % 2**32
    generator = torch.Generator().manual_seed(seed)
    capacity = len(tokens) + options.max_new_tokens
    caches = loaded.model.make_caches(options.cache, capacity=capacity)
    out = _silent if as_json else _to_terminal
    done = _continue(loaded, tokens, options, generator, caches, out)
    memory = {
        "kind": options.cache,
        "tokens": caches[0].length,
        "bytes": sum(cache.nbytes for cache in caches),
        "filled_bytes": sum(cache.filled_nbytes for cache in caches),
    }
    if as_json:
        print_json(_document(loaded, done, options, seed, loading, memory, dtype))
    else:
        _print_summary(done, memory)


def check(options: Options) -> None:
    """Raise InputError for options that cannot be used, or that would do nothing."""
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise InputError(f"--top-p must be above 0 and at most 1; got {options.top_p}.")
    drawing = {"--top-k": options.top_k, "--top-p": options.top_p, "--seed": options.seed}
    given = [name for name, value in drawing.items() if value is not None]
    if options.temperature == 0 and given:
        raise InputError(
            f"{' and '.join(given)} would do nothing: at --temperature 0 no token is drawn. Set "
            "it too, to 0.7 for example."
        )


def read_prompt(prompt: str | None) -> str:
    """The prompt, of stdin where none or "-" is given. Raises InputError for an empty one."""
    if prompt is None and sys.stdin.isatty():
        raise InputError(
            "There is no prompt. Write it behind the command, multihead generate 'Once upon', or "
            "pipe it in."
        )
    if prompt in (None, "-"):
        try:
            prompt = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise InputError(f"The prompt on stdin is no text: {error}.") from error
    assert prompt is not None
    if not prompt:
        raise InputError("The prompt is empty. Give at least one token to continue.")
    return prompt


def encode(loaded: LoadedLanguageModel, text: str, options: Options) -> list[int]:
    """The prompt's tokens. Raises InputError where they are too many for the model."""
    tokenizer = loaded.tokenizer
    if options.chat:
        tokens = tokenizer.encode_chat([{"role": "user", "content": text}])
    else:
        tokens = tokenizer.encode(text)
    longest = loaded.facts.context_length
    if longest is not None and len(tokens) + options.max_new_tokens > longest:
        raise InputError(
            f"The prompt has {len(tokens)} tokens, and the model was trained on {longest} at most: "
            f"there is no room for {options.max_new_tokens} more. Shorten it, or set "
            "--max-new-tokens."
        )
    return tokens


class TextStream:
    """Text of tokens that come one at a time, cut where characters are whole.

    Decoding every token by itself would break characters that are several tokens, and spaces that
    depend on the token before; so each piece is what the last few tokens add to those before them.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = 0  # tokens whose text is out

    def add(self, token: int) -> str:
        """The text that is whole with one more token; "" within a character."""
        self._tokens.append(token)
        text = self._added()
        if not text or text.endswith("\ufffd"):
            return ""
        # The tokens just shown stay as the context of the next.
        self._tokens = self._tokens[self._shown :]
        self._shown = len(self._tokens)
        return text

    def rest(self) -> str:
        """What is left at the end: a broken character, if anything."""
        return self._added()

    def _added(self) -> str:
        before = self._tokenizer.decode(self._tokens[: self._shown])
        return self._tokenizer.decode(self._tokens)[len(before) :]


def _continue(
    loaded: LoadedLanguageModel,
    tokens: list[int],
    options: Options,
    generator: Any,
    caches: Any,
    out: Callable[[str], None],
) -> Run:
    from multihead.models import generate_steps

    done, text = Run(len(tokens)), TextStream(loaded.tokenizer)
    began = time.perf_counter()
    try:
        for step in generate_steps(
            loaded.model,
            tokens,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            stop=loaded.stop_tokens,
            generator=generator,
            cache=caches,
            chunk=_CHUNK,
        ):
            (token,) = step.tokens
            assert token is not None
            now = time.perf_counter()
            if done.tokens:
                done.decode_seconds = now - began - done.prefill_seconds
            else:
                done.prefill_seconds = now - began
            done.tokens.append(token)
            _emit(text.add(token), done, out)
        _emit(text.rest(), done, out)
    finally:
        if done.tokens:
            out("\n")
    if done.tokens and done.tokens[-1] in loaded.stop_tokens:
        done.stopped = "stop token"
    return done


def _emit(piece: str, done: Run, out: Callable[[str], None]) -> None:
    if piece:
        done.text += piece
        out(piece)


def _to_terminal(piece: str) -> None:
    sys.stdout.write(printable(piece) if sys.stdout.isatty() else piece)
    sys.stdout.flush()


def _silent(piece: str) -> None:
    pass


def _speeds(done: Run) -> tuple[float | None, float | None]:
    """Tokens a second: of the prompt, and of what follows the first new token."""
    prefill = done.prompt_tokens / done.prefill_seconds if done.prefill_seconds else None
    decode = (len(done.tokens) - 1) / done.decode_seconds if done.decode_seconds else None
    return prefill, decode


def _print_summary(done: Run, memory: dict[str, Any]) -> None:
    """One line on stderr, so that stdout holds the text alone."""
    prefill, decode = _speeds(done)
    parts = [f"{done.prompt_tokens} tokens read in {seconds(done.prefill_seconds)}"]
    if prefill is not None:
        parts[-1] += f" ({rate(prefill)} tokens/s)"
    parts.append(f"{len(done.tokens)} written in {seconds(done.decode_seconds)}")
    if decode is not None:
        parts[-1] += f" ({rate(decode)} tokens/s)"
    parts.append(f"{memory['kind']} cache {short_bytes(memory['bytes'])}")
    if done.stopped == "length":
        parts.append("cut at --max-new-tokens")
    from multihead.cli.terminal.style import QUIET, flow, room

    console = stderr_console()
    console.print(flow(parts, room(console)), style=QUIET)


def _document(
    loaded: LoadedLanguageModel,
    done: Run,
    options: Options,
    seed: int,
    loading: float,
    memory: dict[str, Any],
    dtype: str,
) -> dict[str, Any]:
    import torch

    prefill, decode = _speeds(done)
    return {
        "model": loaded.facts.name,
        "file": loaded.facts.file,
        "parameters": loaded.facts.parameters,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "chat": options.chat,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "seed": None if options.temperature == 0 else seed,
        "prompt_tokens": done.prompt_tokens,
        "tokens": done.tokens,
        "text": done.text,
        "stopped": done.stopped,
        "seconds": {
            "load": loading,
            "prefill": done.prefill_seconds,
            "decode": done.decode_seconds,
        },
        "tokens_per_second": {"prefill": prefill, "decode": decode},
        "cache": memory,
    }
