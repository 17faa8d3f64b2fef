"""What is written down of a run, how it adds up, and how a run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash.bench.prompts import Conversation
from dflash.bench.totals import add_up
from dflash.bench.trial import Ask, Course, Journal, Key, Outcome, Record
from dflash.errors import ConfigError
from tests.bench.made import drafted, outcome, record


def test_totals_are_the_sums_of_the_requests() -> None:
    runs = [drafted(1.0, (2, 3, 1)), drafted(2.5, (4, 0, 5, 1)), outcome(0.5)]
    found = add_up(runs)
    assert found.requests == 3
    for name in ("tokens", "prefill", "decode", "rounds", "drafted", "accepted"):
        assert getattr(found, name) == pytest.approx(sum(getattr(run, name) for run in runs))
    assert found.histogram == (6, 3, 6, 1)
    assert found.judged == (16, 16, 10)
    assert found.decoded == sum(run.tokens - 1 for run in runs)
    assert found.committed == found.rounds + found.accepted, "the request without rounds is apart"


def test_micro_weighs_passes_and_macro_requests() -> None:
    found = add_up([drafted(1.0, (9, 0, 0)), drafted(1.0, (0, 0, 1))])
    assert found.micro == pytest.approx((9 + 3) / 10)
    assert found.macro == pytest.approx((1 + 3) / 2)


def test_acceptance_by_position_is_given_both_ways() -> None:
    found = add_up([drafted(1.0, (5, 2, 3))])
    assert found.unconditional == pytest.approx((0.5, 0.3))
    assert found.conditional == pytest.approx((0.5, 0.6))


def test_phases_are_known_only_where_every_request_knew_them() -> None:
    one = drafted(2.0, (1, 1), draft_seconds=0.5, verify_seconds=1.0)
    assert add_up([one, one]).host_seconds == pytest.approx(1.0)
    assert add_up([one, outcome()]).host_seconds is None


def test_a_record_survives_its_file() -> None:
    one = record("block 4", drafted(1.0, (5, 2, 3), draft_seconds=0.25), prompt="é")
    assert Record.from_json(json.loads(json.dumps(one.to_json()))) == one


def course(asked: list[str], repeats: int = 2) -> Course:
    def arm(name: str):  # type: ignore[no-untyped-def]
        def answer(ask: Ask, tokens: int) -> Outcome:
            asked.append(f"{name}:{ask.messages[-1]['content']}:{len(ask.messages)}")
            return outcome()

        return answer

    arms = {name: arm(name) for name in ("plain", "block 4")}
    return Course(arms, 8, repeats, encode=None, says=lambda _: "an answer")


TALK = Conversation("talk", "s", "chat", ("first", "second"))


def test_every_arm_answers_every_turn_after_the_same_history(tmp_path: Path) -> None:
    asked: list[str] = []
    with Journal(tmp_path / "r.jsonl", {}) as journal:
        assert list(course(asked).run([TALK], journal)) == [TALK]
    assert asked == [
        *("plain:first:1", "block 4:first:1", "block 4:first:1", "plain:first:1"),
        *("plain:second:3", "block 4:second:3", "block 4:second:3", "plain:second:3"),
    ]
    assert len(journal.records) == 8


def test_a_run_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    place, asked = tmp_path / "r.jsonl", list[str]()
    with Journal(place, {"tokens": 8}) as journal:
        list(course(asked).run([TALK], journal))
    lines = place.read_text().splitlines(keepends=True)
    place.write_text("".join(lines[:4]) + lines[4][:25])  # killed in the middle of a line
    asked.clear()
    with Journal(place, {"tokens": 8}, resume=True) as journal:
        list(course(asked).run([TALK], journal))
    assert len(asked) == 5
    assert len(journal.records) == 8
    with Journal(place, {"tokens": 8}, resume=True) as journal:
        list(course(asked).run([TALK], journal))
    assert len(asked) == 5, "everything was there"


def test_without_resume_a_run_begins_anew(tmp_path: Path) -> None:
    place = tmp_path / "r.jsonl"
    with Journal(place, {}) as journal:
        journal.add(record("plain", outcome()))
    with Journal(place, {}) as journal:
        assert journal.records == {}


@pytest.mark.parametrize("text", ['{"settings": {"tokens": 9}}\n', "not a journal\n"])
def test_records_of_other_settings_are_not_mixed_in(tmp_path: Path, text: str) -> None:
    place = tmp_path / "r.jsonl"
    place.write_text(text)
    with pytest.raises(ConfigError, match="made with other settings"):
        Journal(place, {"tokens": 8}, resume=True)
    assert place.read_text() == text


def test_a_damaged_record_is_one_error(tmp_path: Path) -> None:
    place = tmp_path / "r.jsonl"
    place.write_text('{"settings": {}}\n{"arm": "plain"}\n')
    with pytest.raises(ConfigError, match="no journal"):
        Journal(place, {}, resume=True)


def test_a_prompt_too_long_for_the_context_is_left_out() -> None:
    short = Course({}, 8, 1, encode=lambda _: range(10), says=lambda _: "", context=17)
    with Journal(None, {}) as journal:
        assert list(short.run([TALK], journal)) == [None]


def test_a_key_names_arm_set_prompt_turn_and_repeat() -> None:
    assert Key._fields == ("arm", "set", "prompt", "turn", "repeat")
