"""Drafts that say one token after the other, behind the seam: EAGLE-3, and heads in the target.

The row of position P reads token P + 1 and a state of position P: what the target computed where it
has been, else the row's own output one step before. It says what follows token P + 1. So a row that
was absorbed before a token that turned out otherwise must be absorbed again, and `holds` offers one
row less where the next token is not the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

from dflash.backends.gguf.native import Context, Floats
from dflash.backends.gguf.queued import Limits, QueuedDraft
from dflash.core.host import Drafted, confidence, propose_in_turn

CHUNK = 16  # rows of a pass that catches up; all rows of the last one go through the head


class ChainDraft(QueuedDraft):
    """DraftSession over one context whose passes take tokens and states side by side."""

    _newest = 1
    _outputs = 0  # rows of the last pass that went through the head

    def __init__(
        self, opened: Callable[[int], Context], capacity: int, limits: Limits, fused: bool
    ) -> None:
        """``fused``: features become states in an encoder of the draft's; else they are states."""
        super().__init__(opened, capacity, limits)
        self._fused = fused
        self._before = -1  # position of the row whose outputs the context still has

    def holds(self, prompt: Sequence[int], most: int) -> int:
        """Rows that are there for ``prompt``, at most ``most``; see the module's first lines."""
        common = self._common(prompt)
        limit = min(most, common, self._held())
        return limit - 1 if 0 < limit == common <= self._absorbed else limit

    def _twin(self) -> Self:
        return type(self)(self._opened, self._capacity, self._limits, self._fused)

    def _take(self, rows: Floats, start: int) -> None:
        for at in range(0, len(rows), CHUNK):
            part, first = rows[at : at + CHUNK], start + at
            tokens = self._tokens[first + 1 : first + 1 + len(part)]
            states = self._context.encode(part, first) if self._fused else part
            last = at + len(part) == len(rows)
            self._context.step(tokens, states, first, len(part) if last else 0)
        self._outputs, self._before = len(part), first + len(part) - 1

    def _drafted(self, rows: int, start: int) -> Drafted:
        assert self._before == start - 1, "a chain begins with the newest row of the target's"
        context, outputs = self._context, self._outputs

        def row_after(said: list[int]) -> Floats | None:
            """Logits [V] after the anchor and ``said``."""
            nonlocal outputs
            if len(said) == rows:
                return None
            if said:
                state = context.states(outputs)[-1:].copy()
                outputs = 1
                context.step(said[-1:], state, start + len(said) - 1, outputs)
            row = context.logits(outputs)[-1]
            return None if self._least and confidence(row) < self._least else row

        return propose_in_turn(row_after, self._request, self._output())
