"""How much faster one arm is than another on the same texts, and how sure that is.

The texts are fixed; what is uncertain is the machine. So the interval resamples the repeats of each
text, both arms of a repeat together, because they ran right after each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

from dflash.bench import record


class Timed(Protocol):
    """One continuation: an arm's run, or its record."""

    @property
    def ids(self) -> tuple[int, ...]:
        """Tokens of the answer."""

    @property
    def tokens(self) -> int:
        """How many, also where their ids are not known."""

    @property
    def first(self) -> int:
        """How many of them came with the prefill."""

    @property
    def decode(self) -> float:
        """Seconds from there to the end."""


Runs = Mapping[str, Sequence[Any]]  # arm -> repeats of one prompt, each a Timed

NARROW = 0.03  # half the width of an interval that decides, as a share of the ratio


@dataclass(frozen=True, slots=True)
class Ratio:
    """Time of the base / time of the arm: above 1 the arm is faster."""

    value: float
    low: float  # 95 % bootstrap interval
    high: float
    texts: int  # on which both wrote the same; the others are left out

    @property
    def spread(self) -> float:
        """Half the interval, as a share of the ratio."""
        return (self.high - self.low) / (2 * self.value) if self.value else 0.0

    def verdict(self, bound: float) -> str:
        """Whether ``bound`` is reached: yes, no, or unsure (run again, on a quieter machine)."""
        if not self.texts:
            return "no texts"
        if self.high < bound:
            return "no"
        narrow = self.high - self.low <= 2 * NARROW * self.value
        return "yes" if narrow or self.low >= bound else "unsure"

    def __str__(self) -> str:
        """Value and interval."""
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})" if self.texts else "-"


def alike(texts: Sequence[Runs], names: Sequence[str]) -> list[Runs]:
    """Texts that all these arms wrote alike in all repeats, beyond what the prefill gives."""
    found = []
    for text in texts:
        runs = [run for name in names for run in text[name]]
        if len({run.ids for run in runs}) == 1 and len(runs[0].ids) > runs[0].first:
            found.append(text)
    return found


def seconds(texts: Sequence[Runs]) -> list[dict[str, list[float]]]:
    """Every decode time, for the file."""
    return [
        {arm: [round(run.decode, 5) for run in runs] for arm, runs in text.items()}
        for text in texts
    ]


def ratio(texts: Sequence[Runs], arm: str, base: str) -> Ratio:
    """Sum over texts of the base's median decode times / the same of the arm."""
    return compared(alike(texts, (arm, base)), arm, base)


def compared(texts: Sequence[Runs], arm: str, base: str, *, per_token: bool = False) -> Ratio:
    """The ratio over ``texts`` as they are; ``per_token`` where their lengths may differ."""
    if not texts:
        return Ratio(0.0, 0.0, 0.0, 0)
    repeats = min(len(text[name]) for text in texts for name in (arm, base))
    made = {name: _tokens(texts, name) if per_token else 1 for name in (arm, base)}

    def over(pick: Sequence[int]) -> float:
        """``pick`` names a repeat for each place of each text, modulo their number."""
        sums = {arm: 0.0, base: 0.0}
        for place, text in enumerate(texts):
            chosen = [i % repeats for i in pick[place * repeats : (place + 1) * repeats]]
            for name in sums:
                sums[name] += median(text[name][i].decode for i in chosen)
        ours = sums[arm] * made[base]
        return sums[base] * made[arm] / ours if ours else 0.0

    count = len(texts) * repeats
    return Ratio(over(range(count)), *record.bootstrap(count, over), len(texts))


def _tokens(texts: Sequence[Runs], name: str) -> float:
    """Tokens after the prefill, summed over texts, the mean of each one's repeats."""
    found = (sum(run.tokens - run.first for run in t[name]) / len(t[name]) for t in texts)
    return float(sum(found))
