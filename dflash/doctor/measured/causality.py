"""Causality: whether rows of a block see the later ones is not written in every config."""

from __future__ import annotations

from collections.abc import Iterator

from dflash.doctor.measured.patient import Patient
from dflash.doctor.measured.rivals import Rival


def other_causality(patient: Patient) -> Iterator[Rival]:
    """All layers the other way; layers that differ among themselves all the one and all the other.

    Published readers disagree where the config is silent and layers slide.
    """
    now = patient.spec.causal
    for causal in (False, True):
        wanted = (causal,) * len(now)
        if wanted != now:
            word = "causal" if causal else "bidirectional"
            yield Rival(
                "causality",
                {"causal": wanted},
                f"with {word} attention inside the block",
                f"Set is_causal to {str(causal).lower()} in the draft's config.json",
            )
