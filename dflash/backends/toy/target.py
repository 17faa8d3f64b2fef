"""The fake target session: reference rules over a ToyModel, with a cache that forgives nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, Self

import numpy as np

from dflash.backends.toy.model import State, ToyModel, common
from dflash.core.host import Ruling, rule
from dflash.core.types import Proposal, Request, Verdict


class ToyTarget:
    """TargetSession over a ToyModel; its features are its states."""

    def __init__(self, model: ToyModel, chunk: int = 64) -> None:
        """``chunk`` is the most tokens of one prefill verdict."""
        self._model, self._chunk, self._open = model, chunk, True
        self._states = [model.run(())]  # one more than tokens
        self._tokens: list[int] = []  # those run through the model
        self._anchor, self._base = 0, 0
        self._output: list[int] = []
        self._last: list[int] = []
        self._request = Request((), 0)

    def prefill(self, request: Request, reuse: int) -> Iterator[Verdict[list[State]]]:
        """As the protocol says; ``reuse`` must be something ``holds`` has answered."""
        assert self._open, "the session was closed"
        assert list(request.prompt[:reuse]) == self._tokens[:reuse], "reuse is not held"
        assert reuse < len(request.prompt), "at least one token has to be run"
        self._crop(reuse)
        self._request, self._output = request, []
        for start in range(reuse, len(request.prompt), self._chunk):
            rows = self._run(request.prompt[start : start + self._chunk])
            if len(self._tokens) < len(request.prompt):
                yield Verdict([], rows=len(rows), features=rows)
                continue
            ruling = self._judge(rows[-1:])
            self._anchor = ruling.tokens[0]
            self._say(ruling.tokens)
            yield Verdict(ruling.tokens, rows=len(rows), features=rows, notes=ruling.notes)

    def verify(self, proposal: Proposal[Any]) -> Verdict[list[State]]:
        """As the protocol says: one pass over anchor and drafts."""
        assert self._open, "the session was closed"
        drafted, parents = list(proposal.tokens)[: proposal.rows], proposal.parents
        self._base = len(self._tokens)
        rows = self._run([self._anchor, *drafted] if parents is None else [self._anchor])
        if parents is not None:
            rows += self._branches(rows[0], drafted, parents)
        ruling = self._judge(rows, drafted, proposal.q, parents)
        self._last, path = ruling.tokens, ruling.path
        kept = [rows[0], *(rows[node + 1] for node in path)]
        if parents is not None:  # the path alone stays
            self._tokens += self._last[:-1]
            self._states += kept[1:]
        said, notes = list(self._last), ruling.notes
        return Verdict(said, path, len(drafted), len(path) + 1, kept, notes=notes)

    def commit(self, kept: int) -> None:
        """As the protocol says. A wrong count is believed, and spoils the state."""
        assert self._open, "the session was closed"
        self._crop(self._base + kept)
        self._anchor = self._last[kept - 1] if 0 < kept <= len(self._last) else self._anchor
        self._say(self._last[:kept])

    def holds(self, prompt: Sequence[int], most: int) -> int:
        """Any prefix it has run through."""
        return common(self._tokens, prompt, most)

    def fork(self) -> Self:
        """An independent copy."""
        twin = copy(self)
        twin._states, twin._tokens = list(self._states), list(self._tokens)
        twin._output = list(self._output)
        return twin

    def grow(self, capacity: int) -> None:
        """Lists grow by themselves."""

    def close(self) -> None:
        """Every later call but this one fails."""
        self._open = False

    def _judge(
        self,
        rows: Sequence[State],
        drafted: Sequence[int] = (),
        q: Any = None,
        parents: Sequence[int] | None = None,
    ) -> Ruling:
        """Tokens to commit, and which of them are drafts."""
        logits = np.stack([self._model.logits(row) for row in rows])
        return rule(logits, self._request, self._output, drafted, q, parents)

    def _branches(self, root: State, drafted: Sequence[int], parents: Sequence[int]) -> list[State]:
        """The state after each node of a tree, from its parent's."""
        states = [root]
        for node, (token, parent) in enumerate(zip(drafted, parents, strict=True)):
            assert -1 <= parent < node, "a node comes after its parent"
            states.append(self._model.after(states[parent + 1], token))
        return states[1:]

    def _say(self, tokens: list[int]) -> None:
        self._output += tokens
        if self._request.grammar is not None:
            self._request.grammar.commit(tokens)

    def _run(self, tokens: Sequence[int]) -> list[State]:
        for token in tokens:
            self._states.append(self._model.after(self._states[-1], token))
        self._tokens += tokens
        return self._states[len(self._states) - len(tokens) :]

    def _crop(self, length: int) -> None:
        del self._tokens[length:], self._states[length + 1 :]
