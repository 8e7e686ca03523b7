"""A cache for transformers models that is taken at once and costs what is filled.

    from multihead.integrations.hf_cache import PreallocatedCache

    cache = PreallocatedCache(model.config)
    model.generate(**inputs, past_key_values=cache)

transformers' own cache copies all tokens at each step. Here a step writes its own tokens behind the
others. Memory for them is reserved when the first come; the operating system provides a page of it
when a token is first written there, so reserving costs addresses alone.

Importing this module imports transformers, and raises MissingExtraError where it is absent or older
than 5.4.
"""

from __future__ import annotations

import mmap
from copy import copy
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..nn.cache.protocol import outside_inference, refuse_gradients
from ..nn.cache.quantized import quantize
from .deferred import Scaled
from .extras import import_extra

_hf = import_extra("transformers.cache_utils")

_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python's mmap names from 3.13 on
_LEAST_SLACK = 64  # tokens


class PreallocatedCache(_hf.DynamicCache):  # type: ignore[misc, name-defined]
    """Keys and values of all layers of a transformers model, in memory that is reserved once.

    Stands wherever transformers takes a DynamicCache: in `generate` with beams, assistants and
    padding, with any attention implementation. Keys and values come back as plain tensors, views
    of the memory, which are good until the cache changes. A layer with a sliding window keeps the
    window's tokens and room for a quarter more; layers without keys and values are transformers'
    own. Where autograd records keys or values, and under torch.compile, each step joins tensors
    anew, as transformers' own cache does.

    Args:
        config: the model's, which tells its layers.
        capacity: tokens that memory is reserved for; by default the config's
            `max_position_embeddings`. More tokens than that are moved, once, to twice the memory.
        dtype: None for the model's own, or torch.int8: a quarter of float32's bytes, with one
            scale for each token and head, as `QuantizedKVCache`. Keys and values then come back as
            tensors that multihead's attention reads as they lie, and that any other implementation
            finds written out.

    Raises:
        ArgumentError: another dtype, or a capacity below 1.
    """

    layers: list[Any]

    def __init__(
        self, config: Any, *, capacity: int | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config=config)
        if dtype not in (None, torch.int8):
            raise ArgumentError(f"dtype must be None (the model's own) or torch.int8; got {dtype}.")
        if capacity is None:
            decoder = config.get_text_config(decoder=True)
            capacity = int(getattr(decoder, "max_position_embeddings", 0) or 4096)
        if capacity < 1:
            raise ArgumentError(f"capacity must be at least 1 token; got {capacity}.")
        coding = _Int8() if dtype == torch.int8 else _Plain()
        self.layers = [_reserved(layer, capacity, coding) for layer in self.layers]

    @property
    def nbytes(self) -> int:
        """The bytes that hold tokens, scales included; what is only reserved does not count."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, _Layer))


class _Plain:
    """Keys and values as they come."""

    def encode(self, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        return key, value

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        key, value = parts
        return key, value


class _Int8:
    """int8, and a scale for each token and head."""

    def encode(self, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        refuse_gradients("PreallocatedCache in int8", key, value)
        return *quantize(key), *quantize(value)

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        key, key_scale, value, value_scale = parts
        return Scaled(key, key_scale, dtype), Scaled(value, value_scale, dtype)


def _reserved(layer: Any, capacity: int, coding: _Plain | _Int8) -> Any:
    """What stands for one of transformers' own layers: itself if it is of another kind."""
    if type(layer) is _hf.DynamicLayer:
        return _Layer(capacity, coding)
    if type(layer) is _hf.DynamicSlidingWindowLayer:
        return _SlidingLayer(layer.sliding_window, coding)
    return layer


