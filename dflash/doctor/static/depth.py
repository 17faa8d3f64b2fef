"""Depth: the tapped layers exist, and the target is as deep as the draft was told."""

from __future__ import annotations

from collections.abc import Iterator

from dflash.doctor.static.facts import Choice, Finding, TargetFacts
from dflash.drafts.spec import DraftSpec


def check_depth(spec: DraftSpec, target: TargetFacts, choice: Choice) -> Iterator[Finding]:
    """Taps lie inside the target; a recorded depth is the target's.

    Some trainers record the number of taps under ``num_target_layers``; that is let pass.
    """
    outside = [tap for tap in spec.taps if tap >= target.num_layers]
    if outside:
        yield Finding(
            "error",
            "depth",
            f"the draft taps layers {list(spec.taps)}, but the target has layers 0 to "
            f"{target.num_layers - 1}: it was made for another target",
        )
    elif spec.num_target_layers not in (None, target.num_layers, len(spec.taps)):
        yield Finding(
            "warning" if choice.force else "error",
            "depth",
            f"the draft was made for a target of {spec.num_target_layers} layers, this one has "
            f"{target.num_layers}",
        )
