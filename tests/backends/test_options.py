"""Options on torch: the words of the reference at every place of a block, on target and draft."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from dflash.backends.torch.options import Chain, make_chain
from dflash.backends.torch.propose import make_proposer
from dflash.backends.torch.target import TorchTargetSession
from dflash.backends.toy import ScriptedDraft
from dflash.core.accept import choose
from dflash.core.decode import decode
from dflash.core.logits import logprob, process
from dflash.core.policy import Fixed
from dflash.core.types import PLAIN, Request, Sampling
from dflash.errors import ConfigError

from .tiny import VOCAB, tiny_target

pytestmark = pytest.mark.torch

PROMPT = [5, 7, 300, 20, 41, 7, 300]


class Even:
    """A grammar: even tokens, and after three of them the end; host only, strict."""

    def __init__(self, end: int = 2, size: int = VOCAB) -> None:
        self.said: list[int] = []
        self._end, self._size = end, size

    def allow(self, draft: Sequence[int]) -> Any:
        text = [*self.said, *draft]
        if self._end in text or any(token % 2 for token in text):
            return None
        mask = np.arange(self._size) % 2 == 0
        mask[self._end] = len(text) >= 3
        return mask

    def commit(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            mask = self.allow(())
            assert mask is not None and mask[token], f"{token} after {self.said}"
            self.said.append(token)


ALL: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "no_repeat_ngram": 3,
    "logit_bias": ((9, 3.0), (11, -100.0)),
    "bad_words": ((4,), (7, 300), (6, 5, 4)),
    "min_tokens": 8,
    "processors": (lambda ids, row: row + (ids[-1] % 3) * row[::-1] / 4,),
}
OPTIONS: dict[str, dict[str, Any]] = {name: {name: value} for name, value in ALL.items()}
OPTIONS["all"] = ALL
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def asked(sampling: Sampling, **more: Any) -> Request:
    return Request(PROMPT, 40, frozenset({2, 3}), sampling, **more)


def rows(count: int, seed: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, VOCAB, generator=generator) * 2).to(dtype)


@every_option
@pytest.mark.parametrize("as_tensor", [True, False])
def test_rows_of_a_block_are_those_of_the_reference(
    options: dict[str, Any], as_tensor: bool
) -> None:
    request = asked(Sampling(**options))
    chain, output = Chain(request), list[int]()
    for number, kept in enumerate((1, 4, 2, 5, 3)):
        drafted = random.Random(number).choices([4, 5, 6, 7, 9, 300], k=6)
        logits = rows(7, number)
        ids: Any = torch.tensor(drafted) if as_tensor else drafted
        found = chain(logits, [*PROMPT, *output], ids)
        for i, row in enumerate(logits.numpy()):
            expected = process(row, request, output, drafted[:i])
            np.testing.assert_array_equal(found[i].numpy(), expected)
            alone = chain(logits[i : i + 1], [*PROMPT, *output], ids[:i], first=i)
            assert torch.equal(alone[0], found[i])
        assert torch.equal(logits, rows(7, number)), "the target's own logits stay as they are"
        output += drafted[:kept]


def test_narrow_logits_are_widened_and_wide_ones_kept() -> None:
    request = asked(Sampling(presence_penalty=1.0))
    assert Chain(request)(rows(1, dtype=torch.bfloat16), PROMPT, ()).dtype == torch.float32
    assert Chain(request)(rows(1, dtype=torch.float64), PROMPT, ()).dtype == torch.float64


def test_a_request_without_options_has_no_chain() -> None:
    assert make_chain(asked(Sampling(0.7, 3, 0.9, min_p=0.1, logprobs=3))) is None


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "logit_bias"])
def test_what_can_stay_on_the_device_does(name: str) -> None:
    assert not Chain(asked(Sampling(**OPTIONS[name]))).on_host
    assert Chain(asked(Sampling(no_repeat_ngram=2))).on_host


class Reference:
    """One token at a time, everything recomputed, the reference's own words for the options."""

    def __init__(self, model: Any, request: Request) -> None:
        self._model, self._request = model, request
        self.said, self.notes = list[int](), list[Any]()

    def run(self, count: int) -> list[int]:
        sampling = self._request.sampling
        while len(self.said) < count:
            ids = torch.tensor([[*PROMPT, *self.said]])
            with torch.inference_mode():
                logits = self._model(input_ids=ids, use_cache=False).logits[0, -1].numpy()
            row = process(logits, self._request, self.said)
            token = choose(row, sampling, len(self.said))
            self.notes.append(logprob(logits, token, sampling.logprobs or 0))
            self.said.append(token)
            if token in self._request.stop_ids:
                break
        return self.said


@every_option
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_generation_is_that_of_one_token_at_a_time(
    options: dict[str, Any], temperature: float
) -> None:
    model = tiny_target(dtype=torch.float64)
    request = asked(Sampling(temperature, seed=5, logprobs=5, **options))
    reference = Reference(model, request)
    expected = reference.run(24)
    truth = [*expected, *[1] * 16]
    for script in ((2, 0, 4), None, (0,)):
        session = TorchTargetSession(model, (), 80)
        draft = ScriptedDraft(lambda _r, out, n: truth[len(out) :][:n], VOCAB, script)
        asking = Request(PROMPT, 24, request.stop_ids, request.sampling)
        found = list(decode(asking, session, [draft], Fixed(8), time.perf_counter_ns))
        assert [t for step in found for t in step.tokens] == expected
        notes = [n for step in found for n in (step.verdict.notes or ())[: len(step.tokens)]]
        for note, own in zip(notes, reference.notes, strict=True):
            assert note.token == own.token
            assert note.logprob == pytest.approx(own.logprob, abs=1e-5)
            assert [t for t, _ in note.top] == [t for t, _ in own.top]
            assert [v for _, v in note.top] == pytest.approx([v for _, v in own.top], abs=1e-5)
        assert np.exp([note.logprob for note in notes]).mean() < 0.99


