"""Drafting without a model: what followed the last time these tokens stood here.

Prompt lookup (Saxena 2023; transformers' ``prompt_lookup_num_tokens``) with suffix matching: of the
recent places where the last tokens occurred, in prompt or output, the one that agrees furthest
back is continued. A place close behind a passage that was copied until a moment ago counts more:
after an edit, copying goes on there. How far a place can be trusted is its lead over the best one
that is followed by something else. Lists of integers only, so it serves every backend, and its
proposal is one-hot, so the match rule is exact for it at any temperature.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from dflash.core.types import PLAIN, Outlook, Plan, Proposal, Request, Verdict

BLOCK_SIZE = 16  # anchor included: the most that is proposed at once
SHORTEST, LONGEST = 2, 32  # tokens that must and may agree
PLACES = 8  # recent occurrences of one pair of tokens that are compared
PASSAGE = 8  # tokens that must agree for a place to be remembered
BEHIND, SINCE = 8, 16  # how far behind it, and for how many tokens, copying may be taken up again
RETURN = 4  # tokens of agreement that this is worth
GRADES = (1, 3, 5, 9, 17)  # leads where a better survival curve begins
# By grade, the chance that the next, the second next, ... token follows too (docs/LOG.md, what a
# match is worth), a little less than measured: larger models repeat themselves less.
USUAL = (
    (0.28, 0.5, 0.6, 0.7),
    (0.55, 0.68, 0.7, 0.75),
    (0.67, 0.73, 0.78, 0.82),
    (0.82, 0.81, 0.83, 0.86),
    (0.9, 0.9, 0.9, 0.91),
    (0.95, 0.95, 0.95, 0.95),
)


class Match(NamedTuple):
    """A place to go on from."""

    place: int  # where the continuation begins; 0 = nowhere
    worth: int  # how many tokens agree, and what it is worth that it lies behind a passage
    back: int  # the second of these
    lead: int  # worth, less that of the best place that is followed by another token


class Passage(NamedTuple):
    """A place whose tokens were copied until lately."""

    place: int  # where its continuation began; 0 = none
    end: int  # of the text, then
    back: int  # as in the match


NOWHERE, NO_PASSAGE = Match(0, 0, 0, 0), Passage(0, 0, 0)


class NgramDraft:
    """A DraftSession over the tokens of one sequence. It holds no model state, so it resumes
    anywhere."""

    def __init__(self, block_size: int = BLOCK_SIZE) -> None:
        """``block_size`` counts the anchor."""
        self._most = block_size - 1
        self._tokens: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}  # run of SHORTEST -> where it ended
        self._match, self._passage = NOWHERE, NO_PASSAGE

    def holds(self, prompt: Sequence[int], most: int) -> int:  # noqa: ARG002 - the protocol
        """Any prefix: the prompt is read again in `begin`."""
        return most

    def begin(self, request: Request, reuse: int) -> None:  # noqa: ARG002 - the protocol
        """Start over with the prompt's tokens."""
        self.close()
        for token in request.prompt:
            self._add(token)
        self._look()

    def outlook(self) -> Outlook:
        """As deep as may be where the last tokens occurred before; the grade tells how far that
        place is ahead of others."""
        if not self._match.place:
            return Outlook(0)
        grade = sum(self._match.lead >= bound for bound in GRADES)
        return Outlook(self._most, grade, prior=USUAL[grade])

    def propose(self, plan: Plan) -> Proposal[Any]:
        """The continuation; past the end of what is known it goes on with itself, as loops do."""
        place = self._match.place
        if not place or plan.rows == 0:
            return PLAIN
        began = time.perf_counter_ns()
        known = self._tokens[place : place + plan.rows]
        period = len(self._tokens) - place
        while len(known) < plan.rows:
            known.append(known[len(known) - period])
        return Proposal(known, len(known), meta=time.perf_counter_ns() - began)

    def commit(self, verdict: Verdict[Any], rows: int) -> None:
        """Take in the tokens of a finished round; a chunk of the prompt has none."""
        for token in verdict.tokens[:rows]:
            self._add(token)
            self._look()

    def fork(self) -> Self:
        """A copy that goes its own way."""
        twin = type(self)(self._most + 1)
        twin._tokens, twin._match, twin._passage = list(self._tokens), self._match, self._passage
        twin._places = {run: list(places) for run, places in self._places.items()}
        return twin

    def grow(self, capacity: int) -> None:
        """Lists grow by themselves."""

    def close(self) -> None:
        """Forget everything; idempotent."""
        self._tokens, self._places = [], {}
        self._match, self._passage = NOWHERE, NO_PASSAGE

    def _add(self, token: int) -> None:
        self._tokens.append(token)
        if len(self._tokens) >= SHORTEST:
            found = self._places.setdefault(tuple(self._tokens[-SHORTEST:]), [])
            found.append(len(self._tokens))
            del found[: -PLACES - 1]  # one more than compared: the last is the end itself

    def _look(self) -> None:
        """The place of most worth; the newest of equals. A long one becomes the passage."""
        tokens, places = self._tokens, self._places.get(tuple(self._tokens[-SHORTEST:]), [])
        best, backs, worths = 0, dict[int, int](), {0: 0}
        for place in reversed(places[:-1]):
            length = self._agreement(place)
            backs[place] = self._back(place, length)
            worths[place] = length + backs[place]
            if worths[place] > worths[best]:
                best = place
        if not best:
            self._match = NOWHERE
            return
        rivals = [worths[place] for place in backs if tokens[place] != tokens[best]]
        worth, back = worths[best], backs[best]
        self._match = Match(best, worth, back, worth - max(rivals, default=0))
        if worth >= PASSAGE:
            self._passage = Passage(best, len(tokens), back)

    def _back(self, place: int, length: int) -> int:
        """What it is worth that ``place`` lies behind the passage, or goes on with it."""
        moved, since = place - self._passage.place, len(self._tokens) - self._passage.end
        if not self._passage.place or since > SINCE:
            return 0
        if moved == since < length:
            return self._passage.back
        return RETURN if 0 < moved <= since + BEHIND else 0

    def _agreement(self, place: int) -> int:
        """How many tokens before ``place`` equal the last ones, at most LONGEST."""
        end, length = len(self._tokens), 0
        limit = min(place, LONGEST)
        while length < limit and self._tokens[place - 1 - length] == self._tokens[end - 1 - length]:
            length += 1
        return length
