"""Context keys and values of draft layers: preallocated, append-only, rolled back by length.

Behind the context there is room for one block. Block rows are written there for one forward and
overwritten by the next context rows, so nothing is copied while a text grows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash.backends.torch.slots import Span
from dflash.drafts.spec import DraftSpec


class LayerCache:
    """Rows of consecutive positions; with a ``bound`` only the newest that many are seen."""

    def __init__(
        self,
        spec: DraftSpec,
        capacity: int,  # context rows
        bound: int | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
        layers: int = 1,  # L, which run as one: in place of the 1 in shapes below
    ) -> None:
        """Allocate ``min(capacity, bound) + block_size`` rows, unwritten."""
        self.bound = bound
        rows = (capacity if bound is None else min(capacity, bound)) + spec.block_size
        shape = (layers, 2, spec.num_kv_heads, rows, spec.head_dim)  # keys, values
        self.rows = torch.empty(shape, device=device, dtype=dtype)
        self.first = 0  # position of row 0
        self.count = 0  # context rows held

    @property
    def end(self) -> int:
        """Position after the last context row."""
        return self.first + self.count

    @property
    def seen(self) -> int:
        """Context rows a block would see."""
        return self.count if self.bound is None else min(self.count, self.bound)

    def append(self, key: Tensor, value: Tensor, position: int) -> None:
        """Add context rows [1, nkv, n, D] from ``position`` on; a gap forgets what was before."""
        if self.bound is not None and key.shape[2] > self.bound:
            position += key.shape[2] - self.bound
            key, value = (x[:, :, x.shape[2] - self.bound :] for x in (key, value))
        if position != self.end:
            assert self.bound is not None, "an unbounded draft cache has no gaps"
            self.first, self.count = position, 0
        self._write(key, value)
        self.count += key.shape[2]

    def __call__(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The context seen and these block rows behind it: a pair of [1, nkv, T + R, D] views."""
        self._write(key, value)
        start, stop = self.count - self.seen, self.count + key.shape[2]
        view = self.rows[:, :, :, start:stop]
        return view[:, 0], view[:, 1]

    def slots(self, rows: int) -> Span:
        """Where each layer's block rows go, behind the context that it sees."""
        self._make_room(rows)
        return Span(self.rows, self.count - self.seen, self.count, rows)

    def crop(self, end: int) -> None:
        """Forget context rows at ``end`` and after."""
        self.count = max(0, min(end, self.end) - self.first)

    def grow(self, capacity: int, block_size: int) -> None:
        """Room for ``capacity`` context rows (as many of them as are seen) and one block."""
        rows = (capacity if self.bound is None else min(capacity, self.bound)) + block_size
        if rows <= self.rows.shape[3]:
            return
        held = self.rows
        self.rows = held.new_empty((*held.shape[:3], rows, held.shape[4]))
        self.rows[:, :, :, : self.count] = held[:, :, :, : self.count]

    def copy(self) -> LayerCache:
        """An independent cache with the same rows."""
        twin = object.__new__(LayerCache)
        twin.bound, twin.first, twin.count = self.bound, self.first, self.count
        twin.rows = torch.empty_like(self.rows)
        twin.rows[:, :, :, : self.count] = self.rows[:, :, :, : self.count]
        return twin

    def bytes(self) -> int:
        """Bytes allocated."""
        return self.rows.numel() * self.rows.element_size()

    def _write(self, key: Tensor, value: Tensor) -> None:
        """Put rows behind the context."""
        size = key.shape[2]
        self._make_room(size)
        self.rows[:, 0, :, self.count : self.count + size] = key
        self.rows[:, 1, :, self.count : self.count + size] = value

    def _make_room(self, size: int) -> None:
        """Move the context to the front where ``size`` rows do not fit behind it."""
        if self.count + size > self.rows.shape[3]:
            assert self.bound is not None, "more context than the session was opened for"
            keep = min(self.bound, self.rows.shape[3] - size)
            start = self.count - keep
            self.rows[:, :, :, :keep] = self.rows[:, :, :, start : self.count].clone()
            self.first, self.count = self.first + start, keep
