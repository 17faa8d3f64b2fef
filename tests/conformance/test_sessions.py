"""The seam's contract, checked on the sessions of every backend."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import pytest

from dflash.backends.toy import ScriptedDraft
from dflash.core.decode import decode
from dflash.core.policy import Fixed, Off
from dflash.core.protocols import Growing
from dflash.core.types import PLAIN, Outlook, Plan, Proposal, Request, Sampling, Step
from tests.conformance.backends import (
    ALWAYS,
    BLOCK,
    SCRIPTS,
    SOMETIMES,
    Backend,
    Own,
    Scripted,
    request,
)
from tests.core.toys import Drawn, ticks, tokens_of

PROMPT = [71, 103, 35, 90, 120, 33, 64]
CAPACITY = 256


def draft_of(backend: Backend, script: Sequence[int] | None) -> ScriptedDraft:
    return ScriptedDraft(backend.plain.ahead, backend.pair.vocab_size, script, BLOCK - 1)


def run(
    backend: Backend, asked: Request, block_size: int, script: Sequence[int] | None
) -> list[Step]:
    target, draft = backend.pair.open_target(CAPACITY), draft_of(backend, script)
    try:
        return list(decode(asked, target, [draft], Fixed(block_size), ticks()))
    finally:
        draft.close()
        target.close()


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16])
def test_a_perfect_draft_is_never_wasted(backend: Backend, block_size: int) -> None:
    for limit in (1, 2, block_size, block_size + 1, 2 * block_size + 1, 40):
        found = run(backend, request(PROMPT, limit), block_size, ALWAYS)
        rounds = [step for step in found[1:] if step.tokens]
        assert all(step.accepted == step.verdict.drafted == step.rows for step in rounds)
        whole, rest = divmod(limit - 1, block_size)
        assert [len(step.tokens) for step in rounds] == [block_size] * whole + [rest] * bool(rest)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_right_draft_is_kept_and_no_wrong_one(
    backend: Backend, script: Sequence[int] | None, temperature: float
) -> None:
    asked = request(PROMPT, sampling=Sampling(temperature, seed=3))
    rounds = [step for step in run(backend, asked, 8, script) if step.rows]
    for place, step in enumerate(rounds):
        right = script[place % len(script)] if script else BLOCK
        assert step.accepted == min(right, step.rows)


@pytest.mark.parametrize("top_k, top_p", [(5, 1.0), (0, 0.7), (9, 0.8)])
def test_top_k_and_top_p_choose_as_the_reference_does(
    backend: Backend, top_k: int, top_p: float
) -> None:
    sampling = Sampling(0.9, top_k, top_p, seed=11, sample=2)
    asked = request(PROMPT, 24, sampling=sampling)
    for script in SCRIPTS.values():
        assert tokens_of(run(backend, asked, 4, script)) == backend.plain.run(asked)[0]


def test_a_verdict_has_the_shape_that_the_core_relies_on(backend: Backend) -> None:
    found = run(backend, request(PROMPT), 8, SOMETIMES)
    assert sum(
        step.verdict.rows for step in found if not step.verdict.path and not step.rows
    ) >= len(PROMPT)
    for step in found[1:]:
        verdict = step.verdict
        assert len(verdict.tokens) == len(verdict.path) + 1 == verdict.rows
        assert list(verdict.path) == list(range(len(verdict.path)))
        assert verdict.drafted == step.rows
        assert all(type(token) is int for token in verdict.tokens)
        assert verdict.features is None or len(verdict.features) == verdict.rows


def test_the_last_kept_token_is_never_in_the_cache(backend: Backend) -> None:
    target, said = backend.pair.open_target(CAPACITY), list(PROMPT)
    for step in decode(request(PROMPT), target, [draft_of(backend, SOMETIMES)], Fixed(8), ticks()):
        said += step.tokens
        assert target.holds(said, 10**6) == len(said) - 1
    target.close()


@pytest.mark.parametrize("kept", range(1, 8))
def test_any_number_of_the_verdicts_tokens_can_be_kept(backend: Backend, kept: int) -> None:
    asked = request(PROMPT, 30)
    plain = backend.plain.run(asked)[0]
    target = backend.pair.open_target(CAPACITY)
    list(target.prefill(asked, 0))
    verdict = target.verify(Proposal(plain[1:8], 7))
    assert verdict.tokens == plain[1:9]
    target.commit(kept)
    assert target.verify(PLAIN).tokens == [plain[1 + kept]]
    target.commit(1)
    again = target.verify(Proposal(plain[2 + kept : 9 + kept], 7))
    assert again.tokens == plain[2 + kept : 10 + kept]
    target.close()


def test_wrong_drafts_leave_no_trace(backend: Backend) -> None:
    asked = request(PROMPT, 30)
    plain = backend.plain.run(asked)[0]
    target = backend.pair.open_target(CAPACITY)
    list(target.prefill(asked, 0))
    for place in range(1, 12):
        wrong = [(token + 1) % backend.pair.vocab_size for token in plain[place : place + 9]]
        assert target.verify(Proposal(wrong, 9)).tokens == [plain[place]]
        target.commit(1)
    target.close()


@pytest.mark.parametrize("rounds", range(0, 7, 2))
def test_an_abandoned_stream_leaves_sessions_fit_for_the_next_turn(
    backend: Backend, rounds: int
) -> None:
    target, draft = backend.pair.open_target(CAPACITY), draft_of(backend, SOMETIMES)
    stream = decode(request(PROMPT), target, [draft], Fixed(8), ticks())
    said = tokens_of(list(islice(stream, rounds)))
    stream.close()  # type: ignore[attr-defined]
    for more in ([5, 80], []):
        second = request([*PROMPT, *said, *more], 20)
        reuse = draft.holds(second.prompt, target.holds(second.prompt, len(second.prompt) - 1))
        found = list(decode(second, target, [draft], Fixed(4), ticks(), reuse))
        assert tokens_of(found) == backend.plain.run(second)[0]
    target.close()


def test_one_session_serves_prompts_of_every_length_in_turn(backend: Backend) -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (40, 5, 40, 1)]
    target, draft = backend.pair.open_target(CAPACITY), draft_of(backend, SOMETIMES)
    for prompt in [*prompts, prompts[0], prompts[0][:20], prompts[0]]:
        asked = request(prompt, 12)
        reuse = draft.holds(prompt, target.holds(prompt, len(prompt) - 1))
        found = list(decode(asked, target, [draft], Fixed(8), ticks(), reuse))
        assert tokens_of(found) == backend.plain.run(asked)[0]
    target.close()


def test_a_perfect_draft_is_not_wasted_after_a_resume(backend: Backend) -> None:
    target, draft = backend.pair.open_target(CAPACITY), draft_of(backend, ALWAYS)
    said = tokens_of(list(decode(request(PROMPT, 12), target, [draft], Fixed(8), ticks())))
    for second in (request([*PROMPT, *said, 9], 20), request([*PROMPT, *said][:12], 20)):
        reuse = draft.holds(second.prompt, target.holds(second.prompt, len(second.prompt) - 1))
        assert reuse >= min(len(second.prompt), len(PROMPT) + 11) - 1
        run = list(decode(second, target, [draft], Fixed(8), ticks(), reuse))
        assert all(step.accepted == step.rows for step in run)
    target.close()


def test_forks_are_independent(backend: Backend) -> None:
    target, draft = backend.pair.open_target(CAPACITY), draft_of(backend, SOMETIMES)
    list(decode(request(PROMPT, 1), target, [draft], Off(), ticks()))
    streams = []
    for sample in (0, 1, 2):
        asked = request(PROMPT, 16, sampling=Sampling(1.0, seed=1, sample=sample))
        sessions = target.fork(), draft.fork()
        stream = decode(asked, sessions[0], [sessions[1]], Fixed(4), ticks(), len(PROMPT) - 1)
        streams.append((asked, stream, list[int]()))
    for _ in range(16):
        for _, stream, said in streams:
            said += next(stream).tokens if len(said) < 16 else []
    texts = [said for _, _, said in streams]
    assert texts == [backend.plain.run(asked)[0] for asked, _, _ in streams]
    assert texts[0] != texts[1] != texts[2]
    target.close()


def test_two_sessions_take_turns_without_touching_each_other(backend: Backend) -> None:
    asked = [request(PROMPT, 20), request(PROMPT[::-1], 20)]
    runs = [
        decode(one, backend.pair.open_target(CAPACITY), [draft_of(backend, s)], Fixed(8), ticks())
        for one, s in zip(asked, (SOMETIMES, ALWAYS), strict=True)
    ]
    said: list[list[int]] = [[], []]
    for _ in range(40):
        for place, stream in enumerate(runs):
            said[place] += next(stream, Step([], Plan(), 0, PLAIN, 0)).tokens  # type: ignore[arg-type]
    assert said == [backend.plain.run(one)[0] for one in asked]


def test_a_session_takes_what_its_capacity_says_and_a_block_beyond(backend: Backend) -> None:
    capacity = 32
    asked = request(PROMPT, capacity - len(PROMPT))
    target = backend.pair.open_target(capacity)
    policy = Drawn([(0, BLOCK - 1)])
    wrong = ScriptedDraft(backend.plain.ahead, backend.pair.vocab_size, (0,), BLOCK - 1)

    class Whole(Drawn):
        """Asks for whole blocks up to the last token, as a careless policy would."""

        def plan(self, most: int, outlooks: Sequence[Outlook]) -> Plan:
            return super().plan(BLOCK, outlooks)

    for plan in (policy, Whole([(0, BLOCK - 1)])):
        found = list(decode(asked, target, [wrong], plan, ticks()))
        assert tokens_of(found) == backend.plain.run(asked)[0]
        wrong = ScriptedDraft(backend.plain.ahead, backend.pair.vocab_size, (0,), BLOCK - 1)
    target.close()


@pytest.mark.parametrize("own", [False, True], ids=["a perfect draft", "the backend's own draft"])
def test_sessions_that_grow_go_on_as_they_were(backend: Backend, own: bool) -> None:
    small, large = 24, 96
    pair = Own(backend) if own else Scripted(backend)
    target, (draft,) = pair.open_target(small), pair.open_drafts(small)
    assert isinstance(target, Growing) and isinstance(draft, Growing)
    asked = request(PROMPT, small - len(PROMPT))
    said = tokens_of(list(decode(asked, target, [draft], Fixed(4), ticks())))
    target.grow(large)
    draft.grow(large)
    second = request([*PROMPT, *said, 9], 60)
    reuse = draft.holds(second.prompt, target.holds(second.prompt, len(second.prompt) - 1))
    assert reuse == small - 1
    found = list(decode(second, target, [draft], Fixed(4), ticks(), reuse))
    assert tokens_of(found) == backend.plain.run(second)[0]
    if not own:
        assert all(step.accepted == step.rows for step in found)
    draft.close()
    target.close()


def test_closing_twice_is_harmless(backend: Backend) -> None:
    target = backend.pair.open_target(CAPACITY)
    list(target.prefill(request(PROMPT, 1), 0))
    target.close()
    target.close()


def test_a_seed_of_64_bits_and_another_sample_change_the_text(backend: Backend) -> None:
    one = request(PROMPT, 20, sampling=Sampling(1.5, seed=2**64 - 1))
    other = replace(one, sampling=replace(one.sampling, sample=1))
    texts = [tokens_of(run(backend, asked, 8, SOMETIMES)) for asked in (one, other)]
    assert texts == [backend.plain.run(asked)[0] for asked in (one, other)]
    assert texts[0] != texts[1]
