"""Taps: an off-by-one in which layers are read loads silently and ruins acceptance."""

from __future__ import annotations

from collections.abc import Iterator

from dflash.doctor.measured.patient import Patient
from dflash.doctor.measured.rivals import Rival

NEIGHBOURS = {-1: "one layer earlier", 1: "one layer later"}


def other_taps(patient: Patient) -> Iterator[Rival]:
    """Every tap one layer earlier, and one later; the first and the last layer bound them."""
    last = patient.probe.layers - 1
    for shift, words in NEIGHBOURS.items():
        taps = tuple(tap + shift for tap in patient.spec.taps)
        if min(taps) >= 0 and max(taps) <= last:
            yield Rival(
                "taps",
                {"taps": taps},
                f"with every tap {words}",
                f"Set dflash_config.target_layer_ids to {list(taps)} (ids name the output of a "
                "layer, counted from 0), or load with --taps " + ",".join(map(str, taps)),
            )
