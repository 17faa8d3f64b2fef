"""Toy sessions, plain decoding written down a second time, and policies for tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash.backends.toy import ScriptedDraft, ToyDraft, ToyModel, ToyTarget
from dflash.core.decode import decode
from dflash.core.protocols import Policy
from dflash.core.types import Finish, Outlook, Plan, Request, Step

ANYTHING = ToyModel(vocab_size=12, eos_ids=frozenset(), words=False)


def plain(model: ToyModel, request: Request) -> tuple[list[int], Finish]:
    """What decoding one token at a time says, without the loop under test."""
    tokens: list[int] = []
    for token in model.ahead(request, [], request.max_tokens):
        tokens.append(token)
        if token in request.stop_ids:
            return tokens, Finish.STOP
    return tokens, Finish.LENGTH


def scripted(model: ToyModel, script: Sequence[int] | None = None, most: int = 15) -> ScriptedDraft:
    """A strict toy draft; without a script always right."""
    return ToyDraft(model, model.ahead, script, most)


def ticks() -> Any:
    """A clock that counts its own readings."""
    return iter(range(10**9)).__next__


@dataclass
class Drawn:
    """A policy that follows a list of (draft, rows), as far as it is allowed to."""

    moves: Sequence[tuple[int, int]]
    seen: list[Step] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)

    def plan(self, most: int, outlooks: Sequence[Outlook]) -> Plan:
        """The next move of the list, from the start again at its end."""
        self.asked.append(most)
        draft, rows = self.moves[(len(self.asked) - 1) % len(self.moves)]
        draft %= max(1, len(outlooks))
        rows = min(rows, most, outlooks[draft].most) if outlooks else 0
        return Plan(draft, rows, rows)

    def observe(self, step: Step) -> None:
        """Remember it."""
        self.seen.append(step)


def steps(
    request: Request,
    target: ToyTarget,
    drafts: Sequence[ScriptedDraft],
    policy: Policy,
    reuse: int = 0,
) -> Iterator[Step]:
    """The loop with a clock that only counts; one that does not end is an error."""
    for number, step in enumerate(decode(request, target, drafts, policy, ticks(), reuse)):
        assert number < len(request.prompt) + request.max_tokens + 1, "the loop does not end"
        yield step


def tokens_of(run: Sequence[Step]) -> list[int]:
    """Everything committed."""
    return [token for step in run for token in step.tokens]
