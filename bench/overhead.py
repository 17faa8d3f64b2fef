"""What the adaptive policy takes of a round: plan and observe, without any model.

    python -m bench.overhead --rounds 20000 --pass-ms 30

Scripted rounds whose acceptance changes, so that the policy speculates, falls back and probes; the
share is of the time one pass of the target takes, which a round is never below.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from statistics import median
from time import perf_counter_ns
from typing import Any

from dflash.core.policy import Adaptive
from dflash.core.profile import Profile
from dflash.core.types import Outlook, Step, Verdict


def measure(rounds: int, block_size: int, pass_ns: int) -> list[int]:
    """Nanoseconds of plan and observe, round by round."""
    policy, rng = Adaptive(block_size, Profile()), random.Random(0)
    outlooks, taken = [Outlook(block_size - 1)], []
    for number in range(rounds):
        start = perf_counter_ns()
        plan = policy.plan(block_size, outlooks)
        planned = perf_counter_ns()
        chance = 0.0 if number // 200 % 2 else 0.6  # by turns: a text that suits the draft, or not
        kept = next((n for n in range(plan.rows) if rng.random() > chance), plan.rows)
        verdict: Verdict[Any] = Verdict([0] * (kept + 1), tuple(range(kept)), plan.rows)
        cost = round(pass_ns * (1 + 0.05 * plan.rows + (0.2 if plan.rows else 0.0)))
        step = Step(verdict.tokens, plan, plan.rows, verdict, cost)
        before = perf_counter_ns()
        policy.observe(step)
        taken.append(planned - start + perf_counter_ns() - before)
    return taken


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    flags = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--rounds", type=int, default=20_000)
    flags.add_argument("--block-size", type=int, default=8)
    flags.add_argument("--pass-ms", type=float, default=30.0, help="of one pass of the target")
    given = flags.parse_args(arguments)
    taken = measure(given.rounds, given.block_size, round(given.pass_ms * 1e6))
    middle, worst = median(taken) / 1e3, sorted(taken)[len(taken) * 99 // 100] / 1e3
    share = 100 * sum(taken) / len(taken) / (given.pass_ms * 1e6)
    print(f"{middle:.0f} us a round, 99 % below {worst:.0f} us: {share:.2f} % of a pass on average")


if __name__ == "__main__":
    main()
