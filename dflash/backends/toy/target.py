"""The fake target session: the match rule over a ToyModel, with a cache that forgives nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, Self

from dflash.backends.toy.model import State, ToyModel, common
from dflash.core.accept import choose, match
from dflash.core.types import Proposal, Request, Verdict


class ToyTarget:
    """TargetSession over a ToyModel. Uses the match rule; its features are its states."""

    def __init__(self, model: ToyModel, chunk: int = 64) -> None:
        """``chunk`` is the most tokens of one prefill verdict."""
        self._model, self._chunk, self._open = model, chunk, True
        self._states = [model.run(())]  # one more than tokens
        self._tokens: list[int] = []  # those run through the model
        self._anchor, self._output, self._base = 0, 0, 0
        self._last: list[int] = []
        self._request = Request((), 0)

    def prefill(self, request: Request, reuse: int) -> Iterator[Verdict[list[State]]]:
        """As the protocol says; ``reuse`` must be something ``holds`` has answered."""
        assert self._open, "the session was closed"
        assert list(request.prompt[:reuse]) == self._tokens[:reuse], "reuse is not held"
        assert reuse < len(request.prompt), "at least one token has to be run"
        self._crop(reuse)
        self._request, self._output = request, 0
        for start in range(reuse, len(request.prompt), self._chunk):
            rows = self._run(request.prompt[start : start + self._chunk])
            if len(self._tokens) < len(request.prompt):
                yield Verdict([], rows=len(rows), features=rows)
                continue
            self._anchor, self._output = (
                choose(self._model.logits(rows[-1]), request.sampling, 0),
                1,
            )
            yield Verdict([self._anchor], rows=len(rows), features=rows)

    def verify(self, proposal: Proposal[Any]) -> Verdict[list[State]]:
        """As the protocol says: one pass over anchor and drafts."""
        assert self._open, "the session was closed"
        drafted = list(proposal.tokens)[: proposal.rows]
        self._base = len(self._tokens)
        rows = self._run([self._anchor, *drafted])
        choices = [
            choose(self._model.logits(row), self._request.sampling, self._output + place)
            for place, row in enumerate(rows)
        ]
        accepted = match(drafted, choices)
        self._last = choices[: accepted + 1]
        kept = rows[: accepted + 1]
        return Verdict(list(self._last), range(accepted), len(drafted), accepted + 1, kept)

    def commit(self, kept: int) -> None:
        """As the protocol says. A wrong count is believed, and spoils the state."""
        assert self._open, "the session was closed"
        self._crop(self._base + kept)
        self._anchor = self._last[kept - 1] if 0 < kept <= len(self._last) else self._anchor
        self._output += kept

    def holds(self, prompt: Sequence[int], most: int) -> int:
        """Any prefix it has run through."""
        return common(self._tokens, prompt, most)

    def fork(self) -> Self:
        """An independent copy."""
        twin = copy(self)
        twin._states, twin._tokens = list(self._states), list(self._tokens)
        return twin

    def close(self) -> None:
        """Every later call but this one fails."""
        self._open = False

    def _run(self, tokens: Sequence[int]) -> list[State]:
        for token in tokens:
            self._states.append(self._model.after(self._states[-1], token))
        self._tokens += tokens
        return self._states[len(self._states) - len(tokens) :]

    def _crop(self, length: int) -> None:
        del self._tokens[length:], self._states[length + 1 :]
