"""Options at every place of a block, through every entry point that has them, on every backend."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dflash.core.logits import logprob
from dflash.core.types import Request, Sampling
from dflash.engine import Engine
from dflash.errors import ConfigError
from tests.conformance.backends import SCRIPTS, SOMETIMES, Backend, Own, Scripted
from tests.conformance.entries import Call, Entry
from tests.conformance.grid import compare
from tests.conformance.test_entries import TEXT, check

PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5}
BANS = {"no_repeat_ngram": 2, "min_tokens": 12, "logit_bias": ((70, -100.0), (80, 1.5))}
ALL: dict[str, Any] = {**PENALTIES, **BANS, "min_p": 0.05}
every_script = pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
PROMPT = [71, 103, 35, 90, 71, 103, 33, 64]


@pytest.mark.parametrize("options", [PENALTIES, ALL], ids=["penalties", "all"])
@pytest.mark.parametrize(
    ("script", "temperature"), [((0,), 0.0), (SOMETIMES, 0.0), (SOMETIMES, 0.9), (None, 0.9)]
)
def test_options_in_blocks_are_those_of_one_token_at_a_time(
    entry_with_options: Entry,
    options: dict[str, Any],
    script: tuple[int, ...] | None,
    temperature: float,
    backend: Backend,
) -> None:
    call = Call(TEXT, max_tokens=18, temperature=temperature, options=options)
    said = check(entry_with_options, backend, Scripted(backend, script), call)
    stops = frozenset(said[3:5])  # some token that is said early
    pair = Scripted(backend, script, eos_ids=stops)
    ended = check(entry_with_options, backend, pair, call)
    if "min_tokens" in options:
        assert len(ended) > options["min_tokens"]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_backends_own_draft_obeys_and_changes_nothing(
    entry_with_options: Entry, temperature: float, backend: Backend
) -> None:
    call = Call(TEXT, max_tokens=18, temperature=temperature, options=ALL)
    check(entry_with_options, backend, Own(backend), call)


CHANGES: dict[str, Any] = {
    "temperature": 1.5,
    "repetition_penalty": 3.0,
    "presence_penalty": 5.0,
    "frequency_penalty": 5.0,
    "no_repeat_ngram": 1,
    "logit_bias": {70: 50.0},
    "min_tokens": 30,
    "stop_token_ids": None,  # filled in: a token of the plain text
    "bad_words": None,
    "seed": 8,
    "top_k": 1,
    "top_p": 1e-6,
    "min_p": 1.0,
    "max_tokens": 5,
    "n": 2,
    "logprobs": 3,
    "echo": True,
    "logits_processors": lambda ids, row: -row,
    "ignore_eos": True,
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_option_changes_the_result(name: str, backend: Backend) -> None:
    """None is taken and ignored."""
    plain = backend.plain.run(Request(PROMPT, 16))[0]
    settings: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0, "block_size": 4}
    eos = frozenset(plain[9:11]) if name in ("min_tokens", "ignore_eos") else frozenset()
    if name in ("seed", "top_k", "top_p", "min_p"):
        settings |= {"temperature": 1.5, "seed": 7}
    value = {"stop_token_ids": plain[6], "bad_words": [[plain[6]]]}.get(name, CHANGES[name])
    if name == "min_tokens":
        settings["max_tokens"] = 40
    with Engine(Scripted(backend, SOMETIMES, eos_ids=eos)) as engine:
        before = engine.generate(PROMPT, **settings)
        after = engine.generate(PROMPT, **{**settings, name: value})
    assert replace(before, stats=after.stats) != after


def test_two_requests_of_one_engine_keep_their_options_apart(backend: Backend) -> None:
    with Engine(Scripted(backend, SOMETIMES)) as engine:
        for options in (PENALTIES, {}, BANS, PENALTIES, {}):
            sampling = Sampling(**options)
            expected = backend.plain.run(Request(PROMPT, 20, sampling=sampling))[0]
            found = engine.generate(PROMPT, max_tokens=20, block_size=8, **options)
            assert list(found.token_ids) == expected


@every_script
def test_every_committed_token_has_the_targets_own_logprob(
    script: tuple[int, ...] | None, backend: Backend
) -> None:
    plain = backend.plain.run(Request(PROMPT, 25, sampling=Sampling(**PENALTIES)))[0]
    rows = [np.asarray(backend.plain.logits([*PROMPT, *plain[:n]])) for n in range(25)]
    for block_size in (1, 4, 16):
        with Engine(Scripted(backend, script)) as engine:
            options: Any = {"max_tokens": 25, "block_size": block_size, **PENALTIES}
            found = engine.generate(PROMPT, logprobs=5, **options)
        assert list(found.token_ids) == plain
        assert found.logprobs is not None and len(found.logprobs) == 25
        for place, entry in enumerate(found.logprobs):
            own = logprob(rows[place], plain[place], 5)
            assert entry.token == own.token
            assert entry.logprob == pytest.approx(own.logprob, abs=1e-4)
            assert [t for t, _ in entry.top] == [t for t, _ in own.top]


def test_a_stop_cuts_the_logprobs_with_the_tokens(backend: Backend) -> None:
    plain = backend.plain.run(Request(PROMPT, 25))[0]
    with Engine(Scripted(backend)) as engine:
        options: Any = {"max_tokens": 25, "block_size": 16, "logprobs": 0}
        found = engine.generate(PROMPT, stop_token_ids=plain[7], **options)
        chunks = list(engine.stream(PROMPT, stop_token_ids=plain[7], **options))
    assert found.logprobs is not None
    assert [entry.token for entry in found.logprobs] == list(found.token_ids)
    assert all(len(chunk.logprobs or ()) == len(chunk.token_ids) for chunk in chunks)


def test_n_texts_are_those_of_n_samples_and_run_the_prompt_once(backend: Backend) -> None:
    sampling = Sampling(1.0, seed=4)
    with Engine(Scripted(backend, SOMETIMES)) as engine:
        found = engine.generate(PROMPT, max_tokens=16, temperature=1.0, seed=4, n=3, block_size=8)
        for sample, choice in enumerate(found.choices):
            asked = Request(PROMPT, 16, sampling=replace(sampling, sample=sample))
            assert list(choice.token_ids) == backend.plain.run(asked)[0]
        assert len({choice.token_ids for choice in found.choices}) == 3
        lone = engine.generate(PROMPT, max_tokens=16, temperature=1.0, seed=4, block_size=8)
    assert lone.token_ids == found.token_ids and not lone.others
    assert found.choices[0].token_ids == found.token_ids


def test_an_echo_brings_the_prompt_first_and_counts_nothing(backend: Backend) -> None:
    with Engine(Scripted(backend, SOMETIMES)) as engine:
        options: Any = {"max_tokens": 12, "block_size": 4, "logprobs": 0}
        plain = engine.generate(PROMPT, **options)
        found = engine.generate(PROMPT, echo=True, **options)
        first, *rest = engine.stream(PROMPT, echo=True, **options)
    assert list(found.token_ids) == [*PROMPT, *plain.token_ids]
    assert found.text == backend.pair.tokenizer.decode(PROMPT) + plain.text
    assert found.logprobs is not None and plain.logprobs is not None
    assert [x.token for x in found.logprobs] == [x.token for x in plain.logprobs]
    assert found.stats.completion_tokens == 12
    assert first.sources == ("prompt",) * len(PROMPT)
    assert not any("prompt" in chunk.sources for chunk in rest)


def test_a_corner_of_the_grid_is_the_same_at_every_block_size(backend: Backend) -> None:
    found = list(compare(backend, 2))
    assert [what for what, wide in found if wide] == []
    assert len(found) == 32


def test_blocks_of_random_options_and_drafts(backend: Backend) -> None:
    rng = random.Random(3)
    pools: dict[str, list[Any]] = {
        "repetition_penalty": [1.0, 0.8, 1.5],
        "presence_penalty": [0.0, -0.5, 1.0],
        "frequency_penalty": [0.0, 0.7],
        "no_repeat_ngram": [0, 1, 3],
        "bad_words": [(), ((70,), (80, 90))],
        "min_tokens": [0, 9],
        "temperature": [0.0, 0.7],
        "top_p": [1.0, 0.8],
        "min_p": [0.0, 0.2],
    }
    for _ in range(12):
        options = {name: rng.choice(pool) for name, pool in pools.items()}
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 30))]
        stops = frozenset(rng.sample(range(256), 8))
        script = [rng.randint(0, 5) for _ in range(6)]
        expected = backend.plain.run(Request(prompt, 30, stops, Sampling(seed=5, **options)))[0]
        with Engine(Scripted(backend, script, eos_ids=stops)) as engine:
            found = engine.generate(
                prompt, max_tokens=30, block_size=rng.randint(2, 12), seed=5, **options
            )
        assert list(found.token_ids) == expected


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_options_that_leave_no_token_are_one_error(backend: Backend, temperature: float) -> None:
    with Engine(Scripted(backend, SOMETIMES)) as engine:
        options: Any = {"temperature": temperature, "seed": 3, "block_size": 4, "max_tokens": 8}
        nothing = [[token] for token in range(engine.pair.vocab_size)]
        with pytest.raises(ConfigError, match="leave no token to choose"):
            engine.generate(PROMPT, bad_words=nothing, **options)
