"""The tree that a draft's probabilities make most of: best first, under a budget of nodes.

A node's worth is the probability that the draft gives the path to it, so the best nodes are always
a tree: no child is worth more than its parent. They are found level by level without a wait: of
each level only so many can be among the best as there are nodes in all. For a draft whose rows know
nothing of each other this is the tree of block diffusion (DDTree, arXiv 2604.12989); for one that
runs again for each level it is EAGLE-2's (arXiv 2406.16858), narrowed to a width it can afford.

Above temperature 0 the draft adds the noise that the target will add, so what it ranks is how
likely each token is to be the target's sample. That is allowed to it: the target never looks at
what was drafted (docs/adr/0008).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from dflash.backends.torch.sampling import log_probs, noise_rows
from dflash.backends.torch.upload import send
from dflash.core.types import Sampling

STEP = 0.01  # nats a level: a child is worth less than its parent, whatever rounding says
LEAST = -1e3  # nats; stands for "never"
Changed: TypeAlias = Callable[[Tensor, int], Tensor]
"""``(row [1, V], place in the block) -> [1, V]``: a request's options."""


class Beam(NamedTuple):
    """The nodes of one level, as far as they may be among the best."""

    tokens: Tensor  # [b]
    above: Tensor  # [b] whose child each is, in the beam before


class Candidates(NamedTuple):
    """What may follow each node of a beam."""

    ids: Tensor  # [b, k]
    logs: Tensor  # [b, k] log-probabilities


class Spreading(Protocol):
    """Rows of a draft that can be asked for several tokens each."""

    @property
    def widest(self) -> int:
        """Nodes of a level that are looked at."""

    def after(self, level: int, beam: Beam | None, ranking: Ranking, most: int) -> Candidates:
        """Up to ``most`` candidates of row ``level`` after each node of ``beam``, which is the
        level before; None is the anchor."""


class Grown(NamedTuple):
    """A tree; nodes come after their parents."""

    tokens: Tensor  # [n]
    parents: Tensor  # [n], -1 for the anchor


class Ranking:
    """How likely tokens are to be the target's choice at the places of one block, by a draft."""

    def __init__(self, sampling: Sampling, position: int, options: Changed | None = None) -> None:
        """``position`` of the block in the output; ``options`` are the request's, if there are."""
        self._sampling, self._position, self._options = sampling, position, options
        self._noisy = sampling.temperature > 0 and not sampling.greedy_drafts

    def prepared(self, logits: Tensor, level: int) -> Tensor:
        """Rows ``[n, V]`` of one level, options applied."""
        if self._options is None:
            return logits
        rows = [self._options(logits[i : i + 1], level) for i in range(logits.shape[0])]
        return torch.cat(rows)

    def logs(self, scores: Tensor, level: int, ids: Tensor | None = None, vocab: int = 0) -> Tensor:
        """Log-probabilities ``[b, m]`` of candidates with those logits at one place of the block.

        They are the tokens ``ids [m]`` of ``vocab``; None = all there are. At temperature T the
        scores are log q + noise, and a difference of two logits counts as much as at temperature 0,
        since that is what a draft is wrong by.
        """
        scores = scores.float()
        if self._noisy:
            size = scores.shape[-1] if ids is None else vocab
            noise = noise_rows(self._sampling, self._position + level, 1, size)
            noise = send(noise, scores.device).to(scores)
            noise = noise if ids is None else noise[:, ids]
            scores = (log_probs(scores, self._sampling) + noise) * self._sampling.temperature
        return scores.log_softmax(dim=-1).nan_to_num(nan=LEAST, neginf=LEAST)


def grow(rows: Spreading, ranking: Ranking, nodes: int, depth: int) -> Grown:
    """The best ``nodes`` of a tree of at most ``depth`` levels; fewer where there are no more."""
    beam: Beam | None = None
    worth: Tensor | None = None
    ids, worths, above = list[Tensor](), list[Tensor](), list[Tensor]()
    first = 0  # where the level before begins
    for level in range(depth):
        found = rows.after(level, beam, ranking, nodes)
        gained = found.logs.clamp(min=LEAST) - STEP
        total = (gained if worth is None else worth.to(gained)[:, None] + gained).flatten()
        worth, best = total.topk(min(nodes, rows.widest, total.shape[0]))
        parent = best // found.ids.shape[1]
        ids.append(found.ids.flatten()[best])
        worths.append(worth)
        above.append(parent - 1 if beam is None else parent + first)
        first = 0 if beam is None else first + beam.tokens.shape[0]
        beam = Beam(ids[-1], parent)
    return _best(torch.cat(ids), torch.cat(worths), torch.cat(above), nodes)


def _best(ids: Tensor, worth: Tensor, above: Tensor, nodes: int) -> Grown:
    """The best nodes, numbered anew; in the order of levels parents come before their children."""
    chosen = worth.topk(min(nodes, worth.shape[0])).indices.sort().values
    place = torch.full_like(above, -1)
    place[chosen] = torch.arange(chosen.shape[0], device=chosen.device)
    parents = above[chosen]
    return Grown(ids[chosen], torch.where(parents < 0, parents, place[parents.clamp(min=0)]))
