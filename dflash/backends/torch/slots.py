"""Where the layers of one pass write their keys and values, and where they read them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor


class Slot(NamedTuple):
    """Where a layer's new rows go, and everything they see once they are there."""

    new: Tensor  # [1, 2 * nkv, n, D] keys, then values of the rows
    keys: Tensor  # [1, nkv, T + n, D]
    values: Tensor


def slots_of(whole: Tensor, first: int, start: int, end: int) -> Iterator[Slot]:
    """A slot a layer in ``whole [L, 2, nkv, capacity, D]``: rows start .. end - 1 are new, and rows
    ``first`` and later are seen. All views of a pass are taken at once."""
    both = whole.view(whole.shape[0], 1, -1, *whole.shape[3:])
    new = both[:, :, :, start:end].unbind()
    keys, values = (whole[:, side, None, :, first:end].unbind() for side in (0, 1))
    return map(Slot, new, keys, values)
