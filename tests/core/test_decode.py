"""The two laws on the strict toy: output never changes; a perfect draft is never wasted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.backends.toy import ScriptedDraft, ToyModel, ToyTarget
from dflash.core.decode import cut, decode
from dflash.core.policy import Fixed, Off
from dflash.core.types import Finish, Plan, Request, Sampling, Verdict
from tests.core.toys import ANYTHING, Drawn, plain, scripted, steps, ticks, tokens_of

ids = st.integers(0, ANYTHING.vocab_size - 1)
scripts = st.lists(st.integers(0, 9), min_size=1, max_size=6)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.3]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    seed=st.integers(0, 3),
    sample=st.integers(0, 1),
)
requests = st.builds(
    Request,
    prompt=st.lists(ids, min_size=1, max_size=40),
    max_tokens=st.integers(0, 40),
    stop_ids=st.frozensets(ids, max_size=2),
    sampling=samplings,
)
moves = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 15)), min_size=1, max_size=6)


@given(requests, st.lists(scripts, max_size=2), moves, st.integers(1, 16))
def test_output_is_that_of_plain_decoding_whatever_is_drafted(
    request: Request, draft_scripts: list[list[int]], drawn: list[tuple[int, int]], chunk: int
) -> None:
    drafts = [scripted(ANYTHING, script) for script in draft_scripts]
    run = list(steps(request, ToyTarget(ANYTHING, chunk), drafts, Drawn(drawn)))
    assert (tokens_of(run), run[-1].finish) == plain(ANYTHING, request)
    assert [step.finish for step in run[:-1]] == [None] * (len(run) - 1)


@given(requests, st.integers(1, 16), st.integers(1, 16))
def test_a_perfect_draft_is_never_wasted(request: Request, block_size: int, chunk: int) -> None:
    request = replace(request, stop_ids=frozenset())
    target, draft = ToyTarget(ANYTHING, chunk), scripted(ANYTHING)
    run = list(steps(request, target, [draft], Fixed(block_size)))
    rounds = run[-(-len(request.prompt) // chunk) :]
    assert all(step.accepted == step.verdict.drafted == step.rows for step in rounds)
    sizes = [len(step.tokens) for step in rounds]
    whole, rest = divmod(max(request.max_tokens - 1, 0), block_size)
    assert sizes == [block_size] * whole + [rest] * bool(rest)


@given(requests, scripts, st.integers(2, 16))
def test_a_draft_that_is_right_k_times_has_k_accepted(
    request: Request, script: list[int], block_size: int
) -> None:
    request = replace(request, stop_ids=frozenset())
    drafts = [scripted(ANYTHING, script)]
    run = list(steps(request, ToyTarget(ANYTHING), drafts, Fixed(block_size)))
    drafted = [step for step in run if step.rows]
    for place, step in enumerate(drafted):
        assert step.accepted == min(script[place % len(script)], step.rows)


@given(requests, scripts, scripts, moves)
def test_a_draft_that_is_not_chosen_is_told_everything_all_the_same(
    request: Request, one: list[int], other: list[int], drawn: list[tuple[int, int]]
) -> None:
    request = replace(request, stop_ids=frozenset())
    policy = Drawn([*drawn, (1, 0)])
    drafts = [scripted(ANYTHING, one), scripted(ANYTHING)]
    run = list(steps(request, ToyTarget(ANYTHING), drafts, policy))
    perfect = [step for step in run if step.rows and step.plan.draft == 1]
    assert all(step.accepted == step.rows for step in perfect), "the second draft is an oracle"
    assert all(draft.outlook().lag >= 0 for draft in drafts)


@given(requests, scripts, st.integers(1, 16))
def test_a_block_never_asks_for_more_than_the_output_has_room_for(
    request: Request, script: list[int], block_size: int
) -> None:
    policy = Drawn([(0, block_size - 1)])
    run = list(steps(request, ToyTarget(ANYTHING), [scripted(ANYTHING, script)], policy))
    left = request.max_tokens - 1
    for most, step in zip(
        policy.asked, run[-len(policy.asked) :] if policy.asked else [], strict=True
    ):
        assert most == left - 1
        assert step.rows <= most
        left -= len(step.tokens)
    assert policy.seen == run[len(run) - len(policy.asked) :]


@given(requests, scripts, moves, st.integers(0, 8), st.lists(ids, max_size=5))
def test_an_abandoned_stream_leaves_sessions_fit_for_a_second_turn(
    request: Request,
    script: list[int],
    drawn: list[tuple[int, int]],
    rounds: int,
    more: list[int],
) -> None:
    target, draft = ToyTarget(ANYTHING, 8), scripted(ANYTHING, script)
    stream = steps(request, target, [draft], Drawn(drawn))
    said = tokens_of(list(islice(stream, rounds)))
    stream.close()
    second = replace(request, prompt=[*request.prompt, *said, *more])
    check_resumed(second, target, draft, drawn)


@given(requests, scripts, moves, st.integers(1, 40))
def test_a_finished_session_resumes_at_any_prefix_it_holds(
    request: Request, script: list[int], drawn: list[tuple[int, int]], upto: int
) -> None:
    target, draft = ToyTarget(ANYTHING), scripted(ANYTHING, script)
    said = tokens_of(list(steps(request, target, [draft], Drawn(drawn))))
    second = replace(request, prompt=[*request.prompt, *said][:upto])
    reuse = check_resumed(second, target, draft, drawn)
    assert reuse == min(len(second.prompt), len(request.prompt) + max(len(said) - 1, 0)) - 1 or (
        reuse == len(second.prompt) - 1
    )


@given(requests, st.integers(1, 16), st.integers(0, 40), st.integers(1, 40))
def test_a_perfect_draft_is_not_wasted_after_a_resume(
    request: Request, block_size: int, first: int, upto: int
) -> None:
    request = replace(request, stop_ids=frozenset())
    target, draft = ToyTarget(ANYTHING, 8), scripted(ANYTHING)
    turn = replace(request, max_tokens=first)
    said = tokens_of(list(steps(turn, target, [draft], Fixed(block_size))))
    second = replace(request, prompt=[*request.prompt, *said][:upto])
    reuse = draft.holds(second.prompt, target.holds(second.prompt, len(second.prompt) - 1))
    run = list(steps(second, target, [draft], Fixed(block_size), reuse))
    assert all(step.accepted == step.rows for step in run if step.rows)


def check_resumed(
    request: Request, target: ToyTarget, draft: ScriptedDraft, drawn: Sequence[tuple[int, int]]
) -> int:
    """Runs ``request`` on used sessions; both laws hold. Returns what was reused."""
    reuse = draft.holds(request.prompt, target.holds(request.prompt, len(request.prompt) - 1))
    run = list(steps(request, target, [draft], Drawn(drawn), reuse))
    assert (tokens_of(run), run[-1].finish) == plain(ANYTHING, request)
    return reuse


@given(requests, scripts, moves)
def test_two_samples_forked_from_one_prompt_run_interleaved(
    request: Request, script: list[int], drawn: list[tuple[int, int]]
) -> None:
    request = replace(request, max_tokens=max(request.max_tokens, 1))
    target, draft = ToyTarget(ANYTHING), scripted(ANYTHING, script)
    list(steps(replace(request, max_tokens=1), target, [draft], Off()))
    reuse = len(request.prompt) - 1
    streams = []
    for sample in (0, 1):
        mine = replace(request, sampling=replace(request.sampling, sample=sample))
        streams.append(
            (mine, steps(mine, target.fork(), [draft.fork()], Drawn(drawn), reuse), list[int]())
        )
    running = list(streams)
    while running:
        for item in list(running):
            step = next(item[1], None)
            if step is None:
                running.remove(item)
            else:
                item[2].extend(step.tokens)
    for mine, _, said in streams:
        assert said == plain(ANYTHING, mine)[0]


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16])
def test_a_stop_id_ends_the_text_wherever_in_the_block_it_falls(block_size: int) -> None:
    open_ended = Request([1, 2, 3], 2 * block_size + 2, sampling=Sampling(1.0, seed=5))
    whole, _ = plain(ANYTHING, open_ended)
    for stop in set(whole):
        request = replace(open_ended, stop_ids=frozenset({stop}))
        target, draft = ToyTarget(ANYTHING), scripted(ANYTHING)
        run = list(steps(request, target, [draft], Fixed(block_size)))
        said = whole[: whole.index(stop) + 1]
        assert tokens_of(run) == said
        assert run[-1].finish is Finish.STOP
        # the state ends right before the stop token, which is the next anchor
        assert target.holds([*request.prompt, *said], 10**6) == len(request.prompt) + len(said) - 1
        assert draft.holds([*request.prompt, *said], 10**6) == len(request.prompt) + len(said) - 1


@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
def test_exactly_max_tokens_come_out(block_size: int) -> None:
    for limit in range(2 * block_size + 2):
        request = Request([1, 2, 3], limit)
        run = list(steps(request, ToyTarget(ANYTHING), [scripted(ANYTHING)], Fixed(block_size)))
        assert len(tokens_of(run)) == limit
        assert run[-1].finish is Finish.LENGTH


def test_a_stop_id_beyond_the_first_rejection_is_not_seen() -> None:
    request = Request([5], 12)
    whole, _ = plain(ANYTHING, request)
    never = next(token for token in range(ANYTHING.vocab_size) if token not in whole)
    draft = ScriptedDraft(lambda *_: [never] * 15, ANYTHING.vocab_size)
    request = replace(request, stop_ids=frozenset({never}))
    run = list(steps(request, ToyTarget(ANYTHING), [draft], Fixed(8)))
    assert tokens_of(run) == whole
    assert run[-1].finish is Finish.LENGTH


def test_a_draft_may_give_fewer_rows_than_planned() -> None:
    class Short(ScriptedDraft):
        def propose(self, plan: Plan):  # type: ignore[no-untyped-def]
            return super().propose(replace(plan, rows=min(plan.rows, 2)))

    request = Request([5, 6], 20)
    draft = Short(ANYTHING.ahead, ANYTHING.vocab_size)
    run = list(steps(request, ToyTarget(ANYTHING), [draft], Fixed(8)))
    assert tokens_of(run) == plain(ANYTHING, request)[0]
    assert {step.rows for step in run[1:-1]} == {2}, "a step says what was really verified"
    assert run[1].plan.rows == 7


def test_without_a_draft_every_round_is_a_plain_step() -> None:
    request = Request([5, 6], 20)
    run = list(steps(request, ToyTarget(ANYTHING), [], Off()))
    assert tokens_of(run) == plain(ANYTHING, request)[0]
    assert [len(step.tokens) for step in run] == [1] * 20


def test_a_long_prompt_is_one_step_per_chunk_and_only_the_last_has_a_token() -> None:
    request = Request(list(range(10)), 3)
    run = list(steps(request, ToyTarget(ANYTHING, chunk=4), [scripted(ANYTHING)], Fixed(4)))
    assert [len(step.tokens) for step in run] == [0, 0, 1, 2]
    assert [step.verdict.rows for step in run[:3]] == [4, 4, 2]


def test_the_time_of_the_reader_is_not_counted() -> None:
    now = 0

    def clock() -> int:
        return now

    class Slow(ToyTarget):
        def verify(self, proposal):  # type: ignore[no-untyped-def]
            nonlocal now
            now += 5
            return super().verify(proposal)

        def prefill(self, request, reuse):  # type: ignore[no-untyped-def]
            nonlocal now
            for verdict in super().prefill(request, reuse):
                now += 3
                yield verdict

    request = Request([1] * 10, 6)
    times = []
    for step in decode(request, Slow(ANYTHING, chunk=5), [], Off(), clock):
        times.append(step.ns)
        now += 1000
    assert times == [3, 3, 5, 5, 5, 5, 5]


def test_nothing_is_half_done_at_a_yield() -> None:
    target, draft = ToyTarget(ANYTHING), scripted(ANYTHING, [2, 0, 5])
    said: list[int] = []
    for step in steps(Request([3, 4], 25), target, [draft], Fixed(8)):
        said += step.tokens
        held = len([3, 4, *said]) - 1
        assert target.holds([3, 4, *said], 99) == held
        assert draft.holds([3, 4, *said], 99) == held


def test_a_session_that_raises_ends_the_stream_with_its_own_error() -> None:
    class Broken(ToyTarget):
        def verify(self, proposal):  # type: ignore[no-untyped-def]
            raise OSError("the device is gone")

    stream = decode(Request([1], 9), Broken(ANYTHING), [], Off(), ticks())
    next(stream)
    with pytest.raises(OSError, match="the device is gone"):
        next(stream)


class TestCut:
    def cut(self, tokens: list[int], left: int, stop: Sequence[int] = ()):  # type: ignore[no-untyped-def]
        verdict: Verdict[object] = Verdict(tokens, range(max(len(tokens) - 1, 0)))
        step = cut(verdict, Plan(), 3, Request([1], 9, frozenset(stop)), left, 7)
        assert (step.rows, step.ns, step.verdict) == (3, 7, verdict)
        return step.tokens, step.finish

    def test_a_verdict_that_fits_passes_whole(self) -> None:
        assert self.cut([1, 2, 3], 4) == ([1, 2, 3], None)

    def test_the_limit_ends_it_when_it_is_reached_exactly(self) -> None:
        assert self.cut([1, 2, 3], 3) == ([1, 2, 3], Finish.LENGTH)

    def test_the_limit_ends_it_in_the_middle(self) -> None:
        assert self.cut([1, 2, 3], 2) == ([1, 2], Finish.LENGTH)

    def test_the_first_of_several_stop_ids_ends_it(self) -> None:
        assert self.cut([1, 2, 3, 2], 9, [3, 2]) == ([1, 2], Finish.STOP)

    def test_a_stop_id_beyond_the_limit_does_not_count(self) -> None:
        assert self.cut([1, 2, 3], 2, [3]) == ([1, 2], Finish.LENGTH)

    def test_a_stop_id_at_the_limit_is_a_stop(self) -> None:
        assert self.cut([1, 2, 3], 3, [3]) == ([1, 2, 3], Finish.STOP)

    def test_a_chunk_of_the_prompt_ends_nothing(self) -> None:
        assert self.cut([], 0) == ([], None)

    def test_no_room_at_all_ends_with_nothing(self) -> None:
        assert self.cut([1], 0) == ([], Finish.LENGTH)


def test_accepted_never_counts_more_than_was_kept() -> None:
    verdict: Verdict[object] = Verdict([1, 2, 3, 4], range(3))
    request = Request([1], 9, frozenset({2}))
    assert cut(verdict, Plan(), 3, request, 9, 0).accepted == 2
    assert cut(verdict, Plan(), 3, replace(request, stop_ids=frozenset()), 9, 0).accepted == 3


def test_the_toy_model_of_these_tests_is_lively() -> None:
    request = Request([1, 2, 3], 200)
    said = ToyModel.ahead(ANYTHING, request, [], 200)
    assert set(said) == set(range(ANYTHING.vocab_size)), "every token must occur"
