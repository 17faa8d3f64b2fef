"""What a step reads: the run's materials, and of them the blocks of one batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.train import blocks, losses
from dflash.train.config import TrainConfig
from dflash.train.data import Conversation
from dflash.train.features import FeatureStore


@dataclass(slots=True)
class Materials:
    """What a step reads: all of it fixed during a run."""

    sequences: list[Conversation]
    features: FeatureStore
    embedding: Tensor  # [V, H] the target's rows
    head: Tensor  # [kept, H] the target's head rows that the loss uses
    tokens: losses.FrequentTokens
    mask_id: int


def prepare(
    materials: Materials, indices: list[int], config: TrainConfig, step: int
) -> tuple[blocks.Blocks, Tensor, Tensor] | None:
    """Blocks, features [b, T, M*Ht], final states [b, T, Ht] of a batch; None without anchors."""
    generator = torch.Generator().manual_seed(config.schedule.seed * 1_000_003 + step)
    size, count = block_of_step(config, step)
    drawn = []
    for index in indices:
        sequence = materials.sequences[index]
        anchors = blocks.draw_anchors(sequence.answer, count, generator)
        if anchors:
            drawn.append((index, sequence, anchors))
    if not drawn:
        return None
    block = blocks.build(
        [sequence.ids for _, sequence, _ in drawn],
        [sequence.answer for _, sequence, _ in drawn],
        [anchors for _, _, anchors in drawn],
        size,
        materials.mask_id,
    )
    loaded = [materials.features[index] for index, _, _ in drawn]
    pad = torch.nn.utils.rnn.pad_sequence
    return (
        block,
        pad([features for features, _ in loaded], batch_first=True).float(),
        pad([final for _, final in loaded], batch_first=True).float(),
    )


def block_of_step(config: TrainConfig, step: int) -> tuple[int, int]:
    """Block size and anchors a sequence in this step; shorter blocks get more anchors.

    A draft is served at several block sizes (the policy shortens blocks where rows are dear), and
    mask rows see each other: a draft that only ever saw full blocks is off in short ones.
    """
    native = config.shape.block_size
    sizes = config.schedule.block_sizes or (native,)
    size = sizes[step % len(sizes)]
    return size, max(1, config.schedule.anchors * native // size)


def predicting_states(final: Tensor, block: blocks.Blocks) -> Tensor:  # [b*N, B-1, Ht]
    """The target's state that predicts each label: the one at the position before it."""
    slots = torch.arange(block.labels.shape[-1], device=final.device)
    at = (block.anchors.to(final.device)[..., None] + slots).clamp(max=final.shape[1] - 1)
    rows = at.flatten(1)[..., None].expand(-1, -1, final.shape[-1])
    return final.gather(1, rows).reshape(-1, at.shape[-1], final.shape[-1])
