"""How far the target goes along with a draft, over some texts.

Counts first. Survival at place i is unconditional: rounds that kept i drafts or more. The chance
given that the one before was kept stands beside it, and both ratios that are mixed up in reports:
accepted of drafted, and tokens committed per pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from typing import Any

from dflash.core.stats import Stats
from dflash.engine import Engine


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Rounds of several texts, added up."""

    texts: int
    rounds: int
    drafted: int
    accepted: int
    committed: int
    histogram: tuple[int, ...]  # [a]: rounds that kept a drafts
    survival: tuple[float, ...]  # [i]: kept at draft i+1 / rounds that judged it

    @property
    def mean_committed(self) -> float:
        """Tokens per verify pass; 1.0 is plain decoding."""
        return self.committed / self.rounds if self.rounds else 1.0

    @property
    def rate(self) -> float:
        """Accepted of drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def conditional(self) -> tuple[float, ...]:
        """[i]: chance of draft i+1 once the one before was kept."""
        before = (1.0, *self.survival)
        return tuple(s / b if b else 0.0 for s, b in zip(self.survival, before, strict=False))

    def clearly_above(self, other: Acceptance, margin: float = 1.1) -> bool:
        """Better by more than chance (three standard errors) and by enough to matter."""
        if self.mean_committed < margin * other.mean_committed or not self.rounds:
            return False
        spread = sqrt(self._variance() / self.rounds + other._variance() / max(1, other.rounds))
        return self._kept() - other._kept() > 3 * spread

    def to_json(self) -> dict[str, Any]:
        """Plain values, the ratios included."""
        ratios = ("mean_committed", "rate", "conditional")
        return {**asdict(self), **{name: getattr(self, name) for name in ratios}}

    def _kept(self) -> float:
        return sum(i * n for i, n in enumerate(self.histogram)) / max(1, self.rounds)

    def _variance(self) -> float:
        mean = self._kept()
        return sum(n * (i - mean) ** 2 for i, n in enumerate(self.histogram)) / max(1, self.rounds)


def measure(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> Acceptance:
    """Greedy texts of ``tokens`` at the draft's native block size.

    Raises WeightsError when target or draft computes what is not finite.
    """
    block = engine.pair.draft_block_size
    texts = [
        engine.generate(list(ids), max_tokens=tokens, block_size=block, reuse=False).stats
        for ids in prompts
    ]
    return added_up(texts)


def added_up(texts: Sequence[Stats]) -> Acceptance:
    """The sums of several texts; places are weighted by rounds."""
    depth = max((len(t.histogram) for t in texts), default=1)
    places = max((len(t.acceptance_by_position) for t in texts), default=0)
    rounds = sum(t.rounds for t in texts)
    return Acceptance(
        texts=len(texts),
        rounds=rounds,
        drafted=sum(t.drafted for t in texts),
        accepted=sum(t.accepted for t in texts),
        committed=sum(round(t.mean_committed * t.rounds) for t in texts),
        histogram=tuple(sum(_at(t.histogram, a) for t in texts) for a in range(depth)),
        survival=tuple(
            sum(t.rounds * _at(t.acceptance_by_position, i) for t in texts) / max(1, rounds)
            for i in range(places)
        ),
    )


def _at(values: Sequence[float], place: int) -> Any:
    return values[place] if place < len(values) else 0
