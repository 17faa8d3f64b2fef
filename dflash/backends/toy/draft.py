"""Drafts that follow a script. ScriptedDraft serves any backend; ToyDraft reads the toy's rows."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, Self

from dflash.backends.toy.model import Ahead, ToyModel, common
from dflash.core.types import MOST_NODES, Outlook, Plan, Proposal, Request, Verdict


def among_others(
    chain: Sequence[int], nodes: int, vocab_size: int, turn: int
) -> tuple[list[int], list[int]]:
    """``(tokens, parents)`` of a tree: each token of ``chain`` among siblings that are not it.

    ``nodes`` are shared out evenly. Which of the siblings it is changes from level to level and
    with ``turn``. A token that is one too high, as those of a wrong script are, has no right one
    beside it.
    """
    tokens: list[int] = []
    parents: list[int] = []
    here = -1
    for level, token in enumerate(chain):
        width = min((nodes - len(tokens)) // (len(chain) - level), vocab_size - 1)
        others = [(token + 1 + i) % vocab_size for i in range(width - 1)]
        place = (turn + level) % width
        parents += [here] * width
        here = len(tokens) + place
        tokens += [*others[:place], token, *others[place:]]
    return tokens, parents


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
        """As deep as its block, always, and as many branches as one likes."""
        return Outlook(self._most, lag=sum(rows for _, rows in self._queue), tree=MOST_NODES)

    def propose(self, plan: Plan) -> Proposal[Any]:
        """``plan.depth`` tokens, as right as the script says; in a tree, each among siblings."""
        assert self._open, "the session was closed"
        depth, turn = min(plan.rows, plan.depth), self._round
        assert 0 < depth <= self._most, f"asked for {depth} tokens, has {self._most}"
        self._absorb()
        output = self._history[len(self._request.prompt) :]
        tokens = list(self._ahead(self._request, output, depth))
        tokens += [0] * (depth - len(tokens))
        sound = self._sound and self._held == len(self._history) - 1  # all but the anchor
        for place in range(depth):
            if not sound or place == self._right():
                tokens[place] = (tokens[place] + 1) % self._vocab
        self._round += 1
        if plan.rows == depth:
            return Proposal(tokens, depth, meta=0)  # a script takes no time
        tokens, parents = among_others(tokens, plan.rows, self._vocab, turn)
        return Proposal(tokens, len(tokens), parents, meta=0, depth=depth)

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
