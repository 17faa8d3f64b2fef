"""When a speed may not be shown: degenerate text, too little of it, a machine too busy to trust."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import groupby
from statistics import median

GRAM, OFTEN = 4, 8  # a text that holds one 4-gram eight times runs in circles
IN_A_ROW = 20  # the same token more often than that, one after the other
LEAST_TOKENS = 16  # of one text after the prefill
LEAST_SECONDS = 0.02  # of one text's decoding: below, the clock and the streaming are measured
UNSURE = 0.15  # half the 95 % interval of a speed-up, as a share of it
NOISY = 0.10  # repeats of one text that differ by more, as a share of their median


def in_circles(ids: Sequence[Hashable]) -> bool:
    """Whether some 4-gram occurs eight times: such text flatters any draft."""
    grams = Counter(tuple(ids[i : i + GRAM]) for i in range(len(ids) - GRAM + 1))
    return max(grams.values(), default=0) >= OFTEN


def stuck(ids: Sequence[Hashable]) -> bool:
    """Whether one token stands more than twenty times in a row."""
    return any(sum(1 for _ in run) > IN_A_ROW for _, run in groupby(ids))


def fault(said: Sequence[Hashable], decoded: int, seconds: float) -> str | None:
    """Why a text's speed says nothing; None = it counts.

    ``said`` are its ids, or its words where a server gives only those; ``decoded`` counts tokens
    after the prefill.
    """
    if stuck(said):
        return "stuck on one token"
    if in_circles(said):
        return "runs in circles"
    if decoded < LEAST_TOKENS:
        return f"shorter than {LEAST_TOKENS} tokens"
    if seconds < LEAST_SECONDS:
        return f"too fast to be timed (under {1e3 * LEAST_SECONDS:.0f} ms; more --max-tokens help)"
    return None


def noise(found: float) -> str | None:
    """What to say where repeats lie ``found`` apart; None = they agree well enough."""
    if found <= NOISY:
        return None
    return f"noisy machine: repeats of a text differ by {100 * found:.0f} %"


def spread(repeats: Sequence[Sequence[float]]) -> float:
    """How far the repeats of one text lie apart: median over texts of (most - least) / median."""
    found = [(max(times) - min(times)) / median(times) for times in repeats if len(times) > 1]
    return median(found) if found else 0.0
