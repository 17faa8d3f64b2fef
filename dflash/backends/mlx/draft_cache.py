"""Context keys and values of one draft layer: append-only, rolled back by length.

Room grows in steps, and rows are written in place. A layer with a ``bound`` keeps no more than that
many rows and some to spare, and shows the newest.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from dflash.backends.mlx.dflash import KeyValue

STEP = 256  # rows by which room grows


class LayerCache:
    """Rows of consecutive positions; with a ``bound`` only the newest that many are seen."""

    def __init__(self, bound: int | None) -> None:
        """Empty; ``bound`` None = every row is seen."""
        self.bound = bound
        self.first = 0  # position of row 0
        self.count = 0  # context rows held
        self._keys: Any = None  # [1, nkv, room, D]
        self._values: Any = None

    @property
    def seen(self) -> int:
        """Context rows a block would see."""
        return self.count if self.bound is None else min(self.count, self.bound)

    def append(self, key: Any, value: Any, position: int) -> None:
        """Add context rows [1, nkv, n, D] from ``position`` on; a gap forgets what was before."""
        if position != self.first + self.count:
            assert self.bound is not None, "an unbounded draft cache has no gaps"
            self.first, self.count = position, 0
        self._make_room(key, value)
        end = self.count + key.shape[2]
        self._keys[..., self.count : end, :] = key
        self._values[..., self.count : end, :] = value
        self.count = end

    def view(self) -> KeyValue | None:
        """The context seen: a pair of [1, nkv, T, D]; None = nothing yet."""
        if not self.seen:
            return None
        start = self.count - self.seen
        return self._keys[..., start : self.count, :], self._values[..., start : self.count, :]

    def crop(self, end: int) -> None:
        """Forget context rows at ``end`` and after."""
        self.count = max(0, min(end, self.first + self.count) - self.first)

    def copy(self) -> LayerCache:
        """An independent cache with the same rows."""
        twin = LayerCache(self.bound)
        twin.first, twin.count = self.first, self.count
        if self._keys is not None:
            twin._keys, twin._values = mx.array(self._keys), mx.array(self._values)
        return twin

    def bytes(self) -> int:
        """Bytes held."""
        return 0 if self._keys is None else int(self._keys.nbytes + self._values.nbytes)

    def _make_room(self, key: Any, value: Any) -> None:
        room = 0 if self._keys is None else self._keys.shape[2]
        if self.count + key.shape[2] <= room:
            return
        drop = self.count - self.seen
        size = ((self.seen + key.shape[2]) // STEP + 1) * STEP
        shape = (*key.shape[:2], size - self.seen)
        self._keys, self._values = (
            mx.concatenate(
                [
                    *([] if old is None else [old[..., drop : self.count, :]]),
                    mx.zeros((*shape, new.shape[3]), new.dtype),
                ],
                axis=2,
            )
            for old, new in ((self._keys, key), (self._values, value))
        )
        self.first, self.count = self.first + drop, self.seen
