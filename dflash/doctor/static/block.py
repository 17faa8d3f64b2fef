"""Block and history: what is asked of the draft against what it was trained with."""

from __future__ import annotations

from collections.abc import Iterator

from dflash.doctor.static.facts import Choice, Finding, TargetFacts
from dflash.drafts.spec import DraftSpec


def check_block(spec: DraftSpec, _: TargetFacts, choice: Choice) -> Iterator[Finding]:
    """A default block beyond the native one is cut; a history shorter than trained costs."""
    if spec.default_block_size is not None and spec.default_block_size > spec.block_size:
        yield Finding(
            "warning",
            "block",
            f"default_block_size {spec.default_block_size} is larger than the draft's native "
            f"block_size {spec.block_size}, which caps it",
        )
    own = spec.window
    if choice.window is not None and (own is None or choice.window < own):
        trained = "the whole context" if own is None else f"{own} tokens"
        yield Finding(
            "warning",
            "block",
            f"the draft sees the last {choice.window} tokens; it was trained on {trained}. "
            "If acceptance drops in long texts, leave --draft-sliding-window-size out",
        )
