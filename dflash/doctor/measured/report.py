"""What the doctor found, and the one sentence that says it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dflash.doctor.measured.acceptance import Acceptance
from dflash.doctor.measured.cost import Block, Cost
from dflash.doctor.static.facts import Finding

NOTHING, LITTLE = 1.1, 1.5  # committed per pass: below these, broken and weak
LEAST_MS = 0.05  # what is shown as 0.0
Verdict = Literal["ok", "weak", "broken"]


@dataclass(frozen=True, slots=True)
class Report:
    """Findings, figures, verdict. Figures are None where the pair could not run."""

    findings: tuple[Finding, ...]
    acceptance: Acceptance | None = None
    cost: Cost | None = None
    promised: float | None = None  # committed per pass, by the draft's card
    look_up: bool = False  # drafts are looked up: nothing was trained, so nothing can be broken

    @property
    def verdict(self) -> Verdict:
        """By fit and acceptance alone; whether it pays on this machine is in the sentence."""
        levels = {finding.level for finding in self.findings}
        if self.acceptance is None or "error" in levels:
            return "broken"
        if self.acceptance.mean_committed < NOTHING and not self.look_up:
            return "broken"
        weak = self.acceptance.mean_committed < LITTLE or "warning" in levels
        return "weak" if weak else "ok"

    @property
    def sentence(self) -> str:
        """One plain sentence."""
        parts = [_fit(self)]
        if self.cost is not None and self.verdict != "broken":
            found = "where it finds something, " if self.look_up else ""  # the table's rounds
            parts.append(found + _speed(self.cost))
        return f"{self.verdict}: " + "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "verdict": self.verdict,
            "sentence": self.sentence,
            "findings": [asdict(finding) for finding in self.findings],
            "acceptance": None if self.acceptance is None else self.acceptance.to_json(),
            "promised": self.promised,
            "cost": None if self.cost is None else self.cost.to_json(),
            "break_even": None if self.cost is None else self.cost.best_drafted.break_even,
            "spread": None if self.cost is None else self.cost.spread,
        }


def _fit(report: Report) -> str:
    errors = [finding for finding in report.findings if finding.level == "error"]
    if report.acceptance is None:
        return f"the pair cannot run ({_named(errors)})"
    mean = report.acceptance.mean_committed
    found = f"{mean:.2f} committed per pass"
    if errors:
        return f"{found}, and something is wrong with the {_named(errors)}"
    if report.look_up and mean < LITTLE:
        nothing = "the look-up found nothing on these prompts"
        few = "these prompts and their answers hardly repeat themselves"
        return f"{found}: {few if report.acceptance.drafted else nothing}"
    if mean < NOTHING:
        return (
            f"{found}, so almost nothing is accepted: the draft was not made for this target, or "
            "not for such text"
        )
    warnings = [finding for finding in report.findings if finding.level == "warning"]
    return f"{found}, less than there should be ({_named(warnings)})" if warnings else found


def _named(findings: Sequence[Finding]) -> str:
    return ", ".join(dict.fromkeys(finding.check for finding in findings))


def _speed(cost: Cost) -> str:
    best = cost.best
    if best.block_size == 1:
        block = cost.best_drafted
        return (
            f"no block pays here, the best would run at {block.speed:.2f} times plain decoding, "
            f"and {_slow(block, cost.blocks[0])}"
        )
    return (
        f"block {best.block_size} should run at {best.speed:.2f} times plain decoding, and "
        f"{_slow(best, cost.blocks[0])}"
    )


def _slow(block: Block, plain: Block) -> str:
    """The part that takes more of what a round costs beyond a plain step."""
    rows = max(0.0, block.verify_ms - plain.verify_ms)
    if rows + block.draft_ms < LEAST_MS:
        return "a round takes no longer than a plain step (is the machine busy?)"
    share = f"{max(rows, block.draft_ms):.1f} of {rows + block.draft_ms:.1f} ms"
    if block.draft_ms >= rows:
        return f"the slow part is the draft ({share} that a round adds to a plain step)"
    return (
        f"the slow part is the verify pass ({share} that a round adds to a plain step: "
        f"{block.block_size} rows cost {block.verify_ms / plain.verify_ms:.2f} times one row)"
    )
