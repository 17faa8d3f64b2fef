from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dflash.core.types import Outlook, Plan, Request, Verdict
from dflash.drafts.ngram import BEHIND, GRADES, PLACES, SHORTEST, SINCE, USUAL, NgramDraft


def begun(prompt: list[int], block_size: int = 8) -> NgramDraft:
    draft = NgramDraft(block_size)
    draft.begin(Request(prompt, 10), 0)
    return draft


def proposal(draft: NgramDraft, rows: int) -> list[int]:
    return list(draft.propose(Plan(0, rows, rows)).tokens)


def test_it_continues_what_followed_the_same_tokens() -> None:
    draft = begun([1, 2, 3, 4, 5, 9, 1, 2, 3])
    assert proposal(draft, 3) == [4, 5, 9]
    assert draft.outlook() == Outlook(7, grade=2, prior=USUAL[2])


def test_nothing_familiar_means_nothing_proposed() -> None:
    draft = begun([1, 2, 3, 4])
    assert draft.outlook().most == 0 and draft.propose(Plan(0, 4, 4)).rows == 0
    assert begun([7]).outlook().most == 0


def test_of_several_places_the_one_that_agrees_furthest_back_wins() -> None:
    draft = begun([8, 1, 2, 50, 9, 1, 2, 60, 8, 1, 2])
    assert proposal(draft, 1) == [50]
    newest_of_equals = begun([8, 1, 2, 50, 9, 1, 2, 60, 7, 1, 2])
    assert proposal(newest_of_equals, 1) == [60]


def test_a_loop_is_continued_past_its_end() -> None:
    draft = begun([5, 1, 2, 1, 2, 1, 2])
    assert proposal(draft, 7) == [1, 2, 1, 2, 1, 2, 1]


def test_committed_tokens_are_learned_and_a_cut_verdict_counts_only_what_was_kept() -> None:
    draft = begun([1, 2, 3])
    draft.commit(Verdict(tokens=[], rows=3), 3)
    draft.commit(Verdict(tokens=[4, 1, 2, 99]), 3)
    assert proposal(draft, 2) == [3, 4]


def test_a_fork_goes_its_own_way() -> None:
    draft = begun([1, 2, 3, 1, 2])
    twin = draft.fork()
    twin.commit(Verdict(tokens=[9, 9, 9]), 3)
    assert proposal(draft, 1) == [3] and proposal(twin, 1) == [9]
    draft.close()
    draft.close()
    assert draft.outlook().most == 0


def test_the_grade_grows_with_the_agreement() -> None:
    grades = []
    for length in (2, *GRADES[1:]):
        run = list(range(100, 100 + length))
        grades.append(begun([1, *run, 7, 2, *run]).outlook().grade)
    assert grades == [1, 2, 3, 4, 5]


def test_the_grade_falls_with_the_agreement_of_a_place_that_says_otherwise() -> None:
    run = list(range(100, 120))
    alone = begun([*run, 7, *run])
    doubted = begun([*run[2:], 8, *run, 7, *run])
    agreed = begun([*run[2:], 7, *run, 7, *run])
    assert proposal(alone, 1) == proposal(doubted, 1) == proposal(agreed, 1) == [7]
    assert (alone.outlook().grade, doubted.outlook().grade, agreed.outlook().grade) == (5, 1, 5)
    torn = begun([1, 2, 50, 1, 2, 60, 1, 2])
    assert proposal(torn, 1) == [60] and torn.outlook().grade == 0


def edited(between: list[int], after: int = 0) -> NgramDraft:
    """Ten tokens of a passage are copied, ``between`` comes instead of 10 and ``after`` tokens.

    Then copying goes on with 80, 81, which stands elsewhere too.
    """
    passage = list(range(10)) + [10] * (1 + after) + [80, 81, 82]
    draft = begun([*passage, *range(60, 80), 80, 81, 99])
    draft.commit(Verdict([*range(10), *between, 80, 81]), 12 + len(between))
    return draft


def test_after_an_edit_copying_goes_on_behind_the_passage() -> None:
    assert proposal(begun([*range(10), 10, 80, 81, 82, 80, 81, 99, 55, 80, 81]), 1) == [99]
    assert proposal(edited([55]), 1) == [82], "although another place is newer"
    assert proposal(edited([55, 56, 57]), 1) == [82]
    assert proposal(edited([55], after=3), 1) == [82]
    assert edited([55]).outlook().grade > begun([80, 81, 99, 55, 80, 81]).outlook().grade


def test_a_passage_is_forgotten_after_a_while_and_does_not_reach_far() -> None:
    assert proposal(edited(list(range(40, 42 + SINCE))), 1) == [99]
    assert proposal(edited([55], after=BEHIND + 4), 1) == [99]


def test_copying_taken_up_again_stays_as_sure_as_it_was() -> None:
    draft = edited([55])
    first = draft._match.lead
    draft.commit(Verdict([82]), 1)
    assert draft._match.lead > first


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 12))
def test_a_proposal_is_always_a_continuation_of_an_earlier_occurrence(
    tokens: list[int], rows: int
) -> None:
    draft = begun(tokens, 16)
    found = proposal(draft, rows)
    if not found:
        return
    assert len(found) == rows
    whole, place = tokens + found, draft._match.place
    period = len(tokens) - place
    assert all(whole[i] == whole[i - period] for i in range(len(tokens), len(whole)))
    assert tokens[place - SHORTEST : place] == tokens[-SHORTEST:]


@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), max_size=8),
)
def test_what_it_proposes_depends_on_the_tokens_and_not_on_the_rounds(
    prompt: list[int], rounds: list[list[int]]
) -> None:
    blocks, steps = begun(prompt), begun(prompt)
    for tokens in rounds:
        blocks.commit(Verdict(tokens), len(tokens))
        for token in tokens:
            steps.commit(Verdict([token]), 1)
        assert blocks._match == steps._match and blocks._passage == steps._passage
        assert all(len(places) <= PLACES + 1 for places in blocks._places.values())
