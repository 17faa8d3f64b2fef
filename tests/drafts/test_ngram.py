from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dflash.core.types import Outlook, Plan, Request, Verdict
from dflash.drafts.ngram import GRADES, LONGEST, USUAL, NgramDraft


def begun(prompt: list[int], block_size: int = 8) -> NgramDraft:
    draft = NgramDraft(block_size)
    draft.begin(Request(prompt, 10), 0)
    return draft


def proposal(draft: NgramDraft, rows: int) -> list[int]:
    return list(draft.propose(Plan(0, rows, rows)).tokens)


def test_it_continues_what_followed_the_same_tokens() -> None:
    draft = begun([1, 2, 3, 4, 5, 9, 1, 2, 3])
    assert proposal(draft, 3) == [4, 5, 9]
    assert draft.outlook() == Outlook(7, grade=1, prior=USUAL[1])


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
    for length in (2, *GRADES):
        run = list(range(100, 100 + length))
        grades.append(begun([1, *run, 7, 2, *run]).outlook().grade)
    assert grades == [0, 1, 2, 3, 4]


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 12))
def test_a_proposal_is_always_a_continuation_of_an_earlier_occurrence(
    tokens: list[int], rows: int
) -> None:
    draft = begun(tokens, 16)
    found = proposal(draft, rows)
    if not found:
        return
    assert len(found) == rows
    whole = tokens + found
    period = len(tokens) - draft._match[0]
    assert all(whole[i] == whole[i - period] for i in range(len(tokens), len(whole)))
    length = draft._match[1]
    place = draft._match[0]
    assert 2 <= length <= LONGEST and tokens[place - length : place] == tokens[-length:]
