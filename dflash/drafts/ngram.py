"""Drafting without a model: what followed the last time these tokens stood here.

Prompt lookup (Saxena 2023; transformers' ``prompt_lookup_num_tokens``) with suffix matching: of the
recent places where the last tokens occurred, in prompt or output, the one that agrees furthest
back is continued. Lists of integers only, so it serves every backend, and its proposal is one-hot,
so the match rule is exact for it at any temperature.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Self

from dflash.core.types import PLAIN, Outlook, Plan, Proposal, Request, Verdict

BLOCK_SIZE = 16  # anchor included: the most that is proposed at once
SHORTEST, LONGEST = 2, 32  # tokens that must and may agree
PLACES = 8  # recent occurrences of one pair of tokens that are compared
GRADES = (3, 5, 9, 17)  # match lengths where a better survival curve begins
# By grade, the chance that the next, the second next, ... token follows too (docs/LOG.md, what a
# match is worth), a little less than measured: larger models repeat themselves less.
USUAL = (
    (0.45, 0.6, 0.65, 0.75),
    (0.6, 0.7, 0.75, 0.8),
    (0.75, 0.8, 0.82, 0.85),
    (0.85, 0.87, 0.89, 0.9),
    (0.92, 0.93, 0.94, 0.95),
)


class NgramDraft:
    """A DraftSession over the tokens of one sequence. It holds no model state, so it resumes
    anywhere."""

    def __init__(self, block_size: int = BLOCK_SIZE) -> None:
        """``block_size`` counts the anchor."""
        self._most = block_size - 1
        self._tokens: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}  # run of SHORTEST -> where it ended
        self._match = (0, 0)  # where the continuation begins, how many tokens agree

    def holds(self, prompt: Sequence[int], most: int) -> int:  # noqa: ARG002 - the protocol
        """Any prefix: the prompt is read again in `begin`."""
        return most

    def begin(self, request: Request, reuse: int) -> None:  # noqa: ARG002 - the protocol
        """Start over with the prompt's tokens."""
        self.close()
        self._add(request.prompt)

    def outlook(self) -> Outlook:
        """As deep as may be where the last tokens occurred before; the grade tells how long the
        agreement is."""
        length = self._match[1]
        if length < SHORTEST:
            return Outlook(0)
        grade = sum(length >= bound for bound in GRADES)
        return Outlook(self._most, grade, prior=USUAL[grade])

    def propose(self, plan: Plan) -> Proposal[Any]:
        """The continuation; past the end of what is known it goes on with itself, as loops do."""
        place, length = self._match
        if length < SHORTEST or plan.rows == 0:
            return PLAIN
        began = time.perf_counter_ns()
        known = self._tokens[place : place + plan.rows]
        period = len(self._tokens) - place
        while len(known) < plan.rows:
            known.append(known[len(known) - period])
        return Proposal(known, len(known), meta=time.perf_counter_ns() - began)

    def commit(self, verdict: Verdict[Any], rows: int) -> None:
        """Take in the tokens of a finished round; a chunk of the prompt has none."""
        self._add(verdict.tokens[:rows])

    def fork(self) -> Self:
        """A copy that goes its own way."""
        twin = type(self)(self._most + 1)
        twin._tokens, twin._match = list(self._tokens), self._match
        twin._places = {run: list(places) for run, places in self._places.items()}
        return twin

    def grow(self, capacity: int) -> None:
        """Lists grow by themselves."""

    def close(self) -> None:
        """Forget everything; idempotent."""
        self._tokens, self._places, self._match = [], {}, (0, 0)

    def _add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._tokens.append(token)
            if len(self._tokens) >= SHORTEST:
                found = self._places.setdefault(tuple(self._tokens[-SHORTEST:]), [])
                found.append(len(self._tokens))
                del found[: -PLACES - 1]  # one more than compared: the last is the end itself
        if tokens:
            end = tuple(self._tokens[-SHORTEST:])
            self._match = self._longest(self._places.get(end, [])[:-1])

    def _longest(self, places: Sequence[int]) -> tuple[int, int]:
        """The place that agrees furthest back with the end; the newest of equals."""
        best = (0, 0)
        for place in reversed(places):
            length = self._agreement(place)
            if length > best[1]:
                best = (place, length)
        return best

    def _agreement(self, place: int) -> int:
        """How many tokens before ``place`` equal the last ones, at most LONGEST."""
        end, length = len(self._tokens), 0
        limit = min(place, LONGEST)
        while length < limit and self._tokens[place - 1 - length] == self._tokens[end - 1 - length]:
            length += 1
        return length
