"""A cache in pages: rows of any length, and forks, share one pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...masks import KeyLengths
from ...ops import KeyValues
from ...ops.key_values import held
from .protocol import (
    Shape,
    check_sizes,
    checked_counts,
    kept_of,
    outside_inference,
    refuse_gradients,
    row_index,
)

_FIRST_PAGES = 8


class Pool:
    """Pages [P, Hkv, S, D] of keys and of values, and how many rows read each.

    With `fixed` pages it never grows; otherwise it doubles when none is free.
    """

    def __init__(self, shape: Shape, page_size: int, pages: int, *, fixed: bool) -> None:
        self.page_size = page_size
        self.fixed = fixed
        self._shape = shape
        self.key = self.value = torch.empty(0)
        self.readers: list[int] = []
        self._free: list[int] = []
        self._grow(pages)

    @property
    def nbytes(self) -> int:
        """The bytes of all pages."""
        return self.key.nbytes + self.value.nbytes

    @property
    def page_nbytes(self) -> int:
        """The bytes of one page of keys and of values."""
        return self.nbytes // len(self.readers) if self.readers else 0

    @property
    def free(self) -> int:
        """How many pages nobody reads."""
        return len(self._free)

    def reserve(self, pages: int) -> None:
        """Make sure that as many are free; raises ArgumentError where a fixed pool has fewer."""
        missing = pages - self.free
        if missing <= 0:
            return
        if self.fixed:
            raise ArgumentError(
                f"The pool's {len(self.readers)} pages of {self.page_size} tokens are in use but "
                f"for {self.free}, and {pages} are needed. Make the cache with more num_pages, or "
                "reset caches that are done."
            )
        self._grow(max(missing, len(self.readers)))

    def take(self) -> int:
        """A free page, of which `reserve` has made sure."""
        page = self._free.pop()
        self.readers[page] = 1
        return page

    def share(self, pages: Sequence[int]) -> None:
        """One more row reads these."""
        for page in pages:
            self.readers[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """One row fewer reads these; pages that nobody reads are free."""
        for page in pages:
            self.readers[page] -= 1
            if self.readers[page] == 0:
                self._free.append(page)

    def own(self, page: int) -> int:
        """A page with the same tokens that one row alone reads: itself, or a copy."""
        if self.readers[page] == 1:
            return page
        mine = self.take()
        self.key[mine] = self.key[page]
        self.value[mine] = self.value[page]
        self.readers[page] -= 1
        return mine

    def _grow(self, more: int) -> None:
        before, shape = len(self.readers), self._shape
        with outside_inference():
            size = before + more, shape.heads, self.page_size
            place: dict[str, Any] = dict(dtype=shape.dtype, device=shape.device)
            key = torch.empty((*size, shape.head_dim), **place)
            value = torch.empty((*size, shape.value_dim), **place)
            if before:
                key[:before], value[:before] = self.key, self.value
        self.key, self.value = key, value
        self.readers += [0] * more
        # From the end on: the first pages are taken first.
        self._free = [*range(before + more - 1, before - 1, -1), *self._free]


class PagedKVCache:
    """Keys and values in pages of one pool, for rows that may differ in length.

    A row takes a page when it has filled its last one. Forks and reordered rows share pages; who
    writes to a page that another row reads copies that page alone.

    Pages are written in place, so gradients are refused. The page lists are Python's: in
    torch.compile call `update` outside of the graph.

    Args:
        batch: B.
        num_kv_heads: Hkv.
        head_dim: D.
        value_dim: Dv; by default D. 0 where `LatentKVCache` wraps the cache.
        page_size: tokens of a page. The native kernel reads pages of a multiple of 64 in place,
            and copies 64 tokens at a time from others.
        num_pages: pages of the pool, for all rows and forks together; by default it grows.
        dtype: of keys and values.
        device: where they lie.

    Raises:
        ArgumentError, DtypeError: sizes that a cache cannot have.

    Source: Kwon et al. 2023.
    """

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        page_size: int = 64,
        num_pages: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        value_dim = head_dim if value_dim is None else value_dim
        check_sizes(head_dim=head_dim)
        # A layer may have lost all its heads; its cache still counts tokens.
        check_sizes(0, num_kv_heads=num_kv_heads)
        check_sizes(0, batch=batch, value_dim=value_dim)
        check_sizes(page_size=page_size, num_pages=1 if num_pages is None else num_pages)
        self._shape = Shape(batch, num_kv_heads, head_dim, value_dim, dtype, torch.device(device))
        fixed = num_pages is not None
        pages = num_pages if num_pages is not None else max(_FIRST_PAGES, batch)
        self._pool = Pool(self._shape, page_size, pages, fixed=fixed)
        self._rows: list[list[int]] = [[] for _ in range(batch)]
        self._lengths = [0] * batch
        self._table: Tensor | None = None

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._pool.page_size

    @property
    def length(self) -> int:
        """How many tokens the longest row holds."""
        return max(self._lengths, default=0)

    @property
    def lengths(self) -> Tensor:
        """How many tokens each row holds: int32 [B]."""
        return torch.tensor(self._lengths, dtype=torch.int32, device=self._shape.device)

    @property
    def table(self) -> Tensor:
        """The pages of each row: int32 [B, n]; 0 behind a row's last one."""
        if self._table is None:
            most = max(map(len, self._rows), default=0)
            padded = [pages + [0] * (most - len(pages)) for pages in self._rows]
            self._table = torch.tensor(padded, dtype=torch.int32, device=self._shape.device)
            self._table = self._table.view(len(padded), most)
        return self._table

    @property
    def nbytes(self) -> int:
        """The bytes of the pool, which forks share, and of this cache's table."""
        return self._pool.nbytes + self.table.nbytes

    @property
    def filled_nbytes(self) -> int:
        """The bytes of the pages that this cache reads, each counted once, and of its table."""
        pages = {page for row in self._rows for page in row}
        return len(pages) * self._pool.page_nbytes + self.table.nbytes

    def positions(self, length: int) -> Tensor:
        """Where the next `length` tokens stand: int64 [L], or [B, L] where rows differ."""
        new = torch.arange(length, device=self._shape.device)
        if self._is_even():
            return new + self.length
        return self.lengths[:, None] + new

    def update(self, key: Tensor, value: Tensor, query_lengths: Tensor | None = None) -> KeyValues:
        """Append `key` [B, Hkv, L, D] and `value` [B, Hkv, L, Dv] to each row.

        With `query_lengths`, integers [B], row b appends its first `query_lengths[b]` tokens alone,
        as a right-padded batch has them; its other queries see nothing.

        Raises ArgumentError, before anything is written, where the pool has no page left, and for
        tensors that do not fit; DtypeError, DeviceError likewise.
        """
        count = self._shape.accepts(key, value)
        refuse_gradients("PagedKVCache", key, value)
        counts = [count] * len(self._rows)
        if query_lengths is not None:
            query_lengths = checked_counts(query_lengths, len(counts), count)
            counts = query_lengths.tolist()
        self._make_room(counts)
        if count == 1 and query_lengths is None:
            self._write_one(key, value)
        else:
            for row, new in enumerate(counts):
                self._write(row, key[row], value[row], new)
        whole = query_lengths is None and self._is_even()
        return held(
            key=self._pool.key,
            value=self._pool.value,
            frame=None if whole else KeyLengths(self.lengths, query_lengths),
            pages=self.table,
            length=self.length,
        )

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens of each row; a negative number removes from the end."""
        for row, held_before in enumerate(self._lengths):
            kept = kept_of(length, held_before)
            pages = -(-kept // self.page_size)
            self._pool.give_back(self._rows[row][pages:])
            del self._rows[row][pages:]
            self._lengths[row] = kept
        self._table = None

    def reset(self) -> None:
        """Forget every token, and give the pages back to the pool."""
        self.crop(0)

    def fork(self) -> Self:
        """A second cache with the same tokens, on the same pages of the same pool."""
        made = self._alike(self._pool)
        made._rows = [list(pages) for pages in self._rows]
        for pages in made._rows:
            self._pool.share(pages)
        return made

    __copy__ = fork

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        """Make row i of the batch what row `rows[i]` was, without copying a token."""
        index = row_index(rows, self._shape.batch, self._shape.device).tolist()
        before = self._rows
        self._rows = [list(before[row]) for row in index]
        for pages in self._rows:
            self._pool.share(pages)
        for pages in before:
            self._pool.give_back(pages)
        self._lengths = [self._lengths[row] for row in index]
        self._shape = self._shape.with_batch(len(index))
        self._table = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy with a pool of its own, which holds the pages of this cache alone."""
        pages = sorted({page for row in self._rows for page in row})
        fixed = self._pool.fixed
        size = len(self._pool.readers) if fixed else max(len(pages), _FIRST_PAGES)
        pool = Pool(self._shape, self.page_size, size, fixed=fixed)
        made = self._alike(pool)
        number = {page: pool.take() for page in pages}
        for page, mine in number.items():
            pool.key[mine], pool.value[mine] = self._pool.key[page], self._pool.value[page]
        made._rows = [[number[page] for page in row] for row in self._rows]
        for row in made._rows:
            pool.share(row)
        pool.give_back(tuple(number.values()))
        return made

    def __del__(self) -> None:
        # A fork that is dropped gives its pages back.
        if hasattr(self, "_table"):
            for pages in self._rows:
                self._pool.give_back(pages)

    def _alike(self, pool: Pool) -> Self:
        made = object.__new__(type(self))
        made._shape, made._pool, made._lengths = self._shape, pool, list(self._lengths)
        made._rows, made._table = [], None
        return made

    def _is_even(self) -> bool:
        return not self._lengths or min(self._lengths) == max(self._lengths)

    def _make_room(self, counts: list[int]) -> None:
        """Pages of its own for what each row will write, or an error and no change."""
        size, pool, needed = self.page_size, self._pool, 0
        for pages, begin, new in zip(self._rows, self._lengths, counts, strict=True):
            needed += max(0, -(-(begin + new) // size) - len(pages))
            # Each row that shares its last page may need a copy of it.
            needed += bool(new and begin % size and pool.readers[pages[-1]] > 1)
        pool.reserve(needed)
        for pages, begin, new in zip(self._rows, self._lengths, counts, strict=True):
            if new and begin % size:
                owned = pool.own(pages[-1])
                if owned != pages[-1]:
                    pages[-1], self._table = owned, None
            while len(pages) * size < begin + new:
                pages.append(pool.take())
                self._table = None

    def _write_one(self, key: Tensor, value: Tensor) -> None:
        """One token to each row."""
        size, device = self.page_size, self._shape.device
        where = [
            (pages[length // size], length % size)
            for pages, length in zip(self._rows, self._lengths, strict=True)
        ]
        pages, slots = torch.tensor(where, dtype=torch.int64, device=device).view(-1, 2).unbind(1)
        self._pool.key[pages, :, slots] = key[:, :, 0]
        self._pool.value[pages, :, slots] = value[:, :, 0]
        self._lengths = [length + 1 for length in self._lengths]

    def _write(self, row: int, key: Tensor, value: Tensor, count: int) -> None:
        """Token by token of key and value [Hkv, L, D], as many at a time as a page takes."""
        size, done = self.page_size, 0
        while done < count:
            page, slot = divmod(self._lengths[row], size)
            number = self._rows[row][page]
            fits = min(size - slot, count - done)
            for pool, tokens in ((self._pool.key, key), (self._pool.value, value)):
                pool[number].narrow(1, slot, fits).copy_(tokens.narrow(1, done, fits))
            done += fits
            self._lengths[row] += fits
