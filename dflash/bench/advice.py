"""One line at the end: which block size, what it brings, which kind of text gains least."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dflash.bench.rows import Row

GOOD, WEAK = 0.60, 0.30  # accepted / drafted: the marks people go by


@dataclass(frozen=True, slots=True)
class Advice:
    """What the run recommends."""

    block_size: int  # 1 = plain decoding
    speedup: float | None  # of that block over plain decoding; None = nothing could be compared
    acceptance: float | None  # accepted / drafted at that block
    least: tuple[str, float] | None  # set that gains least, and its speed-up
    auto: float | None  # what block_size="auto" reached

    @property
    def mark(self) -> str:
        """good, fair or weak; "" where nothing was drafted."""
        if self.acceptance is None:
            return ""
        return "good" if self.acceptance > GOOD else "weak" if self.acceptance < WEAK else "fair"

    @property
    def sentence(self) -> str:
        """The line."""
        if self.speedup is None:
            return "no recommendation: no speed-up could be measured (see the notes)"
        auto = "" if self.auto is None else f"; auto reaches {self.auto:.2f}x"
        if self.block_size == 1:
            return f"use plain decoding (block 1): no fixed block is faster here{auto}"
        least = (
            "" if self.least is None else f"; {self.least[0]} gains least ({self.least[1]:.2f}x)"
        )
        return f"use block {self.block_size}: {self.speedup:.2f}x{least}{auto}. {self.accepted}"

    @property
    def accepted(self) -> str:
        """Acceptance beside its marks."""
        if self.acceptance is None:
            return ""
        return (
            f"{100 * self.acceptance:.0f} % of drafts accepted at that block: {self.mark} "
            f"(above {100 * GOOD:.0f} % good, below {100 * WEAK:.0f} % weak)"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "mark": self.mark, "sentence": self.sentence}


def advise(
    rows: Sequence[Row], by_set: Mapping[str, Sequence[Row]], blocks: Mapping[str, int | str]
) -> Advice:
    """The fastest fixed block over all texts; plain decoding where none is faster.

    ``blocks`` is arm -> block size, "auto" included; other arms do not take part.
    """
    known = {row.arm: row for row in rows if row.arm in blocks and not row.refused}
    fixed = {arm: row for arm, row in known.items() if blocks[arm] not in ("auto", 1)}
    auto = next((r.speedup.value for arm, r in known.items() if blocks[arm] == "auto"), None)
    if not fixed:
        return Advice(1, None, None, None, auto)
    best = max(fixed, key=lambda arm: fixed[arm].speedup.value)
    row, size = fixed[best], int(blocks[best])
    if row.speedup.value <= 1:
        return Advice(1, 1.0, row.totals.acceptance_rate, None, auto)
    gains = {
        name: r.speedup.value
        for name, group in by_set.items()
        for r in group
        if r.arm == best and not r.refused
    }
    worst = min(gains, key=gains.__getitem__) if len(gains) > 1 else None
    least = None if worst is None else (worst, gains[worst])
    return Advice(size, row.speedup.value, row.totals.acceptance_rate, least, auto)
