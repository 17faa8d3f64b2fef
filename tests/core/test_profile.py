"""Costs and survival: estimates that a few disturbed rounds do not spoil."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.core.costs import CostCurve
from dflash.core.profile import Profile, Survival


def curve(*rounds: tuple[int, float]) -> CostCurve:
    found = CostCurve()
    for rows, ns in rounds:
        found.add(0, rows, ns)
    return found


class TestCosts:
    def test_between_two_sizes_it_is_a_straight_line(self) -> None:
        assert curve((0, 10), (2, 20), (6, 40)).curve(0, 6) == [10, 15, 20, 25, 30, 35, 40]

    def test_past_the_last_size_the_last_line_goes_on_at_half_its_slope(self) -> None:
        assert curve((0, 10), (2, 20), (4, 24)).cost(0, 8) == pytest.approx(28)

    def test_a_clock_that_stood_still_divides_nothing_by_zero(self) -> None:
        assert curve((0, 0), (3, 0)).curve(0, 3) == [1, 1, 1, 1]

    def test_one_size_beside_the_plain_step_is_enough(self) -> None:
        assert curve((0, 10), (4, 18)).cost(0, 2) == pytest.approx(14)

    def test_fewer_rows_never_cost_more_than_more_rows(self) -> None:
        disturbed = curve((0, 10), (2, 90), (4, 20))
        assert disturbed.cost(0, 2) == 20
        assert disturbed.cost(0, 3) == 20

    def test_no_block_is_cheaper_than_a_plain_step(self) -> None:
        assert curve((0, 10), (4, 7)).cost(0, 4) == 10

    def test_a_slow_first_call_counts_until_the_second(self) -> None:
        found = curve((0, 900))
        assert found.plain() == 900
        found.add(0, 0, 10)
        assert found.plain() == 10

    def test_disturbed_rounds_do_not_move_the_median(self) -> None:
        assert curve((0, 10), (0, 11), (0, 500), (0, 10), (0, 700)).plain() == 11

    def test_it_follows_a_machine_that_becomes_slower(self) -> None:
        found = curve(*[(0, 10.0)] * 20)
        for _ in range(6):
            found.add(0, 0, 20)
        assert found.plain() * found.pace == 20

    def test_a_machine_that_slows_down_at_a_turn_changes_no_ratio(
        self,
    ) -> None:
        found = curve(*[*[(0, 10.0)] * 3, *[(4, 18.0)] * 3] * 3)
        for ns in (20.0, 20.0, 20.0, 20.0):  # a run of plain steps begins, in a busy minute
            found.add(0, 0, ns)
        assert found.plain() == 10, "what a few rounds say against many is no cost"
        for ns in (20.0, 20.0, 20.0):
            found.add(0, 0, ns)
        assert found.pace == 2
        found.add(0, 4, 36)  # as slow as the plain steps before it
        assert (found.plain(), found.cost(0, 4)) == (10, 18)

    def test_a_block_is_compared_with_the_plain_steps_before_it(self) -> None:
        found = curve(*[(0, 10.0)] * 4, *[(0, 20.0)] * 5)
        for _ in range(3):
            found.add(0, 4, 36)
        assert found.cost(0, 4) / found.plain() == pytest.approx(1.8)

    def test_a_size_measured_once_costs_no_more_than_those_measured_twice_say(self) -> None:
        found = curve((0, 10), (4, 18), (4, 18), (8, 90), (2, 12))
        assert (found.cost(0, 2), found.cost(0, 8)) == (12, 22), "half the slope past the last"
        found.add(0, 8, 80)
        assert found.cost(0, 8) == 80

    def test_before_any_was_measured_twice_it_is_no_dearer_than_blocks_are(self) -> None:
        found = curve((0, 10), (4, 90))
        assert found.cost(0, 4) == 34
        found.add(0, 4, 80)
        assert found.cost(0, 4) == 80

    def test_what_it_reads_again_is_believed(self) -> None:
        found = CostCurve.from_json([[-1, 0, 10], [0, 4, 90]])
        assert (found.plain(), found.cost(0, 4), found.seen(0)) == (10, 90, 2)
        found.add(0, 4, 30)
        assert found.cost(0, 4) == 30, "the machine is calmer now"

    def test_it_writes_nothing_that_it_does_not_believe(self) -> None:
        found = curve((0, 10), (0, 10), (4, 18), (4, 18), (2, 70))
        assert sorted(found.to_json()) == [[-1, 0, 10], [0, 2, 14], [0, 4, 18]]

    def test_it_writes_no_draft_and_no_plain_step_that_was_measured_only_once(self) -> None:
        assert curve((0, 90)).to_json() == []
        assert curve((0, 10), (0, 10), (4, 300)).to_json() == [[-1, 0, 10]]
        assert CostCurve.from_json([[0, 4, 300]]).to_json() == [], "of a file without plain steps"

    def test_what_it_writes_is_what_rounds_take_now(self) -> None:
        found = curve((0, 10.0), (0, 10.0), *[(4, 18.0)] * 2, *[(0, 10.0)] * 3, *[(0, 20.0)] * 5)
        assert sorted(found.to_json()) == [[-1, 0, 20], [0, 4, 36]]

    def test_drafts_have_curves_of_their_own_and_share_the_plain_step(self) -> None:
        found = curve((0, 10), (4, 18))
        found.add(1, 4, 30)
        found.add(1, 0, 10)
        assert (found.cost(0, 4), found.cost(1, 4), found.cost(1, 0)) == (18, 30, 10)
        assert (found.seen(0), found.seen(1), found.seen(2)) == (1, 1, 0)

    @given(st.dictionaries(st.integers(1, 16), st.floats(1, 100), min_size=1), st.floats(1, 100))
    def test_the_curve_rises(self, sizes: dict[int, float], plain: float) -> None:
        found = curve((0, plain), *sizes.items()).curve(0, 20)
        assert found[0] == plain
        assert all(high >= low - 1e-9 for low, high in pairwise(found))
        assert len(found) >= 21


class TestSurvival:
    def test_nothing_seen_is_the_prior_and_its_last_place_goes_on(self) -> None:
        assert Survival([0.6, 0.4]).chances(4) == pytest.approx([0.6, 0.4, 0.4, 0.4])

    def test_committed_adds_up_the_chances_of_getting_so_far(self) -> None:
        assert Survival([0.5]).committed(3) == pytest.approx([1, 1.5, 1.75, 1.875])

    def test_it_learns_what_it_sees(self) -> None:
        found = Survival([0.5])
        for _ in range(100):
            found.add(4, 2)
        first, second, third, _ = found.chances(4)
        assert first > 0.75
        assert second > 0.75
        assert third < 0.35

    def test_places_never_judged_follow_those_that_were(self) -> None:
        good, bad = Survival([0.5]), Survival([0.5])
        for _ in range(20):
            good.add(1, 1)
            bad.add(1, 0)
        assert good.chances(5)[4] > 0.6 > 0.4 > bad.chances(5)[4]

    def test_old_rounds_fade(self) -> None:
        found = Survival([0.5], weight=1.0)
        for _ in range(100):
            found.add(1, 1)
        for _ in range(30):
            found.add(1, 0)
        assert found.chances(1)[0] < 0.2

    def test_relaxed_it_is_nearer_to_the_prior(self) -> None:
        found = Survival([0.5])
        for _ in range(50):
            found.add(2, 0)
        before = found.chances(1)[0]
        found.relax(0.1)
        assert before < found.chances(1)[0] < 0.5

    @given(
        st.lists(st.floats(0, 1), max_size=5),
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30),
    )
    def test_chances_are_chances_and_more_rows_never_commit_less(
        self, prior: list[float], rounds: list[tuple[int, int]]
    ) -> None:
        found = Survival(prior)
        for judged, kept in rounds:
            found.add(judged, min(judged, kept))
        assert all(0 <= chance <= 1 for chance in found.chances(12))
        gains = found.committed(12)
        assert len(found.chances(12)) == 12
        assert gains == sorted(gains)
        assert gains[0] == 1


class TestProfile:
    def test_a_new_pair_starts_from_what_its_card_says(self) -> None:
        assert Profile([0.7, 0.5]).usual(0, 0).chances(2) == pytest.approx([0.7, 0.5])

    def test_drafts_and_grades_are_kept_apart(self) -> None:
        profile = Profile()
        for _ in range(200):
            profile.usual(0, 1).add(3, 3)
        assert profile.usual(0, 1).chances(1)[0] > 0.8
        assert profile.usual(0, 0).chances(1) == profile.usual(1, 1).chances(1) == [0.5]

    def test_it_survives_a_file(self) -> None:
        profile = Profile([0.7])
        for rows, ns in ((0, 10), (0, 12), (3, 20), (3, 20)):
            profile.costs.add(0, rows, ns)
        profile.usual(0, 2).add(3, 1)
        again = Profile.from_json(json.loads(json.dumps(profile.to_json())))
        assert again.costs.curve(0, 6) == profile.costs.curve(0, 6)
        assert again.usual(0, 2).chances(5) == pytest.approx(profile.usual(0, 2).chances(5))


class TestRefreshing:
    def rounds(self, profile: Profile, gain: float) -> int:
        """Rounds with drafts until a plain step is due."""
        return next(count for count in range(1, 999) if profile.outdated(gain))

    def test_a_new_pair_is_checked_early_and_then_less_and_less(self) -> None:
        profile, found = Profile(), []
        for _ in range(7):
            found.append(self.rounds(profile, 9.0))
            profile.refresh()
        assert found == [9, 17, 33, 65, 129, 217, 217]

    def test_near_break_even_a_plain_step_costs_little(self) -> None:
        profile = Profile.from_json(Profile().to_json())
        assert self.rounds(profile, 0.0) == 25

    def test_rounds_without_drafts_are_no_check(self) -> None:
        profile = Profile()
        for _ in range(9):
            profile.refresh()
        assert self.rounds(profile, 9.0) == 9


def test_what_catching_up_costs_takes_more_than_one_disturbed_block() -> None:
    found = Profile().catch_up(0)
    found.add(0.5)
    assert found.typical == 0
    for cost in (0.004, 0.003, 0.005):
        found.add(cost)
    assert found.typical == 0.004
