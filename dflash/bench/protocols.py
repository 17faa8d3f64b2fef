"""Two published ways to add the same records up, side by side.

Upstream: every request weighs the same. The time per output token of a request divides its decode
time by all its tokens, the prefill's included; the speed-up is the ratio of the two means of that
over requests; the acceptance length is the mean of per-request means, the bonus counted, and the
histogram is over lengths from 0 to the block size.

Ours: every token weighs the same. Sums of median times over texts that are equal, and committed
tokens of all rounds / rounds; the prefill's token is in neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from dflash.bench.rows import Row
from dflash.bench.totals import ratio
from dflash.bench.trial import Outcome


@dataclass(frozen=True, slots=True)
class Upstream:
    """What z-lab's script prints for one arm."""

    baseline: float  # tokens/s
    throughput: float
    speedup: float
    acceptance_length: float | None  # None = no round
    histogram: tuple[float, ...]  # [n]: share of rounds that brought n tokens

    def lines(self) -> list[str]:
        """Its output, line by line."""
        if self.acceptance_length is None:
            mean, shares = "n/a", []
        else:
            mean = f"{self.acceptance_length:.2f}"
            shares = [f"{100 * share:.1f}%" for share in self.histogram]
        return [
            f"Baseline throughput: {self.baseline:.2f} tok/s",
            f"DFlash throughput:  {self.throughput:.2f} tok/s",
            f"Decoding speedup: {self.speedup:.2f}",
            f"Average Acceptance length: {mean}",
            *([f"Acceptance length histogram: {shares}"] if shares else []),
        ]


def upstream(base: Sequence[Outcome], arm: Sequence[Outcome], block_size: int) -> Upstream:
    """Upstream's figures of ``arm`` over ``base``."""
    slow, fast = (fmean(_per_token(run) for run in runs) for runs in (base, arm))
    own = [(run.tokens - run.first) / run.rounds for run in arm if run.rounds]
    rounds = sum(run.rounds for run in arm)
    depth = max([block_size, *(len(run.histogram) for run in arm)])
    counts = [0] * (depth + 1)
    for run in arm:
        for accepted, count in enumerate(run.histogram):
            counts[accepted + 1] += count
    return Upstream(
        baseline=ratio(1, slow),
        throughput=ratio(1, fast),
        speedup=ratio(slow, fast),
        acceptance_length=fmean(own) if own else None,
        histogram=tuple(ratio(count, rounds) for count in counts),
    )


def _per_token(run: Outcome) -> float:
    return ratio(run.decode, run.tokens)


def side_by_side(theirs: Upstream, row: Row) -> dict[str, dict[str, Any]]:
    """Speed-up and acceptance of one arm, by both definitions."""
    return {
        "upstream": asdict(theirs),
        "ours": {
            "speedup": None if row.refused else row.speedup.value,
            "throughput": row.rate,
            "committed_micro": row.totals.micro,
            "committed_macro": row.totals.macro,
        },
    }
