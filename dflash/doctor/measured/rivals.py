"""Would the draft match better if its config said something else?

A wrong tap, mask or base frequency loads without complaint and only costs acceptance. So the
neighbours of what the config says are tried on a few prompts, with the same weights. The best one
is named, if it is better by more than chance; a second opinion can wait until that is mended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash.doctor.measured.acceptance import Acceptance
from dflash.doctor.measured.patient import Patient
from dflash.doctor.static.facts import Finding


@dataclass(frozen=True, slots=True)
class Rival:
    """Another reading of the draft's config."""

    check: str
    changes: Mapping[str, Any]  # fields of the spec
    what: str  # "with every tap one layer earlier"
    advice: str  # what to set


def judge(
    patient: Patient, rivals: Sequence[Rival], watch: Callable[[int, Rival], None]
) -> Iterator[Finding]:
    """Try all, and name the best one if it clearly matches better; ``watch`` hears of each."""
    better = []
    for number, rival in enumerate(rivals, 1):
        watch(number, rival)
        found = patient.under(**rival.changes)
        if found is not None and found.clearly_above(patient.brief):
            better.append((rival, found))
    if not better:
        return
    best, found = max(better, key=lambda pair: pair[1].mean_committed)
    yield Finding("error", best.check, _message(best, found, patient.brief))


def _message(rival: Rival, found: Acceptance, now: Acceptance) -> str:
    return (
        f"the draft matches better {rival.what}: {found.mean_committed:.2f} committed per pass "
        f"instead of {now.mean_committed:.2f}. {rival.advice}"
    )
