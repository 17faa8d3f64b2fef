"""Norm kind: a draft's norms are stored plain (about 1); some families store them centred on 0."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from dflash.doctor.measured.patient import Patient
from dflash.doctor.static.facts import Finding

CENTRED = 0.25  # means nearer to zero than this


def check_norms(patient: Patient) -> Iterator[Finding]:
    """Most norm weights near zero: the checkpoint stores (1 + w), and w is read as the weight."""
    means = patient.probe.norms()
    if means and median(abs(mean) for mean in means.values()) < CENTRED:
        typical = median(means.values())
        yield Finding(
            "error",
            "norms",
            f"the draft's norm weights are centred on 0 (typically {typical:.2f}), and DFlash "
            "norms are plain (about 1): the converter left out the 1 that this family adds. "
            "Convert the draft again, or add 1 to its norm weights",
        )
