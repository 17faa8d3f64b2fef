"""A budget for reasoning holds to the token, inside blocks and on every backend."""

from __future__ import annotations

import pytest

from dflash.config import GenerateConfig
from dflash.core.accept import choose
from dflash.core.logits import process
from dflash.core.types import Request
from dflash.engine import Engine
from dflash.errors import ConfigError
from dflash.requests import make_request
from dflash.thinking import Budget, budget
from tests.conformance.backends import SCRIPTS, Backend, Scripted
from tests.conformance.grid import Told

PROMPT = [71, 103, 35, 90, 71]
BEGIN, END = 7, 9


class Marked:
    """A tokenizer with a token for each mark."""

    chat_template = None

    def __init__(self, begin: list[int], end: list[int]) -> None:
        self._marks = {"<think>": begin, "</think>": end}

    def encode(self, text: str) -> list[int]:
        return self._marks[text]

    def decode(self, ids: object) -> str:
        return ""


def plainly(backend: Backend, request: Request) -> list[int]:
    said: list[int] = []
    while len(said) < request.max_tokens:
        row = backend.plain.logits([*request.prompt, *said])
        said.append(choose(process(row, request, said), request.sampling, len(said)))
        assert request.grammar is not None
        request.grammar.commit(said[-1:])
    return said


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("most", [0, 1, 6, 10])
def test_reasoning_that_never_ends_is_ended_inside_a_block(
    backend: Backend, most: int, temperature: float
) -> None:
    prompt = [*PROMPT, BEGIN]
    pair = Told(backend, [7, 0, 2, 5], frozenset())
    pair._changes["tokenizer"] = Marked([BEGIN], [END])
    config = GenerateConfig(max_tokens=18, temperature=temperature, seed=3, thinking_budget=most)
    pair.text = plainly(
        backend, make_request(pair, prompt, config, grammar=budget(pair, prompt, most))
    )
    assert pair.text[most] == END and END not in pair.text[:most]
    with Engine(pair) as engine:
        for block_size in (1, 2, 8):
            options = {"seed": 3, "temperature": temperature, "max_tokens": 18}
            found = engine.generate(prompt, thinking_budget=most, block_size=block_size, **options)
            assert list(found.token_ids) == pair.text


def test_a_perfect_draft_is_not_wasted_on_a_budget(backend: Backend) -> None:
    prompt = [*PROMPT, BEGIN]
    pair = Told(backend, None, frozenset())  # type: ignore[arg-type]
    pair._changes["tokenizer"] = Marked([BEGIN], [END])
    config = GenerateConfig(max_tokens=25, thinking_budget=10)
    pair.text = plainly(
        backend, make_request(pair, prompt, config, grammar=budget(pair, prompt, 10))
    )
    with Engine(pair) as engine:
        stats = engine.generate(prompt, thinking_budget=10, block_size=8, max_tokens=25).stats
    assert stats.acceptance_rate == 1 and stats.rounds == 3


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_reasoning_begun_in_the_answer_counts_from_there(
    backend: Backend, script: tuple[int, ...] | None
) -> None:
    plain = backend.plain.run(Request(PROMPT, 24))[0]
    begin = plain[4]  # some token the target says by itself
    at = plain.index(begin) + 1
    pair = Scripted(backend, script, tokenizer=Marked([begin], [END]))
    with Engine(pair) as engine:
        found = engine.generate(PROMPT, thinking_budget=5, block_size=8, max_tokens=24).token_ids
    assert list(found[:at]) == plain[:at]
    inside = found[at : at + 6]
    assert inside[5] == END or END in inside[:5]


def test_a_mark_of_several_tokens_is_gone_on_with_where_the_text_began_it() -> None:
    held = Budget(16, ([1, 2], [3, 4]), 2, inside=False)
    held.commit([5, 1, 2, 6])
    assert held.allow([]).all()  # type: ignore[union-attr]
    assert list(held.allow([3]).nonzero()[0]) == [4], "one more, and 3 has begun the mark"  # type: ignore[union-attr]
    assert list(held.allow([6]).nonzero()[0]) == [3]  # type: ignore[union-attr]
    assert list(held.allow([6, 3]).nonzero()[0]) == [4]  # type: ignore[union-attr]
    assert held.allow([6, 4]) is None, "that is out of reach"
    assert held.allow([6, 3, 4]).all()  # type: ignore[union-attr]
    held.commit([3, 4, 9, 9, 9])
    assert held.allow([1, 2]).nonzero()[0].tolist() == [3], "what was spent stays spent"  # type: ignore[union-attr]


def test_a_mark_in_the_prompt_that_was_closed_again_counts_nothing(backend: Backend) -> None:
    pair = Scripted(backend, tokenizer=Marked([BEGIN], [END]))
    assert budget(pair, [BEGIN, 5, END, 6], 0).allow([]).all()  # type: ignore[union-attr]
    assert not budget(pair, [BEGIN, 5, END, BEGIN], 0).allow([]).all()  # type: ignore[union-attr]


def test_a_target_that_marks_no_reasoning_is_refused(backend: Backend) -> None:
    pair = Scripted(backend, tokenizer=Marked([1, 2], [3, 4]))
    with Engine(pair) as engine, pytest.raises(ConfigError, match="thinking_budget needs a target"):
        engine.generate(PROMPT, thinking_budget=5)


def test_a_budget_and_a_form_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="leave out thinking_budget"):
        GenerateConfig(regex="a+", thinking_budget=5)
