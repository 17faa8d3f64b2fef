"""Successive halving with arms whose speed is known."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest

from dflash.bench.arms import Arm, Run
from dflash.bench.sweep import candidates, sweep

FASTEST = {1: 1.0, 2: 0.8, 3: 0.7, 4: 0.55, 6: 0.6, 8: 0.9}  # seconds a text


class Bench:
    """Arms that use up a clock of their own."""

    def __init__(self, seconds: dict[int, float], ids: Sequence[int] = range(40)) -> None:
        self.now, self.ran, self.ids = 0.0, dict.fromkeys(seconds, 0), tuple(ids)
        self.arms: dict[int, Arm] = {size: self._arm(size, t) for size, t in seconds.items()}

    def clock(self) -> float:
        return self.now

    def _arm(self, size: int, seconds: float) -> Arm:
        def run(prompt: Sequence[int], tokens: int) -> Run:
            self.now += seconds
            self.ran[size] += 1
            return Run(self.ids, 1, 0.0, seconds)

        return run


PROMPTS = [[i] for i in range(40)]


def test_the_fastest_block_is_found_and_the_slow_ones_run_less() -> None:
    bench = Bench(FASTEST)
    found = sweep(bench.arms, PROMPTS, 32, 1000.0, bench.clock)
    assert (found.block_size, found.stopped) == (4, "decided")
    assert found.speedup is not None and found.speedup.value == pytest.approx(1 / 0.55)
    assert found.speedup.low == found.speedup.high, "all texts gain the same"
    assert bench.ran[8] == 3 and bench.ran[4] > bench.ran[2] >= 3
    assert len(found.heats[0].kept) == 2


def test_one_disturbance_does_not_throw_the_best_block_out() -> None:
    bench, calls = Bench(FASTEST), count()
    steady = bench.arms[4]

    def disturbed(prompt: Sequence[int], tokens: int) -> Run:
        run = steady(prompt, tokens)
        return Run(run.ids, 1, 0.0, 9.0 if next(calls) == 1 else run.decode)

    bench.arms[4] = disturbed
    assert sweep(bench.arms, PROMPTS, 32, 1000.0, bench.clock).block_size == 4


def test_plain_decoding_wins_where_nothing_is_faster() -> None:
    bench = Bench({1: 1.0, 2: 1.1, 4: 1.3})
    found = sweep(bench.arms, PROMPTS, 32, 1000.0, bench.clock)
    assert (found.block_size, found.speedup) == (1, None)


def test_it_stops_before_it_would_take_too_long() -> None:
    bench = Bench(FASTEST)
    found = sweep(bench.arms, PROMPTS, 32, 20.0, bench.clock)
    assert found.stopped == "out of time" and found.block_size == 4
    assert found.seconds <= 20.0


def test_a_machine_that_slows_down_is_noticed() -> None:
    bench, calls = Bench(FASTEST), count()
    assert sweep(bench.arms, PROMPTS, 32, 1000.0, bench.clock).noise is None
    steady = bench.arms[1]

    def tiring(prompt: Sequence[int], tokens: int) -> Run:
        run = steady(prompt, tokens)
        return Run(run.ids, 1, 0.0, run.decode * (1.3 if next(calls) % 2 else 1.0))

    bench.arms[1] = tiring
    noise = sweep(bench.arms, PROMPTS, 32, 1000.0, bench.clock).noise
    assert noise is not None and "noisy machine" in noise


def test_it_makes_do_with_the_prompts_there_are() -> None:
    found = sweep(Bench(FASTEST).arms, PROMPTS[:2], 32, 1000.0)
    assert (found.block_size, found.stopped) == (4, "out of prompts")


def test_texts_in_circles_say_nothing() -> None:
    bench = Bench(FASTEST, ids=(1, 2, 3, 4) * 10)
    found = sweep(bench.arms, PROMPTS[:6], 32, 1000.0, bench.clock)
    assert (found.block_size, found.stopped, found.heats) == (1, "out of prompts", ())


def test_candidates_end_at_the_drafts_own_size() -> None:
    assert candidates(8) == [2, 3, 4, 5, 6, 8]
    assert candidates(15)[-2:] == [12, 15]
    assert next(count(1)) not in candidates(8), "plain decoding always runs"


def test_the_interval_of_a_sweep_is_over_its_texts() -> None:
    bench = Bench({1: 1.0, 4: 0.5})

    def uneven(prompt: Sequence[int], tokens: int) -> Run:
        run = bench.arms[4](prompt, tokens)
        return Run(run.ids, run.first, 0.0, 0.4 if prompt[0] % 2 else 0.6)

    found = sweep({1: bench.arms[1], 4: uneven}, PROMPTS, 32, 1000.0, bench.clock)
    assert found.speedup is not None
    assert found.speedup.low < found.speedup.value < found.speedup.high
