"""The simple rule: a fixed block, given up while too few of its drafts are accepted.

It looks at acceptance alone and knows nothing of costs, so unlike `Adaptive` it promises nothing
about speed. It is the rule of speculative decoders that have a ``min_acceptance_rate``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from dflash.core.costs import CostCurve
from dflash.core.policy import Fixed, State
from dflash.core.types import PLAIN_STEP, Outlook, Plan, Step

WINDOW, LEAST = 32, 16  # drafted tokens that are judged; never fewer than LEAST
WAIT, MOST_WAIT = 8, 128  # plain steps before a probe; doubled by each one in vain


class Floor:
    """A fixed block while at least a share of its drafts is accepted, plain steps while not.

    In fallback it probes with one block at growing intervals. A probe that reaches the rate brings
    the block back, and then counts as the beginning of a new window.
    """

    def __init__(
        self, block_size: int, min_acceptance_rate: float, costs: CostCurve | None = None
    ) -> None:
        """``block_size`` counts the anchor; a rate of 0 never falls back.

        ``costs`` learns what a plain step takes: where it knows nothing yet, the first step is one.
        """
        self.state = State.PREFILL
        self.fallback_rounds = 0  # probes included
        self.fallback_reason: str | None = None  # of the last time
        self._fixed, self._rate, self._costs = Fixed(block_size), min_acceptance_rate, costs
        self._judged: deque[bool] = deque(maxlen=WINDOW)  # drafted tokens, the newest last
        self._wait, self._plain_run = WAIT, 0
        self._fresh = True  # no block yet, so that the next plain step pays for nothing else

    def plan(self, most: int, outlooks: Sequence[Outlook]) -> Plan:
        """The whole block, or a plain step."""
        if self._fresh and self._costs is not None and not self._costs.knows(0, 0):
            return PLAIN_STEP
        if self.state is State.FALLBACK and self._plain_run < self._wait:
            return PLAIN_STEP
        return self._fixed.plan(most, outlooks)

    def observe(self, step: Step) -> None:
        """Judge the drafts of a round."""
        self.fallback_rounds += self.state is State.FALLBACK
        if step.rows:
            self._judge(step.verdict.drafted, len(step.verdict.path))
            self._fresh, self._plain_run = False, 0
        else:
            measured = (self._fresh or self._plain_run) and not step.plan.rows
            if self._costs is not None and measured:
                self._costs.add(0, 0, step.ns)
            self._plain_run += 1
        if step.finish is not None:
            self.state = State.DONE

    def _judge(self, drafted: int, kept: int) -> None:
        probe = self.state is State.FALLBACK
        self._judged.extend(place < kept for place in range(drafted))
        enough = probe or len(self._judged) >= LEAST
        if enough and sum(self._judged) < self._rate * len(self._judged):
            self._wait = min(2 * self._wait, MOST_WAIT) if probe else self._wait
            self.fallback_reason = (
                f"{sum(self._judged)} of the last {len(self._judged)} drafts accepted, and the "
                f"least rate is {self._rate:g}"
            )
            self._judged.clear()  # a probe is judged by itself
            self.state = State.FALLBACK
        else:
            self._wait = self._wait if probe or not enough else WAIT
            self.state = State.SPECULATING
