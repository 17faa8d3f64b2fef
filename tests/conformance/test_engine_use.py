"""One engine used as people use it: in turn, in threads, left in the middle, closed too early."""

from __future__ import annotations

import random
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from dflash.core.types import Request, Sampling
from dflash.engine import Engine
from dflash.errors import EngineClosed
from tests.conformance.backends import ALWAYS, SCRIPTS, SOMETIMES, Backend, Scripted, request

RNG = random.Random(9)
PROMPTS = [[RNG.randrange(256) for _ in range(length)] for length in (40, 5, 40, 1)]


def ids_of(engine: Engine, prompt: list[int], **options: Any) -> list[int]:
    return list(engine.generate(prompt, **{"max_tokens": 16, "block_size": 8, **options}).token_ids)


def test_one_engine_serves_prompts_of_every_length_in_turn(backend: Backend) -> None:
    with Engine(Scripted(backend, SOMETIMES)) as engine:
        for prompt in [*PROMPTS, *PROMPTS]:
            assert ids_of(engine, prompt) == backend.plain.run(request(prompt, 16))[0]


def test_one_engine_serves_threads(backend: Backend) -> None:
    plain = [backend.plain.run(request(prompt, 16))[0] for prompt in PROMPTS]
    with Engine(Scripted(backend, SOMETIMES)) as engine, ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda prompt: ids_of(engine, prompt), PROMPTS * 2))
    assert found == plain * 2


def test_twenty_repeats_give_one_output(backend: Backend) -> None:
    with Engine(Scripted(backend, SOMETIMES)) as engine:
        found = set()
        for turn in range(20):
            found.add(tuple(ids_of(engine, PROMPTS[0])))
            ids_of(engine, PROMPTS[turn % 3 + 1], max_tokens=turn)
    assert found == {tuple(backend.plain.run(request(PROMPTS[0], 16))[0])}


def test_a_conversation_continues_where_it_ended(backend: Backend) -> None:
    with Engine(Scripted(backend, SOMETIMES)) as engine:
        text = list(PROMPTS[1])
        for _ in range(5):
            answer = ids_of(engine, text)
            assert answer == backend.plain.run(request(text, 16))[0]
            text += [*answer, *PROMPTS[3]]


def test_an_abandoned_stream_harms_nobody(backend: Backend) -> None:
    with Engine(Scripted(backend, SOMETIMES)) as engine:
        for rounds in range(5):
            stream = engine.stream(PROMPTS[0], max_tokens=30, block_size=8)
            for _ in range(rounds):
                next(stream)
            del stream
            assert ids_of(engine, PROMPTS[0]) == backend.plain.run(request(PROMPTS[0], 16))[0]


def test_closing_during_a_stream_raises_one_documented_error(backend: Backend) -> None:
    engine = Engine(Scripted(backend, SOMETIMES))
    stream = engine.stream(PROMPTS[0], max_tokens=30, block_size=8)
    next(stream)
    engine.close()
    with pytest.raises(EngineClosed):
        deque(stream, maxlen=0)
    for call in (
        lambda: engine.generate(PROMPTS[0]),
        lambda: engine.stream(PROMPTS[0]),
        lambda: engine.encode("text", chat_template=False),
        lambda: engine.keep(1, 1),
    ):
        with pytest.raises(EngineClosed, match="load a new one"):
            call()
    engine.close()
    with Engine(Scripted(backend, SOMETIMES)) as fresh:
        assert ids_of(fresh, PROMPTS[0]) == backend.plain.run(request(PROMPTS[0], 16))[0]


FORMS = {
    "int": lambda stop: stop,
    "list": lambda stop: [stop],
    "tuple": lambda stop: (stop,),
    "set": lambda stop: {stop, 255},
    "frozenset": lambda stop: frozenset({stop}),
    "nested": lambda stop: [[stop]],
    "array": lambda stop: np.array([stop]),
    "scalar array": lambda stop: np.array(stop),
    "numpy int": lambda stop: np.int64(stop),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_stop_ids_stop_in_every_form(form: Any, backend: Backend) -> None:
    plain = backend.plain.run(request(PROMPTS[0], 16))[0]
    stop = plain[9]
    with Engine(Scripted(backend)) as engine:
        found = engine.generate(PROMPTS[0], max_tokens=16, block_size=8, stop_token_ids=form(stop))
    assert list(found.token_ids) == plain[: plain.index(stop) + 1]
    assert found.finish_reason == "stop"


def test_the_targets_own_stop_ids_can_be_ignored(backend: Backend) -> None:
    plain = backend.plain.run(request(PROMPTS[0], 16))[0]
    with Engine(Scripted(backend, eos_ids=frozenset(plain[5:7]))) as engine:
        assert ids_of(engine, PROMPTS[0], ignore_eos=True) == plain
        assert ids_of(engine, PROMPTS[0], ignore_eos=True, stop_token_ids=plain[0]) == plain[:1]


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_block_sizes_and_drafts_never_change_a_seeded_text(
    script: tuple[int, ...] | None, backend: Backend
) -> None:
    sampling = Sampling(0.9, top_k=40, top_p=0.9, seed=21)
    plain = backend.plain.run(Request(PROMPTS[0], 24, sampling=sampling))[0]
    options: Any = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "seed": 21, "max_tokens": 24}
    with Engine(Scripted(backend, script)) as engine:
        for size in (1, 2, 5, 16, "auto", None):
            assert ids_of(engine, PROMPTS[0], block_size=size, **options) == plain


def test_without_a_seed_two_texts_differ(backend: Backend) -> None:
    with Engine(Scripted(backend)) as engine:
        texts = {tuple(ids_of(engine, PROMPTS[0], temperature=1.5)) for _ in range(3)}
    assert len(texts) > 1


def test_the_metrics_say_what_the_script_did(backend: Backend) -> None:
    with Engine(Scripted(backend, (3,))) as engine:
        stats = engine.generate(PROMPTS[0], max_tokens=1 + 4 * 8, block_size=16).stats
    assert stats.rounds == 8
    assert stats.mean_committed == 4
    assert stats.accepted == 24
    assert stats.acceptance_by_position[:3] == (1, 1, 1)
    assert not any(stats.acceptance_by_position[3:])
    assert stats.histogram[3] == 8


def test_the_sources_say_who_made_each_token(backend: Backend) -> None:
    with Engine(Scripted(backend, ALWAYS)) as engine:
        chunks = list(engine.stream(PROMPTS[0], max_tokens=17, block_size=8))
    sources = [source for chunk in chunks for source in chunk.sources]
    assert sources == ["target"] + (["draft"] * 7 + ["target"]) * 2
