"""What options do to logits: each by its own words, and all of them at every place of a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.backends.toy import ToyTarget
from dflash.core.accept import choose, distribution
from dflash.core.logits import Bans, banned, changes_logits, logprob, process
from dflash.core.policy import Fixed
from dflash.core.types import Finish, Request, Sampling
from dflash.errors import ConfigError
from tests.core.toys import ANYTHING, plain, scripted, steps, tokens_of

LOGITS = np.array([2.0, -1.0, 0.5, 3.0, -2.0, 1.0], np.float32)


def asked(prompt: Sequence[int] = (0, 1), **options: Any) -> Request:
    return Request(list(prompt), 20, frozenset({5}), Sampling(**options))


def after(output: Sequence[int], **options: Any) -> list[float]:
    found: list[float] = process(LOGITS, asked(**options), output).tolist()
    return found


def test_without_options_nothing_changes() -> None:
    assert not changes_logits(asked(temperature=0.7, top_k=3, top_p=0.9, min_p=0.1, logprobs=2))
    assert after([3, 3]) == LOGITS.tolist()


def test_repetition_penalty_divides_what_is_above_zero_and_multiplies_the_rest() -> None:
    assert after([3], repetition_penalty=2.0) == [1.0, -2.0, 0.5, 1.5, -2.0, 1.0]


def test_presence_counts_once_and_frequency_each_time_and_the_prompt_never() -> None:
    assert after([3, 3, 2], presence_penalty=0.5) == [2.0, -1.0, 0.0, 2.5, -2.0, 1.0]
    assert after([3, 3, 2], frequency_penalty=0.5) == [2.0, -1.0, 0.0, 2.0, -2.0, 1.0]


def test_a_bias_is_added_after_the_penalties() -> None:
    found = after([3], repetition_penalty=2.0, logit_bias=((3, 10.0), (4, -1.0)))
    assert found == [1.0, -2.0, 0.5, 11.5, -3.0, 1.0]


def test_no_run_of_tokens_occurs_twice_also_across_the_end_of_the_prompt() -> None:
    assert banned(Sampling(no_repeat_ngram=2), [0, 1, 2, 0]) == {1}
    assert banned(Sampling(no_repeat_ngram=3), [0, 1, 2, 0, 1]) == {2}
    assert banned(Sampling(no_repeat_ngram=1), [0, 1]) == {0, 1}
    assert banned(Sampling(no_repeat_ngram=3), [0, 1]) == set()
    assert after([0], no_repeat_ngram=2)[1] == -np.inf


def test_a_bad_word_may_begin_and_not_end() -> None:
    words = ((3,), (1, 2), (9, 9, 4))
    assert banned(Sampling(bad_words=words), [0, 1]) == {3, 2}
    assert banned(Sampling(bad_words=words), [9, 9]) == {3, 4}
    assert banned(Sampling(bad_words=words), []) == {3}


def test_stop_ids_wait_for_min_tokens() -> None:
    assert after([1, 1], min_tokens=3)[5] == -np.inf
    assert after([1, 1], min_tokens=2)[5] == 1.0


def test_processors_run_in_turn_on_ids_of_prompt_and_output_before_what_is_forbidden() -> None:
    seen: list[list[int]] = []

    def note(ids: list[int], row: Any) -> Any:
        seen.append(ids)
        return row + 1

    def double(ids: list[int], row: Any) -> Any:
        return row * 2

    found = after([3], processors=(note, double), bad_words=((0,),), logit_bias=((2, 1.0),))
    assert seen == [[0, 1, 3]]
    assert found == [-np.inf, 0.0, 5.0, 8.0, -2.0, 4.0]


@pytest.mark.parametrize(
    ("made", "words"),
    [("x", "it returned str"), (np.full(6, np.nan), "NaN or infinity"), (LOGITS + np.inf, "NaN")],
)
def test_a_processor_that_makes_no_logits_is_told(made: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        after([], processors=(lambda ids, row: made,))


def test_a_processor_is_not_blamed_for_logits_that_were_broken_before() -> None:
    broken = np.full(6, np.nan, np.float32)
    found = process(broken, asked(processors=(lambda ids, row: row,)), [])
    assert np.isnan(found[:5]).all()


def test_a_processor_that_loses_logits_is_told() -> None:
    with pytest.raises(ConfigError, match=r"must return 6 logits.*\(2,\)"):
        after([], processors=(lambda ids, row: row[:2],))


def test_nothing_left_is_an_error_that_says_why() -> None:
    row = process(LOGITS, asked(bad_words=tuple((i,) for i in range(6))), [])
    for sampling in (Sampling(), Sampling(1.0)):
        with pytest.raises(ConfigError, match="forbid all of them"):
            choose(row, sampling, 0)


def test_the_logits_of_the_caller_stay_as_they_are() -> None:
    logits = LOGITS.copy()
    process(logits, asked(repetition_penalty=3.0, bad_words=((1,),)), [2])
    assert (logits == LOGITS).all()


def test_min_p_keeps_what_has_its_share_of_the_best() -> None:
    weights = np.exp(LOGITS.astype(float))
    keep = weights >= 0.2 * weights.max()
    found = distribution(LOGITS, Sampling(1.0, min_p=0.2))
    assert found == pytest.approx(np.where(keep, weights, 0) / weights[keep].sum())
    assert np.count_nonzero(distribution(LOGITS, Sampling(1.0, min_p=1.0))) == 1


def test_logprobs_are_the_targets_own() -> None:
    found = logprob(LOGITS, 2, 3)
    logs = LOGITS - np.log(np.exp(LOGITS).sum())
    assert found.token == 2 and found.logprob == pytest.approx(float(logs[2]), abs=1e-6)
    assert [token for token, _ in found.top] == [3, 0, 5]
    assert [value for _, value in found.top] == pytest.approx(logs[[3, 0, 5]].tolist(), abs=1e-6)


tokens = st.lists(st.integers(0, 3), max_size=14)


@given(tokens, st.integers(0, 8), st.integers(0, 4), st.lists(tokens.filter(bool), max_size=3))
def test_a_growing_history_bans_what_the_whole_one_does(
    text: list[int], cut: int, run: int, words: list[list[int]]
) -> None:
    """Against a definition by looking at every place of the text."""
    sampling = Sampling(no_repeat_ngram=run, bad_words=tuple(tuple(word) for word in words))
    bans = Bans(sampling)
    for token in text[:cut]:
        bans.add([token])
    expected = {
        token
        for token in range(4)
        if any([*text, token][-len(word) :] == word for word in words)
        or (
            run and [*text, token][-run:] in [text[i : i + run] for i in range(len(text) - run + 1)]
        )
    }
    assert bans.after(text[cut:]) == expected == banned(sampling, text)


OPTIONS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "presence and frequency": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "no run twice": {"no_repeat_ngram": 2},
    "bad words": {"bad_words": ((1,), (2, 3), (4, 5, 6))},
    "bias": {"logit_bias": ((3, 2.5), (4, -50.0))},
    "min tokens": {"min_tokens": 7},
    "a processor": {"processors": (lambda ids, row: np.roll(row, len(ids)),)},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "no_repeat_ngram": 3,
        "bad_words": ((1,), (2, 3)),
        "logit_bias": ((3, 1.0),),
        "min_tokens": 5,
        "processors": (lambda ids, row: row + (ids[-1] % 2) * row[::-1],),
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("script", [(0,), (1, 3, 0, 7), None], ids=["never", "some", "always"])
def test_options_in_a_block_are_those_of_one_token_at_a_time(
    options: dict[str, Any], temperature: float, script: Sequence[int] | None
) -> None:
    sampling = Sampling(temperature, seed=4, **options)
    stops = frozenset({2}) if "min_tokens" in options else frozenset()
    request = Request([3, 1, 4, 1, 5], 30, stops, sampling)
    expected, finish = plain(ANYTHING, request)
    for block_size in (2, 5, 8):
        draft = scripted(ANYTHING, script)
        found = list(steps(request, ToyTarget(ANYTHING), [draft], Fixed(block_size)))
        assert (tokens_of(found), found[-1].finish) == (expected, finish)
    if "min_tokens" in options and finish == Finish.STOP:
        assert len(expected) > options["min_tokens"]
    assert expected != plain(ANYTHING, replace(request, sampling=Sampling(temperature, seed=4)))[0]


@pytest.mark.parametrize("count", [0, 3])
def test_one_logprob_comes_with_each_token_and_changes_none(count: int) -> None:
    plainly = Request([3, 1, 4], 20, sampling=Sampling(repetition_penalty=1.5))
    request = replace(plainly, sampling=replace(plainly.sampling, logprobs=count))
    found = list(steps(request, ToyTarget(ANYTHING), [scripted(ANYTHING, (2, 0, 4))], Fixed(8)))
    said = tokens_of(found)
    assert said == plain(ANYTHING, plainly)[0]
    notes = [note for step in found for note in (step.verdict.notes or ())[: len(step.tokens)]]
    for place, note in enumerate(notes):
        logits = ANYTHING.logits(ANYTHING.run([*request.prompt, *said[:place]]))
        assert note == logprob(logits, said[place], count)
        assert len(note.top) == count
    assert len(notes) == len(said)
    assert np.exp([note.logprob for note in notes]).mean() < 0.99
