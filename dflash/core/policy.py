"""How many tokens to draft next. A policy sees outlooks and past steps, never a drawn token."""

from __future__ import annotations

from collections.abc import Sequence

from dflash.core.types import Outlook, Plan, Step


class Fixed:
    """Always the same block, or what is left of it at the end of the output."""

    def __init__(self, block_size: int) -> None:
        """``block_size`` counts the anchor: 1 is plain decoding."""
        assert block_size >= 1, f"a block has at least its anchor, got {block_size}"
        self._rows = block_size - 1

    def plan(self, most: int, outlooks: Sequence[Outlook]) -> Plan:
        """The first draft that can propose, as deep as block, draft and output allow."""
        for draft, outlook in enumerate(outlooks):
            rows = min(self._rows, most, outlook.most)
            if rows > 0:
                return Plan(draft, rows, rows)
        return Plan()

    def observe(self, step: Step) -> None:
        """Nothing to learn."""


class Off:
    """Plain decoding: one token a pass."""

    def plan(self, most: int, outlooks: Sequence[Outlook]) -> Plan:  # noqa: ARG002 - the protocol
        """Never a draft."""
        return Plan()

    def observe(self, step: Step) -> None:
        """Nothing to learn."""
