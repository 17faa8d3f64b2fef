"""Rejection through the loop: drafts with a q of their own, on the toy, round after round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from dflash.backends.toy import ScriptedDraft, State, ToyModel, ToyTarget
from dflash.core import noise
from dflash.core.accept import distribution, draw
from dflash.core.logits import process
from dflash.core.noise import Stream
from dflash.core.policy import Fixed, Off
from dflash.core.protocols import Policy
from dflash.core.types import Outlook, Plan, Proposal, Request, Sampling, Step
from dflash.verify.sampling import DEPTH, audit
from tests.core.toys import steps, tokens_of


class Remembered(ToyModel):
    """The same rows again and again: they are made once."""

    def logits(self, state: State) -> Any:
        return _row(state)


@cache
def _row(state: State) -> Any:
    return ToyModel.logits(MODEL, state)


MODEL = Remembered(vocab_size=8, eos_ids=frozenset(), words=False)
PROMPT = [3, 1, 4]
SAMPLES = 500  # enough for a fault of the loop; the rules have tests of their own
ROOM = 7  # tokens of a request: more than are looked at, so that no block is cut short


class DrawingDraft(ScriptedDraft):
    """Draws from a slanted copy of the target, and says what it drew from."""

    def __init__(self, slant: float, most: int = 3) -> None:
        super().__init__(MODEL.ahead, MODEL.vocab_size, None, most)
        self._slant = slant

    def propose(self, plan: Plan) -> Proposal[Any]:
        request, sampling = self._request, self._request.sampling
        output = self._history[len(request.prompt) :]
        coins = noise.coins(sampling.seed, sampling.sample, Stream.DRAFT, len(output), plan.rows)
        super().propose(plan)  # its books
        drafted: list[int] = []
        rows = []
        for coin in coins:
            logits = MODEL.logits(MODEL.run([*request.prompt, *output, *drafted]))
            slanted = (1 - self._slant) * logits + self._slant * np.roll(logits, 1)
            row = process(slanted.astype(np.float32), request, output, drafted)
            rows.append(distribution(row, sampling))
            drafted.append(draw(rows[-1], float(coin)))
        return Proposal(drafted, plan.rows, q=np.stack(rows), meta=0)


class Restless:
    """Blocks of changing size, by nothing that was drawn."""

    def __init__(self) -> None:
        self._round = 0

    def plan(self, most: int, outlooks: Sequence[Outlook]) -> Plan:
        self._round += 1
        rows = min(most, (3, 0, 1, 2)[self._round % 4])
        return Plan(0, rows, rows) if rows else Plan()

    def observe(self, step: Step) -> None:
        pass


def run(
    sampling: Sampling,
    slant: float,
    policy: Policy,
    draft: type[DrawingDraft] = DrawingDraft,
) -> Iterator[Step]:
    request = Request(PROMPT, ROOM, sampling=sampling)
    return steps(request, ToyTarget(MODEL), [draft(slant)], policy)


def exact(sampling: Sampling) -> Callable[[tuple[int, ...]], Any]:
    request = Request(PROMPT, ROOM, sampling=sampling)

    def rows(output: tuple[int, ...]) -> Any:
        logits = MODEL.logits(MODEL.run([*PROMPT, *output]))
        return distribution(process(logits, request, output), sampling)

    return rows


WAYS: dict[str, dict[str, Any]] = {
    "rejection": {"rule": "rejection"},
    "block": {"rule": "block"},
    "rejection, filters and penalties": {
        "rule": "rejection",
        "top_k": 6,
        "top_p": 0.95,
        "min_p": 0.02,
        "presence_penalty": 0.7,
        "repetition_penalty": 1.2,
    },
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("make", [lambda: Fixed(4), Restless], ids=["fixed", "restless"])
def test_rounds_follow_the_targets_law(options: dict[str, Any], make: Callable[[], Policy]) -> None:
    accepted = drafted = 0

    def sample(number: int) -> list[int]:
        nonlocal accepted, drafted
        tokens: list[int] = []
        for step in run(Sampling(0.9, seed=number, **options), 0.5, make()):
            accepted, drafted = accepted + step.accepted, drafted + step.verdict.drafted
            tokens += step.tokens
            if len(tokens) >= DEPTH:  # the rest is not judged
                break
        return tokens

    result = audit("loop", sample, exact(Sampling(0.9, **options)), SAMPLES)
    assert result.passed, result
    assert 0.2 < accepted / drafted < 0.95


def test_the_oracle_loses_nothing_and_the_seed_decides_everything() -> None:
    for rule in ("rejection", "block"):
        sampling = Sampling(0.9, rule=rule, seed=5)  # type: ignore[arg-type]
        found = list(run(sampling, 0.0, Fixed(4)))
        assert all(step.accepted == step.rows for step in found if step.rows)
        assert tokens_of(found) == tokens_of(list(run(sampling, 0.0, Fixed(4))))


def test_plain_steps_and_look_ups_follow_the_law_too() -> None:
    sampling = Sampling(0.9, rule="rejection")
    one_hot = ScriptedDraft(MODEL.ahead, MODEL.vocab_size, (1, 0, 3), 3)

    def sample(number: int, policy: Policy) -> list[int]:
        request = Request(PROMPT, 4, sampling=Sampling(0.9, rule="rejection", seed=number))
        return tokens_of(list(steps(request, ToyTarget(MODEL), [one_hot.fork()], policy)))

    for policy in (Off(), Fixed(3)):
        found = audit("plain", lambda n, p=policy: sample(n, p), exact(sampling), SAMPLES)
        assert found.passed, found
