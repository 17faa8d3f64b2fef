"""A tiny target and tiny drafts as tables, and a chi-square test of many blocks at once.

Every prefix of a block has a row of logits, so a rule can be run on tens of thousands of blocks in
one call and its output compared, prefix by prefix, with what the target says there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash.backends.torch.rules import Rule, draw
from dflash.backends.torch.sampling import probabilities
from dflash.core.types import Sampling
from dflash.verify.chi_square import Fit, fit

from .tiny import tiny_target

VOCAB, DRAFTED, BLOCKS = 6, 2, 60_000
PROMPT = [3, 1, 4]
ENOUGH = 50  # draws after one prefix; fewer say nothing

PREFIXES = [prefix for n in range(DRAFTED + 1) for prefix in product(range(VOCAB), repeat=n)]
STARTS = torch.tensor([sum(VOCAB**i for i in range(n)) for n in range(DRAFTED + 1)])


@cache
def target_logits() -> Tensor:
    """``[prefixes, V]`` of a tiny Llama, one row after each prefix, by plain passes."""
    model: Any = tiny_target("llama", vocab=VOCAB, eos=None)
    rows = []
    with torch.inference_mode():
        for n in range(DRAFTED + 1):
            ids = torch.tensor([[*PROMPT, *p] for p in PREFIXES if len(p) == n])
            rows.append(model(input_ids=ids, use_cache=False).logits[:, -1])
    return torch.cat(rows)


def _noise(seed: int, rows: int) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def random_draft() -> Tensor:
    """Knows nothing."""
    return _noise(1, len(PREFIXES)) * 2


def near_draft() -> Tensor:
    """Right in the main."""
    return target_logits() + _noise(2, len(PREFIXES))


def oracle_draft() -> Tensor:
    """The target itself."""
    return target_logits()


def biased_draft() -> Tensor:
    """In love with one token."""
    logits = target_logits().clone()
    logits[:, 4] += 6
    return logits


def parallel_draft() -> Tensor:
    """What it says at a place does not depend on what it drew before."""
    return torch.stack([random_draft()[len(prefix)] for prefix in PREFIXES])


DRAFTS: dict[str, Callable[[], Tensor]] = {
    "random": random_draft,
    "near": near_draft,
    "oracle": oracle_draft,
    "biased": biased_draft,
    "parallel": parallel_draft,
}


def row_of(tokens: Tensor) -> Tensor:
    """``[B, n] -> [B]``: the table's row of a prefix."""
    index = torch.zeros(tokens.shape[0], dtype=torch.long)
    for place in range(tokens.shape[1]):
        index = index * VOCAB + tokens[:, place]
    return index + STARTS[tokens.shape[1]]


@dataclass
class Experiment:
    """Many blocks of one target and one draft under one way of sampling."""

    sampling: Sampling
    draft: Tensor  # [prefixes, V] logits
    blocks: int = BLOCKS
    seed: int = 0

    def __post_init__(self) -> None:
        self.p_table = probabilities(target_logits(), self.sampling).double()
        self.q_table = probabilities(self.draft, self.sampling).double()
        self._generator = torch.Generator().manual_seed(self.seed)

    def coins(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self._generator, dtype=torch.float64)

    def drafted(self, table: Tensor | None = None) -> Tensor:
        """``[B, n]`` drawn from the draft along its own path."""
        table, tokens = self.q_table if table is None else table, torch.zeros(self.blocks, 0).long()
        for _ in range(DRAFTED):
            drawn = draw(table[row_of(tokens)], self.coins(self.blocks))
            tokens = torch.cat([tokens, drawn[:, None]], dim=1)
        return tokens

    def along(self, table: Tensor, tokens: Tensor, count: int) -> Tensor:
        """``[B, count, V]``: the table's rows along the blocks."""
        return torch.stack([table[row_of(tokens[:, :n])] for n in range(count)], dim=1)

    def run(self, rule: Rule, one_hot: bool = False) -> tuple[Tensor, Tensor]:
        """``(tokens [B, n + 1], accepted [B])``; what a block leaves open is the target's."""
        table = _best(self.q_table) if one_hot else self.q_table
        drafted = self.drafted(table)
        q = None if one_hot else self.along(table, drafted, DRAFTED)
        p = self.along(self.p_table, drafted, DRAFTED + 1)
        coins, own = self.coins(self.blocks, DRAFTED), self.coins(self.blocks)
        found = rule(drafted, p, q, coins, own)
        return self.filled(found.tokens, found.accepted + 1), found.accepted

    def filled(self, tokens: Tensor, said: Tensor) -> Tensor:
        """Later rounds: tokens from place ``said`` on are drawn from the target."""
        for place in range(tokens.shape[1]):
            drawn = draw(self.p_table[row_of(tokens[:, :place])], self.coins(self.blocks))
            tokens[:, place] = torch.where(said <= place, drawn, tokens[:, place])
        return tokens

    def judged(self, tokens: Tensor) -> float:
        """Chi-square p of the first tokens, the smallest of all places times their number."""
        return min(
            1.0, tokens.shape[1] * min(self._place(tokens, n) for n in range(tokens.shape[1]))
        )

    def _place(self, tokens: Tensor, place: int) -> float:
        rows = row_of(tokens[:, :place])
        table = np.zeros((len(PREFIXES), VOCAB), dtype=np.int64)
        np.add.at(table, (rows.numpy(), tokens[:, place].numpy()), 1)
        fits = [
            fit({t: n for t, n in enumerate(counts.tolist()) if n}, self.p_table[row].numpy())
            for row, counts in enumerate(table)
            if counts.sum() >= ENOUGH
        ]
        return Fit(sum(f.statistic for f in fits), sum(f.freedom for f in fits)).p


def _best(table: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(table.argmax(dim=-1), VOCAB).double()
