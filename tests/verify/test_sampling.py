"""The chi-square audit passes the lossless rules and rejects their biased copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import pytest
from numpy.typing import NDArray

from dflash.backends.toy import ToyModel, ToyPair
from dflash.core import accept
from dflash.core.types import Request, Sampling
from dflash.engine import Engine
from dflash.verify.gap import Judge
from dflash.verify.sampling import DEPTH, Audit, audit, drawn_by

Floats = NDArray[np.float64]
Rule = Callable[[Sequence[int], Floats, Floats, Sequence[float]], tuple[int, Floats]]

VOCAB, DRAFTED, SAMPLES = 16, 2, 8_000
TARGET = ToyModel(vocab_size=VOCAB, eos_ids=frozenset(), words=False)
PROMPT = (3, 1, 4)


def without_residual(
    drafted: Sequence[int], p: Floats, q: Floats, coins: Sequence[float]
) -> tuple[int, Floats]:
    """A biased copy: a rejected draft is replaced by any token of the target."""
    accepted, _ = accept.rejection(drafted, p, q, coins)
    return accepted, p[accepted]


def swapped(
    drafted: Sequence[int], p: Floats, q: Floats, coins: Sequence[float]
) -> tuple[int, Floats]:
    """A biased copy: p and q change places."""
    accepted, _ = accept.rejection(drafted, np.vstack([q, p[-1:]]), p[:-1], coins)
    rest = p[accepted] if accepted == len(drafted) else accept.residual(q[accepted], p[accepted])
    return accepted, rest


def too_kind(
    drafted: Sequence[int], p: Floats, q: Floats, coins: Sequence[float]
) -> tuple[int, Floats]:
    """A biased copy: coins are a little too low, so drafts are kept a little too often."""
    return accept.rejection(drafted, p, q, [0.8 * coin for coin in coins])


class Sampler:
    """Propose from q, judge by a rule: the loop on plain numpy."""

    def __init__(self, rule: Rule, temperature: float, slant: float) -> None:
        self._rule, self._rng = rule, np.random.default_rng(7)
        sampling = Sampling(temperature=temperature)

        @cache
        def p(output: tuple[int, ...]) -> Floats:
            return accept.distribution(TARGET.logits(TARGET.run([*PROMPT, *output])), sampling)

        @cache
        def q(output: tuple[int, ...]) -> Floats:
            """The target's logits, turned round as far as ``slant`` says."""
            logits = TARGET.logits(TARGET.run([*PROMPT, *output]))
            other = np.roll(logits, 1)
            return accept.distribution((1 - slant) * logits + slant * other, sampling)

        self.p, self.q = p, q

    def draw(self, number: int) -> list[int]:
        output: tuple[int, ...] = (self._one(self.p(())),)
        while len(output) < DEPTH:
            drafted: tuple[int, ...] = ()
            for _ in range(DRAFTED):
                drafted = (*drafted, self._one(self.q(output + drafted)))
            paths = [output + drafted[:i] for i in range(DRAFTED + 1)]
            p = np.stack([self.p(path) for path in paths])
            q = np.stack([self.q(path) for path in paths[:-1]])
            kept, own = self._rule(drafted, p, q, self._rng.random(DRAFTED))
            output = (*output, *drafted[:kept], self._one(own))
        return list(output)

    def _one(self, distribution: Floats) -> int:
        return int(np.searchsorted(np.cumsum(distribution)[:-1], self._rng.random()))


def judged(rule: Rule, temperature: float = 1.0, slant: float = 0.5) -> Audit:
    sampler = Sampler(rule, temperature, slant)
    return audit("rule", sampler.draw, sampler.p, SAMPLES)


@pytest.mark.parametrize("rule", [accept.rejection, accept.block], ids=["rejection", "block"])
@pytest.mark.parametrize(("temperature", "slant"), [(0.3, 0.5), (1.0, 1.0), (1.5, 0.0)])
def test_lossless_rules_pass(rule: Rule, temperature: float, slant: float) -> None:
    found = judged(rule, temperature, slant)
    assert found.passed
    assert found.p > 1e-3


@pytest.mark.parametrize("rule", [without_residual, swapped, too_kind])
def test_biased_copies_of_the_rule_are_rejected(rule: Rule) -> None:
    found = judged(rule)
    assert not found.passed
    assert found.p < 1e-6
    assert found.positions[0].p > 1e-3, "the first token is the prefill's, and right"


@dataclass(frozen=True)
class Tilted(ToyModel):
    """Something that is nearly the target."""

    def logits(self, state):  # type: ignore[no-untyped-def]
        logits = super().logits(state)
        logits[::2] += 0.25
        return logits


def engine(model: ToyModel = TARGET, script: Sequence[int] | None = (1, 0, 3)) -> Engine:
    return Engine(ToyPair(model, draft_name="toy:test", script=script, draft_block_size=4))


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("script", [(1, 0, 3), (0,)], ids=["sometimes", "never"])
def test_samples_of_the_engine_pass(
    seed: int | None, script: Sequence[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = iter(range(10_000, 20_000))
    monkeypatch.setattr("secrets.randbits", lambda bits: next(fixed))
    settings = {"temperature": 0.8, "top_k": 8, "seed": seed, "block_size": 4}
    with engine(script=script) as running:
        exact = partial(Judge(running, settings).exact, PROMPT)
        found = audit("engine", drawn_by(running, PROMPT, settings), exact, 800)
    assert found.passed
    assert found.positions[0].draws == 800
    assert found.positions[1].prefixes > 1


def test_samples_of_a_slightly_other_model_are_rejected() -> None:
    settings = {"temperature": 1.0, "seed": 0, "block_size": 4}
    with engine(Tilted(VOCAB, frozenset(), words=False)) as running:
        exact = partial(Judge(engine(), settings).exact, PROMPT)
        found = audit("engine", drawn_by(running, PROMPT, settings), exact, 2000)
    assert not found.passed


def test_a_seeded_audit_counts_the_seed_up_and_looks_into_whole_blocks() -> None:
    with engine(script=None) as running:
        draw = drawn_by(running, PROMPT, {"temperature": 1.0, "seed": 40, "block_size": 4})
        for number in (0, 1, 5):
            own = TARGET.ahead(
                Request(PROMPT, 8, sampling=Sampling(temperature=1.0, seed=40 + number)), (), 5
            )
            assert list(draw(number)) == own, "the first token, then a block that was kept whole"


def test_too_few_draws_of_a_prefix_say_nothing() -> None:
    found = audit("short", lambda number: [number % 16, 0, 0], lambda _: np.full(16, 1 / 16), 160)
    assert [position.prefixes for position in found.positions] == [1, 0, 0]
    assert found.passed and found.freedom == 15
    assert found.to_json()["positions"][0]["draws"] == 160