class _Layer(_hf.CacheLayerMixin):  # type: ignore[misc, name-defined]
    """The tokens `first` to `end` of a layer lie in `memory` from `begin` on.

    `memory` holds tensors [B, Hkv, room, ...], of which nobody has seen what lies from `fresh` on;
    None before the first tokens.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, capacity: int, coding: _Plain | _Int8) -> None:
        # transformers' own __init__ would set `keys` and `values`, which are views here.
        self._capacity = capacity
        self._coding = coding
        self._memory: tuple[Tensor, ...] | None = None
        self._is_ours = True  # or whoever gave us the tensors may still read them
        self._begin = self._end = self._fresh = 0
        self._dtype = torch.float32

    @property
    def is_initialized(self) -> bool:
        """Whether any tokens came."""
        return self._memory is not None

    @property
    def keys(self) -> Tensor | None:
        """What is kept, [B, Hkv, L, D]."""
        return None if self._memory is None else self._decoded(self._kept())[0]

    @property
    def values(self) -> Tensor | None:
        """What is kept, [B, Hkv, L, Dv]."""
        return None if self._memory is None else self._decoded(self._kept())[1]

    @property
    def nbytes(self) -> int:
        """The bytes that hold tokens."""
        return 0 if self._memory is None else sum(part.nbytes for part in self._kept())

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: memory is taken with the first tokens."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append tokens; returns those that the new ones may see."""
        self._dtype = key_states.dtype
        parts = self._coding.encode(key_states, value_states)
        if _must_join(self._memory, parts):
            self._join(parts)
        else:
            self._append(parts)
        return self._decoded(self._kept())

    def get_seq_length(self) -> int:
        """How many tokens came so far."""
        return self._end - self._begin

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many tokens the next `query_length` see with themselves, and which is the first."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: there is no maximum."""
        return -1

    def reset(self) -> None:
        """Forget every token, and give the memory back."""
        self._memory, self._begin, self._end = None, 0, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens."""
        if tokens_to_remove > 0:
            raise ArgumentError(
                f"crop takes minus the number of tokens to remove; got {tokens_to_remove}."
            )
        self._end = max(self._begin, self._end + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i what row `beam_idx[i]` was."""
        rows = beam_idx.tolist()
        moved = [row for row, source in enumerate(rows) if row != source]
        if self._memory is None or not moved:
            return
        if len(rows) != self._memory[0].shape[0] or not self._is_ours:
            self._select(beam_idx)
            return
        # Rows that stay are left where they are: most, where one beam leads.
        for memory in self._memory:
            kept = memory.narrow(2, self._begin, self._end - self._begin)
            kept[moved] = kept[[rows[row] for row in moved]]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make each row `repeats` rows."""
        if self._memory is not None:
            self._select(torch.arange(self._memory[0].shape[0]).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`, integers or booleans."""
        if self._memory is not None:
            batch = torch.arange(self._memory[0].shape[0])
            self._select(batch[indices.to(batch.device)])

    def offload(self) -> None:
        """Refused: memory stays where it was reserved."""
        raise NotImplementedError("PreallocatedCache does not move between devices.")

    prefetch = offload

    def __deepcopy__(self, memo: dict[int, Any]) -> _Layer:
        # A copy of the memory would fill all that is reserved; clones also keep a history.
        made = copy(self)
        if self._memory is not None:
            with outside_inference():
                made._take(tuple([part.clone() for part in self._kept()]))
        return made

    def _kept(self) -> tuple[Tensor, ...]:
        assert self._memory is not None
        return tuple([x.narrow(2, self._begin, self._end - self._begin) for x in self._memory])

    def _decoded(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        return self._coding.decode(parts, self._dtype)

    def _join(self, parts: tuple[Tensor, ...]) -> None:
        """Hold what is kept and `parts` in tensors of their own."""
        if self._memory is not None:
            both = zip(self._kept(), parts, strict=True)
            parts = tuple([torch.cat(pair, dim=2) for pair in both])
        self._take(parts, ours=False)

    def _take(self, tensors: tuple[Tensor, ...], *, ours: bool = True) -> None:
        """Hold `tensors` [B, Hkv, L, ...] for memory, full as they are."""
        self._memory, self._is_ours = tensors, ours
        self._begin, self._end = 0, tensors[0].shape[2]
        self._fresh = self._end

    def _append(self, parts: tuple[Tensor, ...]) -> None:
        """Write tokens behind those that are kept."""
        count = parts[0].shape[2]
        self._make_room(parts, count)
        assert self._memory is not None
        fresh = self._end >= self._fresh
        for memory, part in zip(self._memory, parts, strict=True):
            # Autograd, which may have saved what was handed out, need not hear of fresh slots.
            (memory.data if fresh else memory).narrow(2, self._end, count).copy_(part)
        self._end += count
        self._fresh = max(self._fresh, self._end)

    def _make_room(self, parts: tuple[Tensor, ...], count: int) -> None:
        fits = self._memory is not None and self._end + count <= self._memory[0].shape[2]
        if fits and self._is_ours:
            return
        needed = self._end - self._begin + count
        self._move(parts, self._capacity if needed <= self._capacity else 2 * needed)

    def _move(self, parts: tuple[Tensor, ...], room: int) -> None:
        """Take memory for `room` tokens, like `parts`, and move what is kept there."""
        length = self._end - self._begin
        memory = tuple([_reserve(part, room) for part in parts])
        if self._memory is not None:
            for new, old in zip(memory, self._kept(), strict=True):
                new.narrow(2, 0, length).copy_(old)
        self._take(memory)
        self._end = self._fresh = length

    def _select(self, rows: Tensor) -> None:
        with outside_inference():
            kept = self._kept()
            self._take(tuple([part.index_select(0, rows.to(part.device)) for part in kept]))


class _SlidingLayer(_Layer):
    """The newest `sliding_window - 1` tokens, which the next one sees beside itself."""

    is_sliding = True

    def __init__(self, sliding_window: int, coding: _Plain | _Int8) -> None:
        # Room for some tokens more: all are moved to the front only when these are used up.
        slack = max(_LEAST_SLACK, sliding_window // 4)
        super().__init__(sliding_window - 1 + slack, coding)
        self.sliding_window = sliding_window
        self.cumulative_length = 0
        self.record_past = False

    def activate_past_recording(self) -> None:
        """Drop no token from now on until `crop`, which may then go back."""
        self.record_past = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append tokens; returns them and the `sliding_window - 1` before them."""
        self._dtype = key_states.dtype
        parts = self._coding.encode(key_states, value_states)
        count = parts[0].shape[2]
        visible = min(self._end - self._begin, self.sliding_window - 1) + count
        self.cumulative_length += count
        longer = count > self._capacity - self.sliding_window + 1
        must_join = _must_join(self._memory, parts)
        if must_join or (longer and not self.record_past):
            self._join(parts)
        else:
            self._append(parts)
        assert self._memory is not None
        seen = tuple([part.narrow(2, self._end - visible, visible) for part in self._memory])
        if not self.record_past:
            self._begin = max(self._begin, self._end - self.sliding_window + 1)
            if longer and not must_join:  # let go of all but the window's tokens
                self._move(parts, self._capacity)
        return self._decoded(seen)

    def get_seq_length(self) -> int:
        """How many tokens came so far."""
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many tokens the next `query_length` see with themselves, and which is the first."""
        past = min(self.cumulative_length, self.sliding_window - 1)
        return past + query_length, self.cumulative_length - past

    def get_max_length(self) -> int:
        """How many tokens one sees, itself included."""
        return self.sliding_window

    def reset(self) -> None:
        """Forget every token, and give the memory back."""
        super().reset()
        self.cumulative_length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens, and drop what no later one sees.

        Raises RuntimeError where tokens that a later one sees again are dropped already.
        """
        dropped = self.cumulative_length - (self._end - self._begin)
        if tokens_to_remove < 0 and dropped > 0:
            left = max(0, self.cumulative_length + tokens_to_remove)
            if max(0, left - self.sliding_window + 1) < dropped:
                raise RuntimeError(
                    f"crop: tokens that a window of {self.sliding_window} sees again are dropped "
                    "already. Call activate_past_recording before the tokens come."
                )
        before = self._end
        super().crop(tokens_to_remove)
        self.cumulative_length -= before - self._end
        self._begin = max(self._begin, self._end - self.sliding_window + 1)

    def _make_room(self, parts: tuple[Tensor, ...], count: int) -> None:
        length = self._end - self._begin
        room = 0 if self._memory is None else self._memory[0].shape[2]
        if (
            self._memory is not None
            and self._is_ours
            and self._end + count > room >= length + count
            and not torch.is_grad_enabled()  # else autograd may have saved what lies in front
        ):
            for memory, kept in zip(self._memory, self._kept(), strict=True):
                memory.narrow(2, 0, length).copy_(kept.clone())
            self._begin, self._end = 0, length
        super()._make_room(parts, count)


def _must_join(memory: tuple[Tensor, ...] | None, parts: tuple[Tensor, ...]) -> bool:
    """Whether memory must not be written to: autograd or a graph has it as it was."""
    if torch.compiler.is_compiling():
        return True
    tensors = (*(memory or ()), *parts)
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _reserve(like: Tensor, room: int) -> Tensor:
    """Memory [B, Hkv, room, ...] of which nothing is used until it is written to."""
    shape = (*like.shape[:2], room, *like.shape[3:])
    size = like.element_size()
    for length in shape:
        size *= length
    if like.device.type != "cpu" or size == 0:
        return like.new_empty(shape)
    # torch's own memory may be some that was used before, or come in pages of two megabytes, of
    # which a single token would use one for each head.
    if hasattr(mmap, "MAP_ANONYMOUS"):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux
            flags |= _NO_RESERVE
        memory = mmap.mmap(-1, size, flags=flags)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    else:
        memory = mmap.mmap(-1, size)
    with outside_inference():
        return torch.frombuffer(memory, dtype=like.dtype).view(shape)
