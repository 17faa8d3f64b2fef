"""Do samples of speculative decoding follow the target's exact distribution?

Many short samples of one prompt; at each output position the tokens drawn after the same prefix
are compared, by chi-square, with what the target says of that prefix in a pass of one row. The
first position is the prefill's, the later ones go through the draft and the acceptance rule.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash.engine import Engine
from dflash.verify.chi_square import Fit, fit

ENOUGH = 50  # draws after one prefix; fewer say nothing
DEPTH = 3  # output positions that are judged
LEAST_P = 1e-3

Draw = Callable[[int], Sequence[int]]
"""Number of the sample -> its first tokens."""
Exact = Callable[[tuple[int, ...]], NDArray[np.float64]]
"""Output so far -> probabilities [V] of the next token."""


@dataclass(frozen=True, slots=True)
class Position:
    """One place of the output, over all prefixes that were drawn often enough."""

    prefixes: int
    draws: int
    statistic: float
    freedom: int
    p: float


@dataclass(frozen=True, slots=True)
class Audit:
    """One way of sampling, judged."""

    name: str
    samples: int
    positions: tuple[Position, ...]

    @property
    def p(self) -> float:
        """The smallest p of the positions, times how many there are (Bonferroni)."""
        return min(1.0, len(self.positions) * min(position.p for position in self.positions))

    @property
    def freedom(self) -> int:
        """Degrees of freedom of all positions; 0: there was no choice, and nothing was tested."""
        return sum(position.freedom for position in self.positions)

    @property
    def passed(self) -> bool:
        """Whether the samples may have come from the target."""
        return self.p > LEAST_P

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "p": self.p, "freedom": self.freedom, "passed": self.passed}


def audit(name: str, draw: Draw, exact: Exact, samples: int, depth: int = DEPTH) -> Audit:
    """Draw ``samples`` times and judge the first ``depth`` positions."""
    seen: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for number in range(samples):
        tokens = tuple(draw(number))[:depth]
        for place, token in enumerate(tokens):
            seen[tokens[:place]][token] += 1
    positions = (_position(place, seen, exact) for place in range(depth))
    return Audit(name, samples, tuple(positions))


def _position(place: int, seen: Mapping[tuple[int, ...], Counter[int]], exact: Exact) -> Position:
    often = {
        prefix: counts
        for prefix, counts in seen.items()
        if len(prefix) == place and counts.total() >= ENOUGH
    }
    fits = [fit(counts, exact(prefix)) for prefix, counts in often.items()]
    total = Fit(sum(f.statistic for f in fits), sum(f.freedom for f in fits))
    draws = sum(counts.total() for counts in often.values())
    return Position(len(often), draws, total.statistic, total.freedom, total.p)


def drawn_by(engine: Engine, prompt: Sequence[int], settings: Mapping[str, Any]) -> Draw:
    """Samples of ``engine`` after ``prompt``; a seed in ``settings`` counts up by one a sample.

    A whole block is always asked for and the reader leaves early, so that the draft is not cut to
    the few tokens that are looked at.
    """
    seed = settings.get("seed")
    room = DEPTH + (engine.pair.draft_block_size or 1)
    asked = {**settings, "max_tokens": room, "ignore_eos": True}

    def draw(number: int) -> list[int]:
        own = asked if seed is None else {**asked, "seed": seed + number}
        tokens: list[int] = []
        stream = engine.stream(list(prompt), **own)
        for chunk in stream:
            tokens += chunk.token_ids
            if len(tokens) >= DEPTH:
                break
        stream.close()  # type: ignore[attr-defined]  # a generator: parks its sessions now
        return tokens

    return draw
