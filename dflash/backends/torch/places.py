"""What depends on positions alone, computed once and handed out as views: rotations and masks.

A pass over n rows behind a context of any length takes a slice of each. The tables belong to a
model, grow by doubling, and are shared by its sessions; two threads that grow one at a time do the
same work twice and no harm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash.backends.torch.attention import MOST_ROWS
from dflash.backends.torch.tree import Branches, tree_bias

FIRST = 512  # positions of the first tables


class Places:
    """Turns and biases of positions 0 .. size - 1, for rows behind one sequence."""

    def __init__(self, turns: Any, groups: int, like: Tensor) -> None:
        """``turns`` is the model's `fused.Turns`; ``groups`` as `attention.stacked_groups` says."""
        self._make, self._groups, self._like = turns, groups, like
        self._tables = self._grown(FIRST)

    def turns(self, start: int, end: int) -> Tensor:
        """Rotations of rows start .. end - 1: [n, 1, D/2] complex."""
        return self._covering(end)[0][start:end]

    def bias(self, start: int, end: int) -> Tensor | None:
        """What is added to scores of rows start .. end - 1 over keys 0 .. end - 1, as
        `attention.attend_rows` takes it: ``[n * groups, end]`` for few rows, ``[n, end]`` for many,
        None where there is nothing to hide or the product knows by itself.
        """
        rows = end - start
        if rows == 1 or (start == 0 and rows > MOST_ROWS):
            return None
        if rows > MOST_ROWS:
            return _hidden(self._like, torch.arange(start, end), torch.arange(end))
        table = self._covering(end)[1]
        zero = table.shape[1] - MOST_ROWS  # the column of a row's first key behind the context
        return table[: rows * self._groups, zero - start : zero + rows]

    def table(self, end: int) -> Tensor:
        """Rotations of positions 0 .. end - 1 and perhaps more: [m, 1, D/2] complex."""
        return self._covering(end)[0]

    def bias_at(self, at: Tensor, size: int) -> Tensor:
        """`bias` of few rows at places ``at [n]`` over ``size`` keys: ``[n * groups, size]``."""
        rows = at[:, None].expand(-1, self._groups).flatten()
        return _hidden(self._like, rows, torch.arange(size, device=at.device))

    def branching(self, start: int, tree: Branches, more: int) -> tuple[Tensor, Tensor]:
        """Both for the rows of a ``tree`` behind ``start`` cached ones; turns for ``more`` rows."""
        turns = self.turns(start, start + tree.most + 1)[F.pad(tree.depths, (0, more))]
        bias = tree_bias(tree, start, self._like)
        few = bias.shape[0] <= MOST_ROWS
        return turns, bias.repeat_interleave(self._groups, dim=0) if few else bias

    def _covering(self, end: int) -> tuple[Tensor, Tensor]:
        tables = self._tables
        if tables[0].shape[0] < end:
            self._tables = tables = self._grown(1 << (end - 1).bit_length())
        return tables

    def _grown(self, size: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(size, device=self._like.device)
        rows = torch.arange(MOST_ROWS).repeat_interleave(self._groups)
        with torch.inference_mode():
            turns: Tensor = self._make(self._like, positions[None])[0]
            return turns, _hidden(self._like, rows, torch.arange(-size, MOST_ROWS))


def _hidden(like: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """``[rows, keys]`` of -inf where a key comes after the row, else 0."""
    later = (keys[None] > rows[:, None]).to(like.device)
    return like.new_zeros(later.shape).masked_fill_(later, -torch.inf)
