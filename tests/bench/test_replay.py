"""Look-ups played again at given costs: what is counted, and that it runs from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import replay
from bench.replay import MOST, Text
from dflash.core.policy import Fixed, Off

FLAT = [10.0] * (MOST + 1)  # ms, however many rows
COPY = Text("a", "copying", [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8])


def test_costs_are_straight_between_the_sizes_that_are_given() -> None:
    assert list(replay.curve("0:10,3:16,15:64"))[:5] == [10, 12, 14, 16, 20]
    assert len(replay.curve("0:10,15:64")) == MOST + 1
    with pytest.raises(AssertionError, match="costs from 0 to 15 rows"):
        replay.curve("0:10,7:31")


def test_a_text_is_played_by_the_real_loop_and_takes_what_its_rounds_cost() -> None:
    assert replay.play(COPY, Off(), FLAT) == 7 * 10
    # one plain step until two tokens agree, then the rest of the text in one block
    assert replay.play(COPY, Fixed(8), FLAT) == 2 * 10
    assert replay.play(COPY, Fixed(4), FLAT) == 3 * 10


def test_plays_slower_than_the_bound_are_counted_in_texts_that_are_long_enough() -> None:
    long = Text("l", "copying", [1], list(range(replay.LONG)))
    plain = 10.0 * (replay.LONG - 1)
    found = replay.slowest([COPY, long], [[900.0], [plain, plain / 0.96, plain / 0.98]], FLAT)
    assert "1 of 3 plays" in found and "the worst is 0.960" in found


def test_right_drafts_are_counted_at_every_token() -> None:
    text = Text("a", "copying", [1, 2, 3, 4, 9], [1, 2, 3, 7, 1, 2])
    assert replay.told(text) == [0, 0, 1, 0, 0, 0, 0]
    assert replay.any_place(text) == [0, 0, 1, 0, 0, 0, 0]
    assert replay.share(text) == 1 / 5
    two = Text("b", "copying", [1, 2, 3, 4, 5, 0, 1, 2, 8], [1, 2, 3, 4, 5])
    assert replay.told(two)[2] == 0, "the newest of equals goes on with 8"
    assert replay.any_place(two)[2] == 3


def test_the_ceiling_is_the_cheapest_way_through() -> None:
    wrong, right = [0] * 9, replay.perfect(COPY)
    assert replay.least(FLAT, wrong) == 70
    assert replay.least(FLAT, right) == 10
    dear = [10.0 + 10 * rows for rows in range(MOST + 1)]
    assert replay.least(dear, right) == 70
    assert replay.least(FLAT, replay.told(COPY)) == replay.play(COPY, Fixed(8), FLAT)


def test_texts_are_grouped_by_how_much_is_copied_but_for_those_in_circles() -> None:
    circle = Text("c", "p", [1, 2], [1, 2, 3, 4] * 8)
    found = [COPY, circle, Text("a", "p", [1, 2], [3, 4])]
    made = replay.groups(found, [0.9, 0.9, 0.0])
    classes = {name: places for name, places in made.items() if name.startswith("copied ")}
    assert classes == {"copied 0.0 to 0.4": [2], "copied 0.8 to 1.0": [0]}
    assert made["copying"] == [0] and made["p"] == [1, 2] and made["all"] == [0, 1, 2]


def test_texts_are_made_once_and_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, out = tmp_path / "texts.json", tmp_path / "found.json"
    flags = ["--target", "toy", "--backend", "toy", "--sets", "copying,gsm8k", "--orders", "1"]
    few = [*flags, "--prompts-per-set", "2", "--texts", str(kept), "--out", str(out)]
    replay.main([*few, "--tokens", "20"])
    made = kept.read_bytes()
    replay.main([*few, "--tokens", "12"])
    assert kept.read_bytes() == made
    found = json.loads(out.read_text())
    assert found["columns"][:5] == ["text", "texts", "tokens", "copied", "auto"]
    assert found["columns"][-3:] == ["told", "any place", "perfect"]
    assert [row[0] for row in found["rows"]][-3:] == ["copying", "gsm8k", "all"]
    assert found["rows"][-1][1:3] == ["4", "47"], "twelve tokens a text, of one eleven"
    assert "any place" in capsys.readouterr().out
