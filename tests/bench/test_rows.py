"""Which texts count, when a speed-up is refused, and what is advised in the end."""

from __future__ import annotations

from typing import Any

import pytest

from dflash.bench import guards
from dflash.bench.advice import advise
from dflash.bench.protocols import upstream
from dflash.bench.report import Material, build
from dflash.bench.rows import DIFFERS, Row, make_rows
from dflash.bench.trial import Outcome
from dflash.bench.verdict import judge
from tests.bench.made import WORDS, drafted, outcome, record

CIRCLES = (1, 2, 3, 4) * 10
STUCK = (*range(20), *(7,) * 21)


def rows(*texts: dict[str, list[Outcome]], greedy: bool = True, **proven: str) -> dict[str, Row]:
    arms = list(texts[0])
    found = make_rows(list(texts), arms, "plain", greedy=greedy, proven=proven)
    return {row.arm: row for row in found}


def text(slow: float, quick: float, repeats: int = 3, **ids: Any) -> dict[str, list[Outcome]]:
    return {
        "plain": [outcome(slow, ids.get("plain", WORDS))] * repeats,
        "fast": [outcome(quick, ids.get("fast", WORDS))] * repeats,
    }


def test_a_speed_up_is_the_ratio_of_summed_median_times() -> None:
    found = rows(text(2.0, 1.0), text(4.0, 2.0))["fast"]
    assert found.refused is None
    assert found.speedup.value == pytest.approx(2.0)
    assert found.rate == pytest.approx(39 / 1.5)


def test_a_text_that_differs_is_left_out_and_counted() -> None:
    found = rows(text(2.0, 1.0), text(2.0, 0.1, fast=(*WORDS[:-1], 99)))["fast"]
    assert (found.texts, found.left_out) == (1, {DIFFERS: 1})
    assert found.speedup.value == pytest.approx(2.0)


def test_a_speed_up_is_refused_when_no_text_is_the_same() -> None:
    found = rows(text(2.0, 1.0, fast=(*WORDS[:-1], 99)))["fast"]
    assert found.refused == "no text counts: texts differ"
    assert found.to_json()["speedup"] is None
    assert found.rate == pytest.approx(39.0), "what it did by itself is still shown"


def test_an_arm_that_is_not_lossless_gets_no_speed_up() -> None:
    assert rows(text(2.0, 1.0), fast="differs")["fast"].refused == "differs"


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        (CIRCLES, "runs in circles"),
        (STUCK, "stuck on one token"),
        (WORDS[:9], "shorter than 16 tokens"),
    ],
)
def test_degenerate_and_short_texts_do_not_count(ids: tuple[int, ...], why: str) -> None:
    found = rows(text(2.0, 1.0, plain=ids, fast=ids), text(3.0, 1.0))["fast"]
    assert found.left_out == {why: 1}
    assert found.speedup.value == pytest.approx(3.0)
    assert rows(text(2.0, 1.0, plain=ids, fast=ids))["fast"].refused == f"no text counts: {why}"


def test_twenty_times_the_same_token_is_still_a_text() -> None:
    assert guards.stuck((7,) * 21)
    assert not guards.stuck((7,) * 20)


def test_a_noisy_machine_is_said_with_its_spread() -> None:
    noisy = {"plain": [outcome(t) for t in (1.0, 1.0, 1.5)], "fast": [outcome(1.0)] * 3}
    assert rows(noisy)["fast"].refused == "noisy machine: repeats of a text differ by 50 %"
    assert rows(text(1.0, 1.0))["fast"].refused is None


def test_a_speed_up_known_only_roughly_is_refused() -> None:
    repeats = {"plain": [1.0] * 5, "fast": [0.5, 0.5, 0.5, 0.5, 0.5]}
    torn = {arm: [outcome(t) for t in times] for arm, times in repeats.items()}
    odd = {"plain": torn["plain"], "fast": [outcome(t) for t in (9.0, 9.0, 0.5, 0.5, 9.0)]}
    found = rows(torn, torn, odd)["fast"]
    assert found.refused is not None and found.refused.startswith("noisy machine: the speed-up")


def test_samples_are_compared_by_time_per_token() -> None:
    found = rows(text(4.0, 1.0, fast=WORDS[:20]), greedy=False)["fast"]
    assert found.speedup.value == pytest.approx((4.0 / 39) / (1.0 / 19))


