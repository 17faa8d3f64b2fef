"""Anchored blocks: how one sequence becomes many training examples under one mask.

DFlash paper, section 4.2 and figure 4: anchors are drawn anew each time a sequence is seen; the
block behind an anchor sees the context strictly before the anchor and its own rows, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Blocks:
    """N blocks of B rows in each of b sequences (padded blocks have no valid row)."""

    inputs: Tensor  # [b, N*B] anchor, mask, mask, ...
    labels: Tensor  # [b, N, B-1] the token at anchor + j
    valid: Tensor  # [b, N, B-1] the label exists and is an answer token
    positions: Tensor  # [b, 1, N*B]
    anchors: Tensor  # [b, N]

    @property
    def size(self) -> int:
        """B, rows of one block."""
        return self.labels.shape[-1] + 1


def draw_anchors(answer: Sequence[bool], count: int, generator: torch.Generator) -> list[int]:
    """Up to ``count`` distinct positions whose next token is an answer token, ascending."""
    possible = [place for place in range(1, len(answer) - 1) if answer[place + 1]]
    order = torch.randperm(len(possible), generator=generator)[:count].tolist()
    return sorted(possible[index] for index in order)


def build(
    ids: Sequence[Sequence[int]],
    answers: Sequence[Sequence[bool]],
    anchors: Sequence[Sequence[int]],
    block_size: int,
    mask_id: int,
) -> Blocks:
    """Blocks of a batch; sequences with fewer anchors are padded with dead blocks."""
    number = max(len(row) for row in anchors)
    shape = (len(ids), number, block_size)
    inputs = torch.full(shape, mask_id)
    labels = torch.zeros(shape, dtype=torch.long)
    valid = torch.zeros(shape, dtype=torch.bool)
    starts = torch.zeros(len(ids), number, dtype=torch.long)
    for batch, (tokens, answer, places) in enumerate(zip(ids, answers, anchors, strict=True)):
        at = torch.tensor(places)
        rows = at[:, None] + torch.arange(block_size)
        inside = rows < len(tokens)
        rows = rows.clamp(max=len(tokens) - 1)
        inputs[batch, : len(places), 0] = torch.tensor(tokens)[at]
        labels[batch, : len(places)] = torch.tensor(tokens)[rows]
        valid[batch, : len(places)] = torch.tensor(answer)[rows] & inside
        starts[batch, : len(places)] = at
    positions = (starts[..., None] + torch.arange(block_size)).flatten(1)[:, None]
    # a label behind a non-answer token is no continuation the draft could be asked for
    valid = valid[..., 1:].cumprod(-1).bool()
    return Blocks(inputs.flatten(1), labels[..., 1:], valid, positions, starts)


def attention_mask(
    anchors: Tensor,  # [b, N]
    context: int,  # T context rows, the longest of the batch
    block_size: int,
    *,
    causal: bool = False,
    window: int | None = None,
) -> Tensor:  # [b, 1, N*B, T + N*B] True = visible
    """Context strictly before the anchor, plus the block's own rows (lower-triangular if causal).

    ``window`` counts keys including the query's own slot, measured from the query's position.
    A row always sees itself, so a dead block never makes NaN.
    """
    number = anchors.shape[1]
    slot = torch.arange(block_size, device=anchors.device)
    query = (anchors[..., None] + slot).flatten(1)[..., None]  # [b, N*B, 1]
    key = torch.arange(context, device=anchors.device)
    start = anchors.repeat_interleave(block_size, dim=1)[..., None]
    seen = key < start
    own = torch.ones(block_size, block_size, dtype=torch.bool, device=anchors.device)
    if causal:
        own = own.tril()
    if window is not None:
        seen = seen & (query - key < window)
        own = own & ((slot[:, None] - slot).abs() < window)
    blocks = torch.kron(torch.eye(number, device=own.device), own.float()).bool()
    return torch.cat((seen, blocks.expand(len(anchors), -1, -1)), dim=-1)[:, None]
