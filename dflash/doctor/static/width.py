"""Width: the draft reads states as wide as the target makes them."""

from __future__ import annotations

from collections.abc import Iterator

from dflash.doctor.static.facts import Choice, Finding, TargetFacts
from dflash.drafts.spec import DraftSpec


def check_width(spec: DraftSpec, target: TargetFacts, choice: Choice) -> Iterator[Finding]:
    """The target's hidden size is the one the draft was made for, or the user insists."""
    if spec.target_hidden_size == target.hidden_size:
        return
    if choice.force:
        yield Finding(
            "warning",
            "width",
            f"FORCED: the draft reads hidden states of width {spec.target_hidden_size}, the "
            f"target's are {target.hidden_size} wide. They are fitted by a fixed projection that "
            "the draft was not trained with: the text stays the target's, but expect next to "
            "nothing to be accepted",
        )
    else:
        yield Finding(
            "error",
            "width",
            f"the draft reads hidden states of width {spec.target_hidden_size}, the target's are "
            f"{target.hidden_size} wide: it was made for another target (--force-dflash uses it "
            "nevertheless)",
        )
