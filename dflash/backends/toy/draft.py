"""Drafts that follow a script. ScriptedDraft serves any backend; ToyDraft reads the toy's rows."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, Self

from dflash.backends.toy.model import Ahead, ToyModel, common
from dflash.core.types import Outlook, Plan, Proposal, Request, Verdict


class ScriptedDraft:
    """A DraftSession that is told what the target will say, and how often to be right.

    Serves any backend. In round i it is right for ``script[i]`` tokens, wrong for one, and right
    again, which must not help. Without a script it is always right. It is lazy as a model draft:
    ``commit`` queues. It counts its context; told anything but every committed token in order, it
    is wrong everywhere.
    """

    def __init__(
        self, ahead: Ahead, vocab_size: int, script: Sequence[int] | None = None, most: int = 15
    ) -> None:
        """``most`` is the deepest proposal: the native block without its anchor."""
        self._ahead, self._vocab, self._script, self._most = ahead, vocab_size, script, most
        self._open, self._round, self._held, self._sound = True, 0, 0, True
        self._queue: list[tuple[Any, int]] = []  # features, rows
        self._history: list[int] = []  # prompt and output
        self._request = Request((), 0)

    def begin(self, request: Request, reuse: int) -> None:
        """As the protocol says."""
        assert self._open, "the session was closed"
        assert self.holds(request.prompt, reuse) == reuse, "reuse is not held"
        self._request, self._history = request, list(request.prompt)
        self._round, self._held, self._sound, self._queue = 0, reuse, True, []

    def outlook(self) -> Outlook:
        """As deep as its block, always."""
        return Outlook(self._most, lag=sum(rows for _, rows in self._queue))

    def propose(self, plan: Plan) -> Proposal[Any]:
        """``plan.rows`` tokens, as right as the script says."""
        assert self._open, "the session was closed"
        assert 0 < plan.rows <= self._most, f"asked for {plan.rows} rows, has {self._most}"
        self._absorb()
        output = self._history[len(self._request.prompt) :]
        tokens = list(self._ahead(self._request, output, plan.rows))
        tokens += [0] * (plan.rows - len(tokens))
        sound = self._sound and self._held == len(self._history) - 1  # all but the anchor
        for place in range(plan.rows):
            if not sound or place == self._right():
                tokens[place] = (tokens[place] + 1) % self._vocab
        self._round += 1
        return Proposal(tokens, plan.rows, meta=0)  # a script takes no time

    def commit(self, verdict: Verdict[Any], rows: int) -> None:
        """As the protocol says."""
        self._history += verdict.tokens[:rows]
        self._queue.append((verdict.features, rows))

    def holds(self, prompt: Sequence[int], most: int) -> int:
        """Any prefix it has context rows for, those in the queue included."""
        if not self._sound:
            return 0
        held = self._held + sum(rows for _, rows in self._queue)
        return common(self._history[:held], prompt, most)

    def fork(self) -> Self:
        """An independent copy."""
        twin = copy(self)
        twin._queue, twin._history = list(self._queue), list(self._history)
        return twin

    def grow(self, capacity: int) -> None:
        """Lists grow by themselves."""

    def close(self) -> None:
        """Every later call but this one fails."""
        self._open = False

    def _right(self) -> int | None:
        return self._script[self._round % len(self._script)] if self._script else None

    def _absorb(self) -> None:
        for features, rows in self._queue:
            tokens = self._history[self._held : self._held + rows]
            self._sound &= len(tokens) == rows and self._fits(features, rows)
            self._held += rows
        self._queue = []

    def _fits(self, features: Any, rows: int) -> bool:
        return features is None or len(features) >= rows


class ToyDraft(ScriptedDraft):
    """A ScriptedDraft that also reads the toy's features: every row must be the right one."""

    def __init__(self, model: ToyModel, ahead: Ahead, script: Sequence[int] | None, most: int):
        """``ahead`` may be wrong; the rows are checked against ``model`` all the same."""
        super().__init__(ahead, model.vocab_size, script, most)
        self._model, self._state = model, model.run(())

    def begin(self, request: Request, reuse: int) -> None:
        """As the protocol says."""
        super().begin(request, reuse)
        self._state = self._model.run(request.prompt[:reuse])

    def _fits(self, features: Any, rows: int) -> bool:
        states = []
        for token in self._history[self._held : self._held + rows]:
            self._state = self._model.after(self._state, token)
            states.append(self._state)
        return list(features[:rows]) == states
