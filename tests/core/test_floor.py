"""The simple rule: when it gives a block up, when it tries again, and that no text changes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dflash.backends.toy import ToyTarget
from dflash.core.costs import CostCurve
from dflash.core.decode import decode
from dflash.core.floor import LEAST, MOST_WAIT, WAIT, Floor
from dflash.core.policy import State
from dflash.core.types import Finish, Outlook, Plan, Request, Step, Verdict
from tests.core.toys import ANYTHING, plain, scripted, ticks, tokens_of

ABLE = [Outlook(15)]


def play(policy: Floor, kept: int, ns: int = 10, finish: Finish | None = None) -> Plan:
    """One round: ``kept`` drafts are right if any are drafted."""
    plan = policy.plan(99, ABLE)
    path = range(min(kept, plan.rows))
    verdict: Verdict[object] = Verdict([0] * (len(path) + 1), path, plan.rows, len(path) + 1)
    policy.observe(Step(verdict.tokens, plan, plan.rows, verdict, ns, finish))
    return plan


def rounds(policy: Floor, kept: int, count: int) -> list[int]:
    return [play(policy, kept).rows for _ in range(count)]


def test_it_speculates_while_enough_is_accepted() -> None:
    policy = Floor(5, 0.5)
    assert policy.state is State.PREFILL
    assert rounds(policy, 2, 50) == [4] * 50
    assert policy.state is State.SPECULATING


def test_it_never_judges_fewer_than_sixteen_drafts() -> None:
    policy = Floor(5, 0.5)
    assert rounds(policy, 0, LEAST // 4) == [4] * (LEAST // 4)
    assert policy.state is State.FALLBACK
    assert play(policy, 0).rows == 0


def test_it_judges_the_last_thirty_two_drafts() -> None:
    policy = Floor(5, 0.5)
    rounds(policy, 4, 100)  # long ago
    asked = rounds(policy, 0, 6)
    assert asked == [4] * 5 + [0], "16 right ones of 32 reach one half, 12 do not"


def test_probes_in_vain_become_rarer_and_never_end() -> None:
    policy = Floor(5, 0.3)
    asked = rounds(policy, 0, 2000)[LEAST // 4 :]
    probes = [place for place, rows in enumerate(asked) if rows]
    gaps = [later - sooner - 1 for sooner, later in pairwise(probes)]
    assert probes[0] == WAIT
    assert gaps[:3] == [2 * WAIT, 4 * WAIT, 8 * WAIT]
    assert max(gaps) == gaps[-1] == MOST_WAIT


def test_a_probe_that_reaches_the_rate_brings_the_block_back() -> None:
    policy = Floor(5, 0.5)
    rounds(policy, 0, LEAST // 4 + WAIT)
    assert policy.state is State.FALLBACK
    assert play(policy, 2).rows == 4
    assert policy.state is State.SPECULATING
    assert rounds(policy, 2, 20) == [4] * 20


def test_a_lucky_probe_does_not_make_the_next_one_sooner() -> None:
    policy = Floor(5, 0.5)
    rounds(policy, 0, LEAST // 4 + WAIT)
    assert play(policy, 0).rows == 4, "in vain: the next probe is twice as far"
    rounds(policy, 0, 2 * WAIT)
    assert play(policy, 4).rows == 4
    assert rounds(policy, 0, 3) == [4] * 3, "the lucky probe's drafts are part of the window"
    assert policy.state is State.FALLBACK
    assert rounds(policy, 0, 2 * WAIT + 1) == [0] * 2 * WAIT + [4]


def test_a_rate_of_nothing_never_falls_back_and_of_everything_does_on_one_miss() -> None:
    assert rounds(Floor(3, 0.0), 0, 50) == [2] * 50
    policy = Floor(9, 1.0)
    assert rounds(policy, 8, 10) == [8] * 10
    assert play(policy, 7).rows == 8
    assert policy.state is State.FALLBACK


def test_the_end_is_a_state_too() -> None:
    policy = Floor(5, 0.5)
    play(policy, 1, finish=Finish.STOP)
    assert policy.state is State.DONE


def test_the_first_step_of_a_pair_measures_plain_decoding_once() -> None:
    costs = CostCurve()
    assert play(Floor(5, 0.5, costs), 4, ns=30).rows == 0
    assert costs.plain() == 30
    policy = Floor(5, 0.9, costs)
    asked = [play(policy, 0, ns=70).rows for _ in range(LEAST // 4 + 1)]
    assert asked == [4] * (LEAST // 4) + [0]
    assert costs.plain() == 30, "the first step after a block may pay for what the block put off"
    play(policy, 0, ns=70)
    play(policy, 0, ns=70)
    assert costs.plain() == 70


def test_a_draft_that_says_nothing_after_all_takes_time_that_is_no_plain_steps() -> None:
    costs = CostCurve()
    policy = Floor(5, 0.5, costs)
    play(policy, 0, ns=30)
    for _ in range(9):
        plan = policy.plan(99, ABLE)
        assert plan.rows == 4
        nothing: Verdict[object] = Verdict([0], rows=1)
        policy.observe(Step([0], plan, 0, nothing, 70, None))
    assert costs.plain() == 30


def test_a_draft_with_nothing_to_say_is_a_plain_step_and_no_verdict() -> None:
    policy = Floor(5, 0.5)
    assert policy.plan(9, [Outlook(0)]) == Plan()
    assert policy.plan(0, ABLE) == Plan()


@given(
    st.integers(1, 16),
    st.floats(0, 1),
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.integers(0, 90),
)
def test_the_text_is_that_of_plain_decoding(
    block_size: int, rate: float, script: list[int], limit: int
) -> None:
    asked = Request([3, 1, 4], limit)
    policy = Floor(block_size, rate, CostCurve())
    found = list(decode(asked, ToyTarget(ANYTHING), [scripted(ANYTHING, script)], policy, ticks()))
    assert tokens_of(found) == plain(ANYTHING, asked)[0]


def test_rounds_in_fallback_are_counted_and_their_reason_is_told() -> None:
    policy = Floor(5, 0.5)
    rounds(policy, 0, 8)
    assert policy.fallback_rounds == 4
    assert policy.fallback_reason == "0 of the last 16 drafts accepted, and the least rate is 0.5"
    whole = Floor(5, 0.5)
    rounds(whole, 4, 8)
    assert (whole.fallback_rounds, whole.fallback_reason) == (0, None)
