"""Metrics on hand-made rounds: what each number counts, and what it divides by."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.backends.toy import ToyTarget
from dflash.core.policy import Fixed
from dflash.core.stats import Recorder, Stats
from dflash.core.types import Finish, Plan, Request, Step, Verdict
from tests.core.toys import ANYTHING, plain, scripted, steps

MS = 1_000_000


def prefill(tokens: int = 1, ms: int = 10) -> Step:
    return Step([0] * tokens, Plan(), 0, Verdict([0] * tokens, rows=5), ms * MS)


def round_of(
    drafted: int,
    accepted: int,
    *,
    kept: int | None = None,
    ms: int = 2,
    ns: tuple[int, int] = (-1, -1),
) -> Step:
    tokens = list(range(accepted + 1))
    verdict: Verdict[object] = Verdict(tokens, range(accepted), drafted, accepted + 1, ns=ns)
    finish = None if kept is None else Finish.STOP
    plan = Plan(0, drafted, drafted)
    return Step(tokens[:kept], plan, drafted, verdict, ms * MS, finish)


def stats(*run: Step) -> Stats:
    recorder = Recorder(5, backend="toy", policy="fixed", block_size=4, clamped_from=9)
    for step in run:
        recorder.add(step)
    return recorder.stats()


def test_script_of_three_at_block_sixteen_is_a_ratio_of_a_fifth_and_four_tokens_a_pass() -> None:
    found = stats(prefill(), *[round_of(15, 3)] * 8)
    assert found.acceptance_rate == pytest.approx(3 / 15)
    assert found.mean_committed == 4
    assert found.acceptance_by_position == (1, 1, 1, *[0] * 12)
    assert found.histogram == (0, 0, 0, 8, *[0] * 12)


def test_the_token_of_the_prefill_is_in_the_output_and_in_no_rate() -> None:
    found = stats(prefill(ms=50), round_of(3, 1, ms=4), round_of(3, 0, ms=2))
    assert found.completion_tokens == 1 + 2 + 1
    assert found.rounds == 2
    assert found.mean_committed == 1.5
    assert found.time_to_first_token == pytest.approx(0.05)
    assert found.tokens_per_second == pytest.approx(3 / 0.006)


def test_chunks_of_a_long_prompt_count_towards_the_first_token() -> None:
    found = stats(prefill(0, 10), prefill(0, 10), prefill(1, 5), round_of(0, 0))
    assert found.time_to_first_token == pytest.approx(0.025)
    assert found.rounds == 1


def test_plain_rounds_count_as_passes_and_as_nothing_drafted() -> None:
    found = stats(prefill(), round_of(3, 3), round_of(0, 0), round_of(0, 0))
    assert (found.rounds, found.drafted, found.accepted) == (3, 3, 3)
    assert found.mean_committed == 2
    assert found.acceptance_rate == 1
    assert found.histogram == (2, 0, 0, 1)


def test_blocks_of_several_sizes_are_each_judged_by_what_was_drafted() -> None:
    found = stats(prefill(), round_of(2, 2), round_of(4, 1), round_of(1, 0))
    assert found.acceptance_by_position == (2 / 3, 1 / 2, 0, 0)
    assert found.acceptance_rate == pytest.approx(3 / 7)
    assert found.mean_committed == pytest.approx(6 / 3)


def test_what_a_stop_cuts_off_was_not_accepted() -> None:
    found = stats(prefill(), round_of(7, 5, kept=2))
    assert (found.drafted, found.accepted, found.completion_tokens) == (7, 2, 3)
    assert found.mean_committed == 2


def test_a_draft_that_gives_fewer_rows_is_judged_by_those() -> None:
    verdict: Verdict[object] = Verdict([1, 2], range(1), drafted=2, rows=2)
    found = stats(prefill(), Step([1, 2], Plan(0, 7, 7), 2, verdict, MS))
    assert found.drafted == 2
    assert found.acceptance_by_position == (1, 0)


def test_nodes_of_a_tree_count_as_drafted_and_its_depth_as_positions() -> None:
    verdict: Verdict[object] = Verdict([1, 2, 3], (0, 4), drafted=10, rows=3)
    found = stats(prefill(), Step([1, 2, 3], Plan(0, 10, 4), 10, verdict, MS))
    assert (found.drafted, found.accepted) == (10, 2)
    assert found.acceptance_by_position == (1, 1, 0, 0)


def test_phase_times_are_sums_in_seconds() -> None:
    found = stats(prefill(), round_of(3, 1, ns=(MS, 4 * MS)), round_of(3, 1, ns=(MS, 2 * MS)))
    assert found.draft_seconds == pytest.approx(0.002)
    assert found.verify_seconds == pytest.approx(0.006)


def test_one_round_of_unknown_phases_makes_the_sums_unknown() -> None:
    found = stats(prefill(), round_of(3, 1, ns=(MS, MS)), round_of(3, 1), round_of(3, 1, ns=(1, 1)))
    assert found.draft_seconds is None
    assert found.verify_seconds is None


def test_nothing_decoded_gives_zeros_and_no_division() -> None:
    for run in ([], [prefill()], [prefill(0)]):
        found = stats(*run)
        assert (found.rounds, found.mean_committed, found.acceptance_rate) == (0, 0.0, 0.0)
        assert (found.tokens_per_second, found.histogram) == (0.0, ())


def test_it_says_the_conditions_it_was_told() -> None:
    found = stats(prefill())
    assert (found.prompt_tokens, found.backend, found.policy) == (5, "toy", "fixed")
    assert (found.block_size, found.clamped_from) == (4, 9)


def test_json_has_every_field_and_only_plain_types() -> None:
    found = stats(prefill(), round_of(3, 1)).to_json()
    assert json.loads(json.dumps(found)) == found
    assert set(found) == set(Stats.__dataclass_fields__)
    assert found["acceptance_by_position"] == [1, 0, 0]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 16), st.integers(0, 50))
def test_the_sums_agree_with_each_other_and_with_the_text(
    script: list[int], block_size: int, limit: int
) -> None:
    request = Request([1, 2, 3], limit)
    recorder = Recorder(3)
    for step in steps(
        request, ToyTarget(ANYTHING), [scripted(ANYTHING, script)], Fixed(block_size)
    ):
        recorder.add(step)
    found = recorder.stats()
    assert found.completion_tokens == len(plain(ANYTHING, request)[0]) == limit
    assert sum(found.histogram) == found.rounds
    assert sum(place * rounds for place, rounds in enumerate(found.histogram)) == found.accepted
    assert found.mean_committed * found.rounds == pytest.approx(found.accepted + found.rounds)
    assert found.acceptance_rate * found.drafted == pytest.approx(found.accepted)
    assert all(0 <= rate <= 1 for rate in found.acceptance_by_position)


def test_acceptance_by_position_is_also_told_given_the_one_before() -> None:
    found = stats(prefill(), round_of(3, 3), round_of(3, 1), round_of(3, 0), round_of(1, 1))
    assert found.acceptance_by_position == pytest.approx((3 / 4, 1 / 3, 1 / 3))
    assert found.conditional_acceptance == pytest.approx((3 / 4, 1 / 2, 1))


def test_a_mean_over_tokens_and_one_over_rounds_stand_side_by_side() -> None:
    found = stats(prefill(), round_of(1, 1), round_of(15, 0), round_of(0, 0))
    assert found.acceptance_rate == pytest.approx(1 / 16)
    assert found.macro_acceptance_rate == pytest.approx(1 / 2)


def test_time_in_neither_draft_nor_verify_is_the_hosts() -> None:
    found = stats(prefill(), round_of(3, 1, ms=8, ns=(MS, 4 * MS)), round_of(0, 0, ns=(0, MS)))
    assert found.host_seconds == pytest.approx(0.004)
    assert stats(prefill(), round_of(3, 1)).host_seconds is None


def test_the_sizes_of_the_blocks_that_ran_are_counted_with_their_anchor() -> None:
    found = stats(prefill(), round_of(3, 1), round_of(0, 0), round_of(3, 0), round_of(7, 7))
    assert found.block_sizes == ((1, 1), (4, 2), (8, 1))
