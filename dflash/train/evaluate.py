"""How good a draft is: by walking held-out text, and by really generating.

The walk is cheap and runs on text the target wrote; real generation goes through the engine that
users run. Both count committed tokens per verify pass, the prefill token left out. Where they
differ much, trainer and server disagree about the model: that is a bug, not a detail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash.backends.torch.dflash import DFlashDraftModel
from dflash.train import blocks
from dflash.train.data import Conversation
from dflash.train.trainer import Materials, draft_states


@dataclass(frozen=True, slots=True)
class Score:
    """Committed tokens per verify pass, and how it was found."""

    mean_committed: float
    rounds: int
    committed: int
    by_position: list[float]  # each row against the true token, whatever the rows before did

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@torch.no_grad()
def walk(
    model: DFlashDraftModel,
    materials: Materials,
    sequences: Sequence[tuple[int, Conversation]],  # with their place in the feature store
    head: Tensor,  # [V, H] all rows: the served draft chooses among all tokens
    *,
    limit: int = 128,
    autocast: bool = False,
) -> Score:
    """Greedy acceptance on given text, exact: each round starts where the last one ended."""
    size, embedding = model.spec.block_size, materials.embedding
    committed = rounds = seen = 0
    right = torch.zeros(size - 1)
    for index, sequence in sequences:
        places = [p for p in range(1, len(sequence.ids) - 1) if sequence.answer[p + 1]][:limit]
        if not places:
            continue
        block = blocks.build([sequence.ids], [sequence.answer], [places], size, materials.mask_id)
        with torch.autocast(embedding.device.type, torch.bfloat16, enabled=autocast):
            noise = embedding[block.inputs.to(embedding.device)]
            tapped = materials.features[index][0].float()[None].to(embedding.device)
            states = draft_states(model, tapped, block, noise)[0, :, 1:]
            proposed = F.linear(states, head).argmax(-1).cpu()
        hits = (proposed == block.labels[0]) & block.valid[0]
        right += hits.float().sum(0)
        seen += len(places)
        runs = hits.cumprod(-1).sum(-1).tolist()
        at = 0
        while at < len(places):
            step = min(runs[at] + 1, len(places) - at)
            committed, rounds, at = committed + step, rounds + 1, at + step
    return Score(committed / max(rounds, 1), rounds, committed, (right / max(seen, 1)).tolist())


def generate(
    target: str, draft: Path, prompts: Sequence[str], *, max_tokens: int = 96, **options: Any
) -> Score:
    """Greedy generation of ``prompts`` through the engine at the draft's native block size."""
    import dflash

    committed = rounds = 0
    positions: list[list[float]] = []
    with dflash.load(target, draft=str(draft), **options) as engine:
        for prompt in prompts:
            stats = engine.generate(
                prompt, max_tokens=max_tokens, block_size=engine.pair.draft_block_size
            ).stats
            rounds += stats.rounds
            committed += round(stats.mean_committed * stats.rounds)
            positions.append(list(stats.acceptance_by_position))
    width = max((len(row) for row in positions), default=0)
    columns = [[row[at] for row in positions if len(row) > at] for at in range(width)]
    return Score(
        committed / max(rounds, 1),
        rounds,
        committed,
        [sum(column) / max(len(column), 1) for column in columns],
    )
