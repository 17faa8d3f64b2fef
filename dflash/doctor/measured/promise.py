"""What the draft's card promises, and whether this target and these prompts keep it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from dflash.doctor.measured.patient import Patient
from dflash.doctor.static.facts import Finding
from dflash.drafts.keys import Keys

KEPT = 0.75  # share of the promise that passes: prompts differ
KEY = "acceptance_by_position"  # in dflash_config: survival of draft 1, 2, ...
_LINE = re.compile(r"(\d+\.\d+) committed per verify pass")


def check_promise(patient: Patient) -> Iterator[Finding]:
    """A fine-tune, a quantisation or another kind of text shows here; none of them is an error."""
    promised, found = promise(patient), patient.acceptance.mean_committed
    if promised is not None and found < KEPT * promised:
        yield Finding(
            "warning",
            "acceptance",
            f"{found:.2f} committed per pass, and the draft's card promises {promised:.2f}: the "
            "target is not quite the one it was trained for (a fine-tune, another quantisation), "
            "or these prompts are unlike its training text",
        )


def promise(patient: Patient) -> float | None:
    """Mean committed per pass from the draft's config or card; None when neither says."""
    spec = patient.probe.spec
    places = None if spec is None else Keys(spec.raw).get(KEY)
    if isinstance(places, list) and places and all(isinstance(p, int | float) for p in places):
        return 1.0 + float(sum(places))
    card = Path(patient.engine.pair.draft_name or "").expanduser() / "README.md"
    if not card.is_file():
        return None
    told = _LINE.findall(card.read_text(encoding="utf-8", errors="replace"))
    found = [float(figure) for figure in told if float(figure) >= 1]  # less was measured on nothing
    return found[-1] if found else None  # real generation stands after the walk
