"""How far the target goes along with a draft, over some texts.

Counts first. Both ratios that are mixed up in reports stand side by side, accepted of drafted and
tokens committed per pass; and by place, the share of rounds that got so far and the chance once the
one before was kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from math import sqrt
from operator import mul
from typing import Any

from dflash.core.protocols import Pair
from dflash.core.types import Step
from dflash.doctor.measured.rounds import rounds


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Rounds of several texts, added up."""

    rounds: int
    drafted: int
    accepted: int
    committed: int
    histogram: tuple[int, ...]  # [a]: rounds that kept a drafts
    conditional: tuple[float, ...]  # [i]: chance of draft i+1 once the one before was kept
    by_text: tuple[float, ...] = ()  # mean committed of each text

    @property
    def mean_committed(self) -> float:
        """Tokens per verify pass; 1.0 is plain decoding."""
        return self.committed / self.rounds if self.rounds else 1.0

    @property
    def macro_committed(self) -> float:
        """Mean over texts of each text's mean committed: a long text counts as much as a short."""
        return sum(self.by_text) / len(self.by_text) if self.by_text else self.mean_committed

    @property
    def rate(self) -> float:
        """Accepted of drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def survival(self) -> tuple[float, ...]:
        """[i]: chance that draft i+1 is kept, whatever the ones before do."""
        return tuple(accumulate(self.conditional, mul))

    def clearly_above(self, other: Acceptance, margin: float = 1.1) -> bool:
        """Better by more than chance (three standard errors) and by enough to matter."""
        if self.mean_committed < margin * other.mean_committed or not self.rounds:
            return False
        spread = sqrt(self._variance() / self.rounds + other._variance() / max(1, other.rounds))
        return self._kept() - other._kept() > 3 * spread

    def to_json(self) -> dict[str, Any]:
        """Plain values, the ratios included."""
        ratios = ("mean_committed", "macro_committed", "rate", "survival")
        return {**asdict(self), **{name: getattr(self, name) for name in ratios}}

    def _kept(self) -> float:
        return sum(i * n for i, n in enumerate(self.histogram)) / max(1, self.rounds)

    def _variance(self) -> float:
        mean = self._kept()
        return sum(n * (i - mean) ** 2 for i, n in enumerate(self.histogram)) / max(1, self.rounds)


def measure(pair: Pair, prompts: Iterable[Sequence[int]], tokens: int) -> Acceptance:
    """What `over` says of the texts that `texts_of` writes."""
    return over(list(texts_of(pair, prompts, tokens)))


def texts_of(pair: Pair, prompts: Iterable[Sequence[int]], tokens: int) -> Iterator[list[Step]]:
    """Rounds of greedy texts of ``tokens`` at the draft's native block size.

    Raises PromptError, and WeightsError when target or draft computes what is not finite.
    """
    for ids in prompts:
        yield list(rounds(pair, ids, tokens, pair.draft_block_size or 1))


def cut(text: Sequence[Step], tokens: int) -> list[Step]:
    """The rounds of ``text`` that a shorter one has: a greedy text begins alike."""
    there = accumulate((len(step.tokens) for step in text), initial=1)  # the prefill's token
    return [step for step, before in zip(text, there, strict=False) if before < tokens]


def over(texts: Sequence[Sequence[Step]]) -> Acceptance:
    """The counts of several texts."""
    whole = added_up([step for text in texts for step in text])
    return replace(whole, by_text=tuple(added_up(text).mean_committed for text in texts if text))


def added_up(steps: Sequence[Step]) -> Acceptance:
    """The counts of ``steps``; a round judges a place if it drafted so far."""
    kept = [step.accepted for step in steps]
    deep = [step.verdict.drafted for step in steps]
    depth = max(deep, default=0)
    tried = [sum(k >= i < d for k, d in zip(kept, deep, strict=True)) for i in range(depth)]
    return Acceptance(
        rounds=len(steps),
        drafted=sum(deep),
        accepted=sum(kept),
        committed=sum(len(step.tokens) for step in steps),
        histogram=tuple(kept.count(a) for a in range(depth + 1)),
        conditional=tuple(
            sum(k > i for k in kept) / tried[i] if tried[i] else 0.0 for i in range(depth)
        ),
    )
