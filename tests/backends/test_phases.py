"""Phase times: what draft and target took in a round."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from dflash.backends.torch.phases import UNKNOWN, Mark, mark, spans
from dflash.backends.torch.target import TorchTargetSession
from dflash.backends.toy import ScriptedDraft
from dflash.core.decode import decode
from dflash.core.policy import Fixed, Off
from dflash.core.stats import Recorder, Stats
from dflash.core.types import PLAIN, Proposal, Request
from dflash.drafts.ngram import NgramDraft

from .drafts import tiny_draft
from .test_dflash_session import FULL_BLOCK, Text
from .tiny import tiny_target

pytestmark = pytest.mark.torch

PROMPT = [5, 7, 300, 20, 41]


class Event:
    """A CUDA event that was passed at so many milliseconds."""

    def __init__(self, milliseconds: float) -> None:
        self.milliseconds = milliseconds

    def elapsed_time(self, other: Event) -> float:
        return other.milliseconds - self.milliseconds


def test_marks_of_one_kind_have_a_span_and_others_none() -> None:
    clock, event = Mark(clock=100), Mark(Event(1.5))
    assert spans(clock, 3, Mark(clock=150), Mark(clock=400)) == (50, 250)
    assert spans(event, 3, Mark(Event(2.0)), Mark(Event(4.25))) == (500_000, 2_250_000)
    assert spans(None, 3, clock, Mark(clock=400)) == (UNKNOWN, 300)
    assert spans(70, 3, event, Mark(Event(2.0))) == (70, 500_000), "a draft on the host"
    assert spans(None, 0, clock, Mark(clock=400)) == (0, 300), "a plain step has no draft"
    assert spans(clock, 3, Mark(), Mark()) == (UNKNOWN, UNKNOWN), "a device without marks"


def test_a_device_that_has_neither_events_nor_a_clock_of_its_own_says_nothing() -> None:
    assert mark(torch.device("mps")) == Mark()
    assert mark(torch.device("cpu")).clock > 0


def test_a_round_reports_the_time_of_its_verify_pass() -> None:
    session = TorchTargetSession(tiny_target(), (), 64)
    list(session.prefill(Request(PROMPT, 10), 0))
    for proposal, draft in ((PLAIN, 0), (Proposal([1, 2], 2, meta=7), 7), (Proposal([1], 1), -1)):
        began = time.perf_counter_ns()
        found = session.verify(proposal).ns
        assert found[0] == draft
        assert 0 < found[1] <= time.perf_counter_ns() - began
        session.commit(1)


def test_a_draft_marks_where_it_began() -> None:
    text = Text(tiny_draft())
    session = text.open()
    text.start(session, 5)
    began = time.perf_counter_ns()
    meta: Any = session.propose(FULL_BLOCK).meta
    assert began <= meta.clock <= time.perf_counter_ns()


def stats(policy: Any, drafts: list[Any]) -> Stats:
    recorder = Recorder(len(PROMPT))
    session = TorchTargetSession(tiny_target(), (), 64)
    for step in decode(Request(PROMPT * 3, 30), session, drafts, policy, time.perf_counter_ns):
        recorder.add(step)
    return recorder.stats()


def test_the_phases_of_a_generation_add_up() -> None:
    plain = stats(Off(), [])
    assert plain.draft_seconds == 0
    assert plain.verify_seconds is not None and plain.verify_seconds > 0
    scripted = ScriptedDraft(lambda _request, _output, count: [1] * count, 512)
    drafted = stats(Fixed(4), [scripted])
    assert drafted.drafted and drafted.draft_seconds == 0, "a script takes no time"
    assert drafted.verify_seconds is not None and drafted.verify_seconds > 0


def test_a_look_up_measures_itself() -> None:
    draft = NgramDraft()
    draft.begin(Request([1, 2, 3, 1, 2], 10), 0)
    assert draft.propose(FULL_BLOCK).meta > 0