def test_options_of_one_request_do_not_reach_the_next() -> None:
    model = tiny_target(dtype=torch.float64)
    session = TorchTargetSession(model, (), 80)
    for options in ({}, ALL, {}, OPTIONS["repetition_penalty"], {}):
        request = Request(PROMPT, 12, frozenset({2, 3}), Sampling(**options))
        reuse = session.holds(PROMPT, len(PROMPT) - 1)
        found = decode(request, session, [], Fixed(1), time.perf_counter_ns, reuse)
        said = [token for step in found for token in step.tokens]
        assert said == Reference(model, request).run(12)


def test_a_fork_keeps_the_options_and_its_own_history() -> None:
    model = tiny_target(dtype=torch.float64)
    request = asked(Sampling(repetition_penalty=1.5, no_repeat_ngram=2))
    expected = Reference(model, request).run(10)
    session = TorchTargetSession(model, (), 80)
    said = list(session.prefill(request, 0))[-1].tokens
    twin = session.fork()
    for one in (session, twin):
        text = list(said)
        while len(text) < 10:
            text += one.verify(PLAIN).tokens
            one.commit(1)
        assert text == expected


def test_options_that_forbid_everything_say_so() -> None:
    request = asked(Sampling(processors=(lambda ids, row: row - np.inf,)))
    session = TorchTargetSession(tiny_target(), (), 64)
    with pytest.raises(ConfigError, match="forbid all of them"):
        list(session.prefill(request, 0))


# -- the draft's side ------------------------------------------------------------------------------


@every_option
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_obeys_the_options_row_after_row(
    options: dict[str, Any], temperature: float
) -> None:
    request = asked(Sampling(temperature, seed=5, **options))
    propose, output = make_proposer(request), list[int]()
    for number, kept in enumerate((1, 4, 7, 2)):
        logits = rows(7, number)
        tokens, q = propose(logits, [*PROMPT, *output])
        drafted = torch.as_tensor(tokens).tolist()
        assert q is None
        assert len(drafted) == 7 or drafted[-1] in request.stop_ids
        for i, token in enumerate(drafted):
            row = process(logits[i].numpy(), request, output, drafted[:i])
            assert token == choose(row, request.sampling, len(output) + i)
        output += drafted[:kept]


def test_a_draft_says_only_what_the_grammar_allows_and_stops_at_its_end() -> None:
    grammar = Even()
    propose = make_proposer(asked(Sampling(), grammar=grammar))
    logits = rows(8)
    logits[5:, 2] = 50.0  # the end, as soon as it may be
    tokens, _ = propose(logits, PROMPT)
    drafted = torch.as_tensor(tokens).tolist()
    assert len(drafted) == 6 and drafted[-1] == 2
    assert all(token % 2 == 0 for token in drafted)
    grammar.commit(drafted)
    assert grammar.allow(()) is None


def test_a_draft_of_a_wrong_grammar_state_proposes_nothing_rather_than_anything() -> None:
    class Nothing(Even):
        def allow(self, draft: Sequence[int]) -> Any:
            return np.zeros(VOCAB, dtype=bool) if len(draft) >= 2 else super().allow(draft)

    tokens, _ = make_proposer(asked(Sampling(), grammar=Nothing()))(rows(6), PROMPT)
    assert len(tokens) == 2


class Ahead:
    """Proposes what a grammar allows, or at place 2 always what it does not."""

    def __init__(self, truth: Sequence[int], illegal: bool) -> None:
        self._truth, self._illegal = truth, illegal

    def __call__(self, request: Request, output: Sequence[int], count: int) -> list[int]:
        tokens = [*self._truth[len(output) :][:count], *[1] * count][:count]
        if self._illegal and count > 1:
            tokens[1] = 33
        return tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("illegal", [False, True])
@pytest.mark.parametrize("script", [None, (0,), (2, 0, 4)])
def test_a_grammar_in_blocks_is_that_of_one_token_at_a_time(
    temperature: float, illegal: bool, script: Sequence[int] | None
) -> None:
    model, sampling = tiny_target(dtype=torch.float64), Sampling(temperature, seed=3)
    with torch.no_grad():
        model.lm_head.weight[2] *= 3
    expected = Reference(model, asked(sampling, grammar=_Told())).run(30)
    assert all(token % 2 == 0 for token in expected) and len(expected) >= 4
    grammar = Even()
    session = TorchTargetSession(model, (), 80)
    draft = ScriptedDraft(Ahead(expected, illegal), VOCAB, script)
    request = Request(PROMPT, 30, frozenset({2}), sampling, grammar)
    found = list(decode(request, session, [draft], Fixed(8), time.perf_counter_ns))
    assert [token for step in found for token in step.tokens] == expected
    assert grammar.said == expected, "it advanced once for each committed token"


class _Told(Even):
    """For the reference, which names the whole output at once and commits nothing."""

    def allow(self, draft: Sequence[int]) -> Any:
        mask = np.arange(VOCAB) % 2 == 0
        mask[2] = self._count >= 3
        self._count += 1
        return mask

    _count = 0
