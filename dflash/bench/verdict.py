"""Did speculation change the text? Every first difference, with the gap of the two logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dflash.bench.rows import Text
from dflash.checks import counted
from dflash.verify.compare import ENDED, Difference, first_difference

Judge = Callable[[Sequence[int], Sequence[int], int, int], tuple[float | None, float]]
"""(prompt, output so far, token, token) -> (gap, widest gap that is a tie)."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One text on which an arm left the baseline."""

    arm: str
    prompt: str
    difference: Difference

    @property
    def kind(self) -> str:
        """Rounding, or a fault."""
        return "tie" if self.difference.tie else "real"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        found = asdict(self.difference)
        return {"arm": self.arm, "prompt": self.prompt, "kind": self.kind, **found}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Greedy equality of all arms of one engine."""

    compared: int  # texts x arms
    tokens: int
    findings: tuple[Finding, ...]

    @property
    def real(self) -> tuple[str, ...]:
        """Arms with a difference that is no tie."""
        return tuple(dict.fromkeys(f.arm for f in self.findings if f.kind == "real"))

    @property
    def sentence(self) -> str:
        """For the top of the report."""
        texts = counted(self.compared, "text")
        if not self.findings:
            return f"identical: {texts}, {counted(self.tokens, 'token')}, no difference"
        first = min(self.findings, key=lambda f: f.kind != "real")
        gap = "" if first.difference.gap is None else f", gap {first.difference.gap:.1e}"
        ties = sum(f.kind == "tie" for f in self.findings)
        real = counted(len(self.findings) - ties, "real difference")
        return (
            f"{real} and {counted(ties, 'tie')} in {texts}; first: {first.arm} on {first.prompt} "
            f"at token {first.difference.position}{gap}"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "sentence": self.sentence,
            "lossless": not self.real,
            "compared": self.compared,
            "tokens": self.tokens,
            "differences": [finding.to_json() for finding in self.findings],
        }


def judge(
    texts: Mapping[tuple[str, str, int], Text],
    prompts: Mapping[tuple[str, str, int], Sequence[int]],
    arms: Sequence[str],
    base: str,
    gap: Judge,
) -> Verdict:
    """Compare each of ``arms`` with ``base``, all repeats; ``prompts`` are the ids that ran."""
    compared, tokens, findings = 0, 0, []
    for key, text in texts.items():
        plain = text[base][0].ids
        for arm in arms:
            for run in text[arm]:
                compared, tokens = compared + 1, tokens + len(run.ids)
                place = first_difference(plain, run.ids)
                if place is None:
                    continue
                there = _difference(prompts[key], plain, run.ids, place, gap)
                findings.append(Finding(arm, f"{key[1]}#{key[2] + 1}", there))
                break  # one a text and arm says it
    return Verdict(compared, tokens, tuple(findings))


def _difference(
    prompt: Sequence[int], plain: Sequence[int], other: Sequence[int], place: int, gap: Judge
) -> Difference:
    one, two = (ids[place] if place < len(ids) else ENDED for ids in (plain, other))
    if ENDED in (one, two):
        return Difference(place, one, two, None, 0.0)
    return Difference(place, one, two, *gap(prompt, plain[:place], one, two))
