"""What a draft borrows from its target, and what its block says with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dflash.backends.torch.dflash import transform_logits
from dflash.backends.torch.rows import Shortlist, whole
from dflash.drafts.spec import DraftSpec


@dataclass(frozen=True, slots=True)
class Tables:
    """Embedding and head: the target's, unless the draft brought its own."""

    embed: Tensor  # [rows, Ht] raw rows
    head: Callable[[Tensor], Tensor]  # [n, H] -> [n, V or Vd]
    scale: float = 1.0  # on embedding rows
    target_ids: Tensor | None = None  # [Vd] target id of each row of a reduced head
    rising: bool = False  # whether those are known to be in order
    mask_row: Tensor | None = None  # [Ht] stands for the mask token's row
    fit: Callable[[Tensor], Tensor] | None = None  # on features of another target's width


class States(NamedTuple):
    """A block's rows without the anchor's, which says nothing."""

    hidden: Tensor  # [n, H]
    logits: Tensor | Shortlist  # [n, V]
    finite: Tensor | None  # [] bool: whether all of them are, the anchor's too; None = not asked


class Noise:
    """Embedded anchor and masks of a block; indexed by host integers, so without a wait."""

    def __init__(self, spec: DraftSpec, tables: Tables, like: Tensor) -> None:
        """In the dtype of ``like``; nothing is computed before the first block."""
        self._spec, self._tables, self._like = spec, tables, like
        self._masks: Tensor | None = None  # [block_size, H]

    def __call__(self, anchor: int, rows: int) -> Tensor:
        """``[rows, H]`` behind the token ``anchor``."""
        embed = self._tables.embed
        if self._masks is None:
            row = self._tables.mask_row
            row = embed[self._spec.mask_token_id] if row is None else row
            self._masks = self._scaled(row.to(embed).expand(self._spec.block_size, -1))
        return torch.cat((self._scaled(embed[anchor : anchor + 1]), self._masks[: rows - 1]))

    def _scaled(self, rows: Tensor) -> Tensor:
        scale = self._tables.scale
        return (rows if scale == 1.0 else rows * scale).to(self._like)


def draft_logits(spec: DraftSpec, tables: Tables, hidden: Tensor) -> Tensor:
    """[n, H] to [n, V]; -inf outside a reduced vocabulary."""
    return whole(short_logits(spec, tables, hidden))


def short_logits(spec: DraftSpec, tables: Tables, hidden: Tensor) -> Tensor | Shortlist:
    """The same, of a reduced vocabulary alone where nothing is lost by it."""
    logits, ids = transform_logits(tables.head(hidden), spec), tables.target_ids
    if ids is None:
        return logits
    found = Shortlist(logits, ids, max(spec.vocab_size, tables.embed.shape[0]))  # padded rows too
    return found if tables.rising else found.whole()
