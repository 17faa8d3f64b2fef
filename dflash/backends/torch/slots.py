"""Where the layers of one pass write their keys and values, and where they read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

from torch import Tensor


class Slot(NamedTuple):
    """Where a layer's new rows go, and everything they see once they are there."""

    new: Tensor  # [1, 2 * nkv, n, D] keys, then values of the rows
    keys: Tensor  # [1, nkv, T + n, D]
    values: Tensor
    rows: int  # n

    def put(self, rows: Tensor) -> None:
        """Write keys and values [1, 2 * nkv, n, D] of the new rows."""
        self.new.copy_(rows)


class FixedSlot(NamedTuple):
    """The same in memory of a fixed length, the places of the new rows told by the device."""

    both: Tensor  # [1, 2 * nkv, capacity, D] keys, then values of a layer
    at: Tensor  # [n] places of the new rows
    size: int  # rows that are looked at; a mask hides those that are not there yet

    @property
    def rows(self) -> int:
        """How many are new."""
        return self.at.shape[0]

    @property
    def keys(self) -> Tensor:
        """``[1, nkv, size, D]``."""
        return self.both[:, : self.both.shape[1] // 2, : self.size]

    @property
    def values(self) -> Tensor:
        """``[1, nkv, size, D]``."""
        return self.both[:, self.both.shape[1] // 2 :, : self.size]

    def put(self, rows: Tensor) -> None:
        """Write keys and values [1, 2 * nkv, n, D] of the new rows."""
        self.both.index_copy_(2, self.at, rows)


class OuterSlot(NamedTuple):
    """A slot that a pass only knows to be there: its attention happens outside of the pass."""

    rows: int
    attend: Callable[[Tensor], Tensor]  # heads [n, heads * D], see `DecoderLayer.attend`


def fixed_slots(whole: Tensor, at: Tensor, size: int) -> list[FixedSlot]:
    """A slot a layer in ``whole [L, 2, nkv, capacity, D]``."""
    return [FixedSlot(both[None], at, size) for both in whole.flatten(1, 2).unbind()]


@dataclass(frozen=True, slots=True)
class Span:
    """A slot a layer in memory of one piece: rows ``start`` to ``start + rows - 1`` are new, and
    rows ``first`` and later are seen."""

    whole: Tensor  # [L, 2, nkv, capacity, D], contiguous
    first: int
    start: int
    rows: int

    def __iter__(self) -> Iterator[Slot]:
        """The slots, layer after layer. All views of a pass are taken at once."""
        whole, start, end = self.whole, self.start, self.start + self.rows
        both = whole.view(whole.shape[0], 1, -1, *whole.shape[3:])
        new = both[:, :, :, start:end].unbind()
        keys, values = (whole[:, side, None, :, self.first : end].unbind() for side in (0, 1))
        return map(Slot, new, keys, values, repeat(self.rows))
