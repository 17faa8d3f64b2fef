"""Rows of a draft's block, from which its tokens are chosen (`propose.py`).

Logits all at once from a parallel draft; one after the other from a draft whose next row depends on
the token before (`InTurn`); those of a few tokens alone from a reduced head (`Shortlist`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from dflash.backends.torch.best_first import Beam, Candidates, Ranking
from dflash.backends.torch.sampling import Ids, greedy, largest, to_host
from dflash.core.host import CONFIDENT
from dflash.core.types import MOST_NODES

Options: TypeAlias = Callable[[Tensor], Tensor]
"""``[n, V] -> [n, V]``: a request's options on the logits of its places."""


class InTurn(Protocol):
    """Rows of logits of a draft whose rows may depend on the tokens drafted before them."""

    @property
    def count(self) -> int:
        """Rows there are."""

    @property
    def choices(self) -> int:
        """Likeliest tokens among which confidence is measured."""

    @property
    def device(self) -> torch.device:
        """Where the rows are."""

    def row(self, offset: int, ids: Ids, options: Options | None) -> Tensor:
        """``[1, V]`` of row ``offset`` after ``ids [offset]``; asked for once, in order.

        ``options`` change the draft's logits before anything is made of them.
        """

    def path(self, options: Options | None) -> Tensor | None:
        """``[count]``: the tokens of the likeliest whole path, if the draft can tell.

        ``options`` take all rows at once.
        """

    @property
    def widest(self) -> int:
        """Nodes of one level of a tree that are looked at."""

    def after(self, level: int, beam: Beam | None, ranking: Ranking, most: int) -> Candidates:
        """Candidates for a tree: `best_first.Spreading`."""

    def to_host(self) -> InTurn:
        """The same in the host's memory; waits once."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """All rows known beforehand."""

    logits: Tensor  # [n, V]
    choices: int = CONFIDENT

    @property
    def count(self) -> int:
        """Rows there are."""
        return self.logits.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.logits.device

    def row(self, offset: int, ids: Ids, options: Options | None) -> Tensor:  # noqa: ARG002
        """``[1, V]``."""
        found = self.logits[offset : offset + 1]
        return found if options is None else options(found)

    def path(self, options: Options | None) -> Tensor | None:
        """Rows that know nothing of each other: the likeliest of each."""
        return greedy(self.logits if options is None else options(self.logits))

    @property
    def widest(self) -> int:
        """All there may be: a level costs no pass."""
        return MOST_NODES

    def after(self, level: int, beam: Beam | None, ranking: Ranking, most: int) -> Candidates:
        """The row's likeliest tokens, the same after every node."""
        row = ranking.prepared(self.logits[level : level + 1], level)
        logs, ids = ranking.logs(row, level).topk(min(most, row.shape[-1]))
        count = 1 if beam is None else beam.tokens.shape[0]
        return Candidates(ids.expand(count, -1), logs.expand(count, -1))

    def to_host(self) -> Parallel:
        """Waits once."""
        return Parallel(to_host(self.logits), self.choices)


class Shortlist(NamedTuple):
    """Logits of the tokens that a reduced head knows, before the others' -inf is put between."""

    logits: Tensor  # [n, Vd]
    ids: Tensor  # [Vd] their ids, which rise: the first of equal logits is the lowest id here, too
    size: int  # V

    def largest(self) -> Tensor:
        """``[n]``: the likeliest token of each row; any where a row is not finite."""
        return self.ids.index_select(0, largest(self.logits)[1])

    def whole(self) -> Tensor:
        """``[n, V]``."""
        full = self.logits.new_full((self.logits.shape[0], self.size), -torch.inf)
        return full.index_copy_(1, self.ids, self.logits)


Rows: TypeAlias = Tensor | InTurn | Shortlist


def in_turn(rows: Tensor | InTurn) -> InTurn:
    """``rows`` as they are asked for one by one."""
    return Parallel(rows) if isinstance(rows, Tensor) else rows


def whole(rows: Tensor | Shortlist) -> Tensor:
    """``[n, V]``."""
    return rows.whole() if isinstance(rows, Shortlist) else rows
