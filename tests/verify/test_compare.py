"""What counts as a difference, what as a tie, and what an audit makes of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

import dflash
from dflash.backends.toy import ToyModel, ToyPair
from dflash.engine import Engine
from dflash.verify import gap as gaps
from dflash.verify.compare import ENDED, Comparison, Difference, Outcome, first_difference, outcomes
from dflash.verify.gap import Judge, tolerance
from dflash.verify.prompts import MIXED, Prompt

SHORT = MIXED[:4]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with dflash.load("toy", "toy:script:1,3,0") as engine:
        yield engine


def never(prompt: object, output: object, one: int, other: int) -> tuple[float, float]:
    raise AssertionError("there is nothing to judge")


def test_first_difference_sees_an_ended_text() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2


@pytest.mark.parametrize("block_size", [2, 4, 8, "auto"])
@pytest.mark.parametrize(
    "sampled",
    [
        {},
        {"temperature": 0.8, "seed": 3},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"temperature": 1.2, "seed": 1, "min_p": 0.02, "no_repeat_ngram": 3},
    ],
    ids=["greedy", "sampled", "penalties", "both"],
)
def test_a_lossless_pair_shows_no_difference(
    engine: Engine, block_size: object, sampled: dict[str, object]
) -> None:
    settings = {"max_tokens": 24, "block_size": block_size, **sampled}
    found = Comparison(tuple(outcomes(engine, SHORT, settings, never)))
    assert (found.count("identical"), found.prompts) == (4, 4)
    assert found.verdict == "lossless"
    if block_size != "auto":
        assert found.committed > 1


@dataclass(frozen=True)
class Changing(ToyPair):
    """A pair whose block passes see slightly other logits than plain ones, as rounding does."""

    other: ToyModel = field(default_factory=ToyModel)

    def open_target(self, capacity: int) -> Changed:
        return Changed(self.model, self.other)


class Changed(dflash.backends.toy.ToyTarget):
    """Judges blocks by another model than single rows."""

    def __init__(self, model: ToyModel, other: ToyModel) -> None:
        super().__init__(model)
        self._plain, self._other = model, other

    def verify(self, proposal):  # type: ignore[no-untyped-def]
        self._model = self._other if proposal.rows else self._plain
        return super().verify(proposal)


@dataclass(frozen=True)
class Nudged(ToyModel):
    """A toy whose best two tokens sometimes change places, by as much as ``nudge``."""

    nudge: float = 0.0

    def logits(self, state):  # type: ignore[no-untyped-def]
        logits = super().logits(state)
        best, second = logits.argsort()[-1], logits.argsort()[-2]
        if state.chain % 5 == 0:
            logits[second] = logits[best] + self.nudge
            logits[best] -= self.nudge
        return logits


def audit(nudge: float) -> Comparison:
    plain = Nudged(words=False, nudge=0.0)
    pair = Changing(plain, "toy:oracle", other=replace(plain, nudge=nudge))
    with Engine(pair) as engine:
        settings = {"max_tokens": 40, "block_size": 4}
        gap = Judge(engine, settings).gap
        return Comparison(tuple(outcomes(engine, SHORT, settings, gap)))


def test_close_logits_that_change_places_are_ties() -> None:
    found = audit(nudge=1e-4)
    assert found.count("tie") > 0
    assert found.count("real") == 0
    assert found.verdict == "lossless"
    assert found.max_gap <= 1e-3
    assert all(d["kind"] == "tie" for d in found.to_json()["differences"])


@dataclass(frozen=True)
class Lossy(ToyModel):
    """Swaps the best two tokens, however far apart they are."""

    def logits(self, state):  # type: ignore[no-untyped-def]
        logits = super().logits(state)
        best, second = logits.argsort()[-1], logits.argsort()[-2]
        if state.chain % 5 == 0:
            logits[[best, second]] = logits[[second, best]]
        return logits


def test_a_lossy_pair_is_caught() -> None:
    pair = Changing(ToyModel(words=False), "toy:oracle", other=Lossy(words=False))
    with Engine(pair) as engine:
        settings = {"max_tokens": 40, "block_size": 4}
        gap = Judge(engine, settings).gap
        found = Comparison(tuple(outcomes(engine, SHORT, settings, gap)))
    assert found.count("real") > 0
    assert found.verdict == "real differences"
    assert found.max_gap > 1e-3


def test_a_text_that_ends_early_is_a_real_difference() -> None:
    ended = Difference(position=3, plain=7, speculative=ENDED, gap=None, limit=0.0)
    assert not ended.tie
    assert Outcome("x", 3, 3, 3, ended).kind == "real"


def test_the_largest_gap_is_that_of_all_differences() -> None:
    gap_of = [0.0004, 0.2, None]
    texts = [Outcome("x", 1, 1, 1, Difference(0, 1, 2, gap, 1e-3)) for gap in gap_of]
    found = Comparison((*texts, Outcome("y", 9, 3, 9)))
    assert (found.count("identical"), found.count("tie"), found.count("real")) == (1, 1, 2)
    assert found.max_gap == 0.2
    assert json.loads(json.dumps(found.to_json()))["max_gap"] == 0.2


def test_a_tie_is_a_thousandth_in_float32_and_four_steps_in_narrower_formats() -> None:
    assert tolerance("float32", 20.0) == gaps.TIE == 1e-3
    assert tolerance("bfloat16", 20.0) == 4 * 0.125
    assert tolerance("float16", 20.0) == 4 * 2**-6
    assert tolerance("bfloat16", 0.0) >= 1e-3


def test_above_temperature_zero_the_gap_is_that_of_the_noisy_logits(engine: Engine) -> None:
    settings = {"temperature": 0.7, "seed": 5}
    prompt = [1, 2, 3]
    (own,) = engine.generate(prompt, max_tokens=1, **settings).token_ids
    others = [token for token in range(20) if token != own]
    noisy = [Judge(engine, settings).gap(prompt, (), own, token)[0] for token in others]
    assert all(gap is not None and gap > 0 for gap in noisy)
    assert noisy != [Judge(engine).gap(prompt, (), own, token)[0] for token in others]


def test_the_judge_knows_the_options_of_the_texts(engine: Engine) -> None:
    judge = Judge(engine, {"temperature": 0.5, "top_k": 3})
    p = judge.exact([1, 2, 3], [4])
    assert (p > 0).sum() == 3
    assert p.sum() == pytest.approx(1)


def test_the_judge_counts_penalties_from_the_output_so_far(engine: Engine) -> None:
    prompt, output = [1, 2, 3], [65, 65]
    plain = Judge(engine).gap(prompt, output, 65, 66)
    once = Judge(engine, {"presence_penalty": 2.0}).gap(prompt, output, 65, 66)
    twice = Judge(engine, {"frequency_penalty": 2.0}).gap(prompt, output, 65, 66)
    assert len({plain, once, twice}) == 3


def test_the_judge_forbids_what_the_grammar_forbids(engine: Engine) -> None:
    pytest.importorskip("xgrammar")
    judge = Judge(engine, {"regex": "[ab]{4}", "temperature": 1.0, "seed": 0})
    assert set(judge.exact([1, 2, 3], [ord("a")]).nonzero()[0]) == {ord("a"), ord("b")}
    gap, _ = judge.gap([1, 2, 3], [ord("a")], ord("b"), ord("c"))
    assert gap is None, "a forbidden token has no gap, so it is a real difference"


def test_the_mixed_set_is_mixed_and_named() -> None:
    assert len({prompt.id for prompt in MIXED}) == len(MIXED) >= 10
    assert all(isinstance(prompt, Prompt) and prompt.text.strip() for prompt in MIXED)
