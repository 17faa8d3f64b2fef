"""Width: the draft reads states as wide as the target makes them."""

from __future__ import annotations

from collections.abc import Iterator

from dflash.doctor.static.facts import Choice, Finding, TargetFacts
from dflash.drafts.spec import DraftSpec


def check_width(spec: DraftSpec, target: TargetFacts, _: Choice) -> Iterator[Finding]:
    """The target's hidden size is the one the draft was made for."""
    if spec.target_hidden_size != target.hidden_size:
        yield Finding(
            "error",
            "width",
            f"the draft reads hidden states of width {spec.target_hidden_size}, the target's are "
            f"{target.hidden_size} wide: it was made for another target",
        )
