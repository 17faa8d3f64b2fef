"""Texts kept to be gone on with: target and draft together, each apart, within limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dflash.backends.toy import ToyTarget
from dflash.engine import Engine
from dflash.sessions import MAY_BE_LOST, Sessions
from tests.serve.conftest import Serving, toy_pair

HISTORY = [65 + place % 50 for place in range(1500)]
SIZE = 1000  # bytes that each session claims


class Weighed(ToyTarget):
    """A session with a weight, that counts the rows of prompts it ran."""

    closed = False
    ran = 0

    def bytes(self) -> int:
        return SIZE

    def prefill(self, request: Any, reuse: int) -> Any:
        self.ran += len(request.prompt) - reuse
        yield from super().prefill(request, reuse)

    def close(self) -> None:
        self.closed = True
        super().close()


def weighed() -> tuple[Any, list[Weighed]]:
    """A pair and the target sessions it opened."""
    pair, opened = toy_pair(None), list[Weighed]()

    def open_target(capacity: int) -> Weighed:
        opened.append(Weighed(pair.model, 64))
        return opened[-1]

    object.__setattr__(pair, "open_target", open_target)
    return pair, opened


def ask(engine: Engine, prompt: Sequence[int], **options: Any) -> Any:
    return engine.generate(list(prompt), **{"max_tokens": 20, "block_size": 8, **options})


def test_a_second_turn_runs_only_what_is_new_and_speculates_as_well() -> None:
    pair, opened = weighed()
    with Engine(pair) as engine, Engine(toy_pair(None)) as fresh:
        engine.keep(8, 1 << 30)
        first = ask(engine, HISTORY)
        turn = [*HISTORY, *first.token_ids, *[90] * 80]
        second, cold = ask(engine, turn), ask(fresh, turn)
        assert second.token_ids == cold.token_ids
        assert second.stats.accepted == second.stats.drafted == cold.stats.accepted
        assert second.stats.cached_tokens == 1500 + 19  # the last token was never run
    assert len(opened) == 1 and opened[0].ran == 1500 + 81


def test_texts_that_begin_alike_are_kept_apart() -> None:
    pair, opened = weighed()
    with Engine(pair) as engine:
        engine.keep(8, 1 << 30)
        one = [*HISTORY[:200], *[70] * 200]
        other = [*HISTORY[:200], *[80] * 200]
        ask(engine, one)
        assert ask(engine, other).stats.cached_tokens == 200
        assert ask(engine, one).stats.cached_tokens == 399
        assert ask(engine, other).stats.cached_tokens == 399
        assert engine.kept.parked == 2
    assert len(opened) == 1  # the other was a copy


def test_a_text_that_loses_little_is_taken_over() -> None:
    pair, _ = weighed()
    with Engine(pair) as engine:
        engine.keep(8, 1 << 30)
        ask(engine, HISTORY[:300])
        ask(engine, [*HISTORY[:300], 7], max_tokens=MAY_BE_LOST // 2)
        assert engine.kept.parked == 1


@pytest.mark.parametrize(("texts", "most_bytes", "kept"), [(3, 1 << 30, 3), (9, 2 * SIZE, 2)])
def test_limits_hold_and_the_oldest_goes_first(texts: int, most_bytes: int, kept: int) -> None:
    pair, opened = weighed()
    with Engine(pair) as engine:
        engine.keep(texts, most_bytes)
        prompts = [[60 + place] * 40 for place in range(6)]
        for prompt in prompts:
            ask(engine, prompt)
            assert engine.kept.parked <= texts and engine.kept.bytes() <= most_bytes
        assert [session.closed for session in opened] == [True] * (6 - kept) + [False] * kept
        assert ask(engine, prompts[-1]).stats.cached_tokens == 39
        assert ask(engine, prompts[0]).stats.cached_tokens == 0


def test_texts_in_work_are_never_closed_for_want_of_room() -> None:
    pair, opened = weighed()
    with Engine(pair) as engine:
        engine.keep(4, 1)
        streams = [engine.stream([70 + n] * 30, max_tokens=9, block_size=4) for n in range(3)]
        for _ in range(2):
            for stream in streams:
                next(stream)
        assert engine.kept.out == 3 and not any(session.closed for session in opened)
        for stream in streams:
            list(stream)
        assert engine.kept.out == engine.kept.parked == 0


def test_as_it_is_an_engine_keeps_the_last_two() -> None:
    sessions = Sessions(toy_pair())
    for place in range(4):
        sessions.give_back(sessions.take([place] * 30, 40), whole=True)
    assert sessions.parked == 2


def test_a_chats_second_turn_says_how_much_was_cached(serving: Serving) -> None:
    client = serving(toy_pair(None))
    said: list[dict[str, str]] = [{"role": "user", "content": "word " * 300}]
    body: dict[str, Any] = {"messages": said, "temperature": 0, "max_tokens": 20}
    first = client.post("/v1/chat/completions", json=body).json()
    text = first["choices"][0]["message"]["content"]
    said += [{"role": "assistant", "content": text}, {"role": "user", "content": "and?"}]
    second = client.post("/v1/chat/completions", json=body).json()
    details = second["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] >= first["usage"]["total_tokens"] - 1
    assert second["metrics"]["speculative_decoding"]["draft_acceptance_rate"] == 1.0
