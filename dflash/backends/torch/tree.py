"""A tree of drafts as one pass of the target sees it.

Row 0 is the anchor, row i + 1 node i. A row stands at the position of the anchor plus its depth,
and sees the cached tokens, the anchor, the nodes above it and itself, never another branch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.backends.torch.sampling import Ids
from dflash.backends.torch.upload import upload


@dataclass(frozen=True, slots=True)
class Branches:
    """Who stands where and sees whom; made without a wait."""

    depths: Tensor  # [n + 1], 0 for the anchor
    seen: Tensor  # [n + 1, n + 1] bool
    most: int  # no row is deeper
    parents: Ids  # [n], -1 for the anchor


def make_branches(parents: Ids, depth: int, device: torch.device) -> Branches:
    """The tree whose node i hangs on node ``parents[i]``, -1 for the anchor; ``depth`` levels."""
    above = upload(parents, device).long() + 1
    up = torch.cat([above.new_zeros(1), above])  # the anchor hangs on itself
    rows = torch.arange(up.shape[0], device=device)
    seen, at = torch.eye(up.shape[0], dtype=torch.bool, device=device), rows
    for _ in range(depth):
        at = up[at]
        seen[rows, at] = True
    return Branches(seen.sum(dim=-1) - 1, seen, depth, parents)


def tree_bias(tree: Branches, start: int, like: Tensor) -> Tensor:
    """What is added to scores of the rows behind ``start`` cached ones: [n, start + n]."""
    rows = tree.seen.shape[0]
    bias = like.new_zeros(rows, start + rows)
    bias[:, start:].masked_fill_(tree.seen.logical_not(), -torch.inf)
    return bias
