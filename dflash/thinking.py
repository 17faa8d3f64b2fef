"""A reasoning budget: after so many tokens of reasoning, the mark that ends it is the only choice.

The budget is a constraint like a grammar, so it holds at every place inside a block: a draft that
reasons on is cut where the budget ends, and a draft that closes there is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dflash.core.protocols import Pair
from dflash.errors import ConfigError

BEGIN, END = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a text stands: a state of the walk, small enough to copy for every place of a block."""

    inside: bool
    spent: int = 0  # tokens of reasoning so far
    tail: tuple[int, ...] = ()  # as much of the text as a mark is long
    closing: int = 0  # tokens of the closing mark that are written already, once it is due


class Budget:
    """The Grammar protocol: everything is allowed until the budget is spent."""

    def __init__(
        self, size: int, marks: tuple[Sequence[int], Sequence[int]], most: int, inside: bool
    ) -> None:
        """``size`` of the vocabulary; ``marks`` are the ids that begin and end reasoning; ``most``
        tokens between them; ``inside``: the prompt has begun it."""
        self._begin, self._end = (tuple(mark) for mark in marks)
        self._most = most
        self._place = self._due(_Place(inside))
        self._any = np.ones(size, dtype=bool)

    def allow(self, draft: Sequence[int]) -> NDArray[np.bool_] | None:
        """Mask [V] for the place after the committed tokens and ``draft``; None = out of reach."""
        place = self._place
        for token in draft:
            after = self._after(place, token)
            if after is None:
                return None
            place = after
        if not self._is_due(place):
            return self._any
        only = np.zeros_like(self._any)
        only[self._end[place.closing]] = True
        return only

    def commit(self, tokens: Sequence[int]) -> None:
        """Go on for good by tokens that were chosen under the masks."""
        for token in tokens:
            place = self._after(self._place, token)
            assert place is not None, "a token was committed that the budget forbids"
            self._place = place

    def _after(self, place: _Place, token: int) -> _Place | None:
        if self._is_due(place):
            if token != self._end[place.closing]:
                return None
            left = place.closing + 1
            ended = left == len(self._end)
            return replace(place, inside=not ended, tail=(), closing=0 if ended else left)
        tail = (*place.tail, token)[-max(len(self._begin), len(self._end)) :]
        if not place.inside:
            inside = tail[-len(self._begin) :] == self._begin
            return self._due(replace(place, inside=inside, tail=() if inside else tail))
        if tail[-len(self._end) :] == self._end:
            return replace(place, inside=False, tail=())
        return self._due(replace(place, spent=place.spent + 1, tail=tail))

    def _is_due(self, place: _Place) -> bool:
        return place.inside and place.spent >= self._most

    def _due(self, place: _Place) -> _Place:
        """``place``; a mark the text has begun by itself is only gone on with."""
        if not self._is_due(place):
            return place
        begun = (n for n in range(len(self._end) - 1, 0, -1) if place.tail[-n:] == self._end[:n])
        return replace(place, closing=next(begun, 0))


def budget(pair: Pair, prompt: Sequence[int], most: int) -> Budget:
    """A fresh budget of ``most`` tokens for an answer to ``prompt``.

    Raises ConfigError for a target that does not mark its reasoning with <think> and </think>.
    """
    tokenizer = pair.tokenizer
    marks = [tokenizer.encode(mark) for mark in (BEGIN, END)]
    template = str(getattr(tokenizer, "chat_template", None) or "")
    known = BEGIN in template or END in template or all(len(mark) == 1 for mark in marks)
    if not known:
        raise ConfigError(
            f"thinking_budget needs a target that marks its reasoning with {BEGIN} and {END}; "
            f"{pair.target_name} has neither such tokens nor such a chat template: leave it out"
        )
    return Budget(pair.vocab_size, (marks[0], marks[1]), most, _begun(prompt, *marks))


def _begun(prompt: Sequence[int], begin: Sequence[int], end: Sequence[int]) -> bool:
    """Whether the last mark in ``prompt`` begins reasoning: some templates write it themselves."""

    def last(mark: Sequence[int]) -> int:
        places = range(len(prompt) - len(mark), -1, -1)
        return next((i for i in places if list(prompt[i : i + len(mark)]) == list(mark)), -1)

    return last(begin) > last(end)
