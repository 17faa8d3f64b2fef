"""Rope: the draft's base frequency is its own, but it is nearly always the target's."""

from __future__ import annotations

from collections.abc import Iterator

from dflash.doctor.measured.patient import Patient
from dflash.doctor.measured.rivals import Rival


def other_rope(patient: Patient) -> Iterator[Rival]:
    """The target's base frequency, where the draft has another one.

    A few short prompts show a gross error only; a subtle one shows at long context.
    """
    theta, ropes = patient.probe.rope_theta, patient.spec.rope_parameters
    if theta is None or all(rope["rope_theta"] == theta for rope in ropes.values()):
        return
    now = ", ".join(sorted({f"{rope['rope_theta']:g}" for rope in ropes.values()}))
    yield Rival(
        "rope",
        {"rope_parameters": {kind: {**rope, "rope_theta": theta} for kind, rope in ropes.items()}},
        f"with the target's rope_theta {theta:g} than with its own {now}",
        f"Set rope_theta to {theta:g} in the draft's config.json",
    )
