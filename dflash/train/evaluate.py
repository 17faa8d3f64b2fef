"""How good a draft is: by walking held-out text, and by really generating.

The walk is cheap and runs on text the target wrote; real generation goes through the engine that
users run. Both count committed tokens per verify pass, the prefill token left out. Where they
differ much, trainer and server disagree about the model: that is a bug, not a detail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash.backends.torch.dflash import DFlashDraftModel
from dflash.backends.torch.dflash2 import CandidateSelector, DFlash2DraftModel, best_path
from dflash.train import blocks
from dflash.train.batches import Materials
from dflash.train.data import Conversation
from dflash.train.trainer import draft_states

WALKED = 128  # answer tokens of each text


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


class Head(NamedTuple):
    """What a draft chooses among."""

    weight: Tensor  # [n, H] rows of the target's head
    ids: Tensor | None = None  # [n] their tokens; None: the head is whole


@torch.no_grad()
def walk(
    model: DFlashDraftModel,
    materials: Materials,
    sequences: Sequence[tuple[int, Conversation]],  # with their place in the feature store
    head: Head,
    *,
    path: Literal["walk", "best", "rows"] = "walk",
    autocast: bool = False,
) -> Score:
    """Greedy acceptance on given text, exact: each round starts where the last one ended."""
    size, embedding = model.spec.block_size, materials.embedding
    committed = rounds = seen = 0
    right = torch.zeros(size - 1)
    for index, sequence in sequences:
        places = [p for p in range(1, len(sequence.ids) - 1) if sequence.answer[p + 1]][:WALKED]
        if not places:
            continue
        block = blocks.build([sequence.ids], [sequence.answer], [places], size, materials.mask_id)
        with torch.autocast(embedding.device.type, torch.bfloat16, enabled=autocast):
            noise = embedding[block.inputs.to(embedding.device)]
            tapped = materials.features[index][0].float()[None].to(embedding.device)
            states = draft_states(model, tapped, block, noise)[0, :, 1:]
            logits = F.linear(states, head.weight)
            if isinstance(model, DFlash2DraftModel) and path != "rows":
                anchors = block.inputs.reshape(-1, size)[:, 0].to(embedding.device)
                found = Lattice(model.candidate_selector, states, logits, anchors, head.ids)
                proposed = (found.walk() if path == "walk" else found.best()).cpu()
            else:
                best = logits.argmax(-1)
                proposed = (best if head.ids is None else head.ids[best]).cpu()
        hits = (proposed == block.labels[0]) & block.valid[0]
        right += hits.float().sum(0)
        seen += len(places)
        runs = hits.cumprod(-1).sum(-1).tolist()
        at = 0
        while at < len(places):
            step = min(runs[at] + 1, len(places) - at)
            committed, rounds, at = committed + step, rounds + 1, at + step
    return Score(committed / max(rounds, 1), rounds, committed, (right / max(seen, 1)).tolist())


class Lattice:
    """Candidates of many blocks of a DFlash2 draft, and two ways through them."""

    def __init__(
        self,
        selector: CandidateSelector,
        states: Tensor,  # [P, K, H]
        logits: Tensor,  # [P, K, n]
        anchors: Tensor,  # [P]
        ids: Tensor | None,  # [n]
    ) -> None:
        self._selector, self._states, self._anchors = selector, states, anchors
        places, unary = selector.candidates(logits)
        self._unary = unary.float()
        self._tokens = places if ids is None else ids[places]  # [P, K, k]

    def walk(self) -> Tensor:
        """[P, K]: the best score, row after row."""
        chosen = [self._anchors]
        for row in range(self._rows):
            scores = self._scores(row, chosen[-1][:, None])[:, 0]
            best = scores.argmax(-1, keepdim=True)
            chosen.append(self._tokens[:, row].gather(-1, best)[:, 0])
        return torch.stack(chosen[1:], dim=1)

    def best(self) -> Tensor:
        """[P, K]: the likeliest path of each block."""
        first = self._scores(0, self._anchors[:, None])[:, 0]
        later = [self._scores(row, self._tokens[:, row - 1]) for row in range(1, self._rows)]
        edges = torch.stack(later, dim=1)  # [P, K - 1, k, k]
        places = torch.stack([best_path(*block) for block in zip(first, edges, strict=True)])
        return self._tokens.gather(-1, places[..., None])[..., 0]

    @property
    def _rows(self) -> int:
        return self._tokens.shape[1]

    def _scores(self, row: int, before: Tensor) -> Tensor:
        """[P, a, k] of a row's candidates after each of ``before`` [P, a]."""
        gained = self._selector.transitions(self._states[:, row], before, self._tokens[:, row])
        return self._unary[:, row, None] + gained


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