BLOCKS: dict[str, int | str] = {"plain": 1, "block 2": 2, "block 4": 4, "auto": "auto"}


def advice(*speeds: float, **sets: tuple[float, ...]) -> str:
    def group(values: tuple[float, ...]) -> list[Row]:
        arms = ("plain", "block 2", "block 4", "auto")
        times = (1.0, *(1 / value for value in values))
        answers = [drafted(t, (9, 9, 9)) for t in times]
        one = {arm: [answer] * 3 for arm, answer in zip(arms, answers, strict=True)}
        return make_rows([one], arms, "plain", greedy=True, proven={})

    by_set = {name: group(values) for name, values in sets.items()}
    return advise(group(speeds), by_set, BLOCKS).sentence


def test_the_advice_names_the_block_its_gain_and_what_gains_least() -> None:
    said = advice(1.5, 1.8, 1.7, prose=(1.2, 1.1, 1.2), code=(2.0, 2.5, 2.1))
    assert said == (
        "use block 4: 1.80x; prose gains least (1.10x); auto reaches 1.70x. 50 % of drafts "
        "accepted at that block: fair (above 60 % good, below 30 % weak)"
    )


def test_plain_decoding_is_advised_where_no_block_is_faster() -> None:
    assert advice(0.9, 0.8, 1.0).startswith("use plain decoding (block 1)")


def test_nothing_is_advised_from_rows_that_were_refused() -> None:
    short = {arm: [outcome(1.0, WORDS[:5])] for arm in BLOCKS}
    found = make_rows([short], list(BLOCKS), "plain", greedy=True, proven={})
    assert advise(found, {}, BLOCKS).speedup is None


def test_upstreams_definition_weighs_requests_and_counts_the_first_token() -> None:
    slow = [outcome(4.0, tuple(range(40))), outcome(1.0, tuple(range(20)))]
    fast = [drafted(1.0, (0, 1, 1)), drafted(2.0, (4, 0, 1))]
    found = upstream(slow, fast, 3)
    assert found.speedup == pytest.approx(((4 / 40 + 1 / 20) / 2) / ((1 / 6 + 2 / 8) / 2))
    assert found.acceptance_length == pytest.approx((5 / 2 + 7 / 5) / 2)
    assert found.histogram == pytest.approx((0, 4 / 7, 1 / 7, 2 / 7))
    assert found.lines()[-1] == ("Acceptance length histogram: ['0.0%', '57.1%', '14.3%', '28.6%']")


def test_the_verdict_names_the_first_differing_token_and_its_gap() -> None:
    one = text(1.0, 1.0, fast=(*WORDS[:7], 99, *WORDS[8:]))
    key = ("s", "p", 0)

    def gap(prompt: Any, output: Any, a: int, b: int) -> tuple[float, float]:
        assert (list(prompt), tuple(output), a, b) == ([5], WORDS[:7], 7, 99)
        return 0.5, 1e-3

    found = judge({key: one}, {key: [5]}, ["fast"], "plain", gap)
    assert found.real == ("fast",)
    assert found.sentence == (
        "1 real difference and 0 ties in 1 text; first: fast on p#1 at token 7, gap 5.0e-01"
    )
    tie = judge({key: one}, {key: [5]}, ["fast"], "plain", lambda *_: (5e-4, 1e-3))
    assert (tie.real, tie.findings[0].kind) == ((), "tie")


def test_a_real_difference_takes_the_speed_up_from_the_arm() -> None:
    records = [record("plain", outcome(2.0)), record("block 4", outcome(1.0))]
    records += [record("plain", outcome(2.0), "q")]
    records += [record("block 4", outcome(1.0, (*WORDS[:-1], 99)), "q")]
    texts = {("s", "q", 0): text(2.0, 1.0, fast=(*WORDS[:-1], 99))}
    texts["s", "q", 0]["block 4"] = texts["s", "q", 0].pop("fast")
    verdict = judge(texts, {("s", "q", 0): [1]}, ["block 4"], "plain", lambda *_: (1.0, 1e-3))
    made, _ = build(
        Material(records, {"plain": 1, "block 4": 4}, (), "plain", True, verdict=verdict)
    )
    row = made["rows"][1]
    assert row["speedup"] is None and "beyond rounding" in row["refused"]
