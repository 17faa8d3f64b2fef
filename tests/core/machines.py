"""A simulated machine: what rounds cost and how drafts fare, without a model or a clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from dflash.core.protocols import Policy
from dflash.core.types import Finish, Outlook, Plan, Step, Verdict
from dflash.drafts.ngram import GRADES, USUAL

Chances = Callable[[int, int], float]
"""(token of the output, place in the block) -> chance that the draft is right there."""
Ables = Callable[[int], tuple[int, int]]
"""token of the output -> (deepest proposal, grade); None stands for the block at every token."""


@dataclass(frozen=True)
class Machine:
    """Costs in units of a plain step; ``verify`` holds (rows with the anchor, cost)."""

    verify: Sequence[tuple[int, float]]
    draft: float
    catch_up: float = 0.004  # per context row the draft has not seen
    noise: float = 0.05
    spikes: float = 0.01

    def cost(self, rows: int, lag: int) -> float:
        """A round of ``rows`` drafts, undisturbed."""
        for (low, one), (high, other) in pairwise(self.verify):
            if low <= rows + 1 <= high:
                price = one + (other - one) * (rows + 1 - low) / (high - low)
                break
        return price + (self.draft + self.catch_up * lag if rows else 0.0)

    def disturbed(self, cost: float, rng: random.Random) -> float:
        """The same on a machine that others use too."""
        return cost * rng.lognormvariate(0, self.noise) * (4 if rng.random() < self.spikes else 1)


# Verify curves as measured: prepacked and plain float32 on two cores, Q4 on a CPU, a GPU.
MACHINES = {
    "two cores, packed": Machine(
        [(1, 1.0), (2, 1.15), (4, 1.31), (6, 1.45), (8, 1.5), (16, 2.05), (33, 3.2)], 0.2
    ),
    "two cores, plain": Machine(
        [(1, 1.0), (2, 1.15), (4, 1.56), (6, 1.66), (8, 1.88), (16, 2.12), (33, 3.0)],
        0.25,
    ),
    "four bits on a CPU": Machine(
        [(1, 1.0), (2, 1.5), (4, 2.6), (8, 4.7), (16, 8.5), (33, 17.0)], 0.3
    ),
    "a GPU": Machine([(1, 1.0), (16, 1.1), (33, 1.15)], 0.12, 0.001, 0.02),
}
# Drafts looked up, so for nothing; eight bits on llama.cpp, where two rows cost two single ones.
LOOKED_UP = {
    "two cores, packed": replace(MACHINES["two cores, packed"], draft=0.0, catch_up=0.0),
    "eight bits on a CPU": Machine(
        [(1, 1.0), (2, 1.9), (4, 2.75), (6, 3.4), (8, 3.95), (16, 6.3)], 0.0, 0.0
    ),
}


def steady(*chances: float) -> Chances:
    """The same everywhere; the last chance goes on."""
    return lambda _, place: chances[min(place, len(chances) - 1)]


def changing(length: int, *texts: Chances) -> Chances:
    """One text after the other, ``length`` tokens each."""
    return lambda token, place: texts[token // length % len(texts)](token, place)


TEXTS = {
    "nothing accepted": steady(0.0),
    "hardly anything": steady(0.1),
    "chat": steady(0.38, 0.36, 0.35, 0.33),
    "code": steady(0.45, 0.48, 0.5, 0.5, 0.45),
    "arithmetic": steady(0.55, 0.6, 0.6, 0.58, 0.5),
    "a good draft": steady(0.8, 0.78, 0.76, 0.75),
    "repetitive": steady(0.96),
    "quotes in prose": changing(40, steady(0.1), steady(0.9)),
    "prose, then a list": changing(96, steady(0.15), steady(0.85)),
}


COPIED, OWN = 60, 15  # tokens


def copying(token: int, _: int = 0) -> float:
    """Own words and copied passages in turn: the chance that a look-up is right."""
    return 0.97 if token % (OWN + COPIED) >= OWN else 0.1


def looked_up(token: int) -> tuple[int, int]:
    """Two tokens into a passage a match is found, a longer one further on; by chance elsewhere."""
    inside = token % (OWN + COPIED) - OWN
    if inside >= 2:
        return 15, sum(inside >= length for length in GRADES)
    return (15, 0) if token % 9 == 4 else (0, 0)


@dataclass
class Busy:
    """Others who use the machine now and then, from one request into the next.

    Times in plain steps: between two bursts and in one, on average. ``slower`` is what the clock
    sees of a round in a burst; what the machine would take alone is what a simulation adds up.
    """

    every: float
    lasting: float
    slower: float = 2.0

    def start(self, seed: int) -> None:
        """Idle at first."""
        self._rng = random.Random(seed)
        self._burst, self._left = False, self._rng.expovariate(1 / self.every)

    def during(self, cost: float) -> float:
        """How many times as long a round of ``cost`` takes that begins now."""
        factor = self.slower if self._burst else 1.0
        self._left -= cost
        if self._left <= 0:
            self._burst = not self._burst
            self._left = self._rng.expovariate(1 / (self.lasting if self._burst else self.every))
        return factor


@dataclass
class Simulation:
    """Requests played on a machine; time passes only here."""

    machine: Machine
    chances: Chances
    block_size: int = 8
    seed: int = 0
    lift: float = 0.0  # of what a chain misses at a place, what a large tree catches
    able: Ables | None = None
    busy: Busy | None = None
    prompt: int = 20  # tokens
    lag: int = field(default=0, init=False)
    worst: float = field(default=0.0, init=False)  # of the last run's requests, time per token

    def run(self, make: Callable[[], Policy], requests: int, tokens: int) -> float:
        """Time per token after the first, over all requests."""
        if self.busy is not None:
            self.busy.start(self.seed)
        times = []
        for number in range(requests):
            # the same text and the same disturbances for every policy
            rng = random.Random(f"{self.seed}.{number}")
            times.append(self._request(make(), tokens, rng) / (tokens - 1))
        self.worst = max(times)
        return sum(times) / requests

    def _request(self, policy: Policy, tokens: int, rng: random.Random) -> float:
        luck = [[rng.random() for _ in range(16)] for _ in range(tokens + 16)]
        said, total, self.lag = 1, 0.0, self.prompt
        while said < tokens:
            outlook = self._outlook(said)
            plan = policy.plan(tokens - said - 1, [outlook])
            assert plan.depth <= tokens - said - 1
            accepted = 0
            while accepted < plan.depth:
                chance = self.chances(said + accepted, accepted)
                if plan.is_tree and chance:
                    chance += self.lift * (1 - (3 / plan.rows) ** 0.5) * (1 - chance)
                if luck[said][accepted] >= chance:
                    break
                accepted += 1
            cost = self.machine.cost(plan.rows, self.lag)
            self.lag = accepted + 1 + (0 if plan.rows else self.lag)
            said += accepted + 1
            total += cost
            seen = self.machine.disturbed(cost, rng)
            if self.busy is not None:
                seen *= self.busy.during(cost)
            policy.observe(self._step(plan, accepted, seen, said < tokens))
        return total

    def _outlook(self, said: int) -> Outlook:
        if self.able is None:
            return Outlook(self.block_size - 1, lag=self.lag, tree=64)
        most, grade = self.able(said)
        return Outlook(min(most, self.block_size - 1), grade, prior=USUAL[grade])

    def _step(self, plan: Plan, accepted: int, cost: float, more: bool) -> Step:
        verdict: Verdict[object] = Verdict(
            [0] * (accepted + 1), range(accepted), plan.rows, accepted + 1
        )
        finish = None if more else Finish.LENGTH
        return Step(verdict.tokens, plan, plan.rows, verdict, int(cost * 1e7), finish)
