"""The measurements, on the toy pair: what they count, and that they run from end to end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import dflash
from bench import acceptance, demo, identical, lookups, memory, ngram, policy, record, sets
from dflash.bench import paired
from dflash.bench.arms import Arm, Run, engine_arm
from dflash.engine import Engine


@pytest.fixture
def engine() -> Iterator[Engine]:
    with dflash.load("toy", "toy:script:1,3,0") as engine:
        yield engine


def test_every_set_has_forty_distinct_prompts() -> None:
    for name in sets.ALL:
        prompts = sets.load(name)
        assert len(prompts) == 40
        assert len({p.text for p in prompts}) == 40
        assert all(p.text.strip() and p.set == name for p in prompts)


def test_a_smaller_count_is_spread_over_the_set() -> None:
    every = [p.id for p in sets.load("mt_bench")]
    assert [p.id for p in sets.load("mt_bench", 4)] == every[::10]


def test_mixed_takes_the_sets_in_turn() -> None:
    assert [p.set for p in sets.mixed(7)] == [*sets.ALL, sets.ALL[0]]
    assert len(sets.mixed(200)) == 200


def test_a_text_with_one_four_gram_eight_times_runs_in_circles() -> None:
    assert record.in_circles([1, 2, 3, 4] * 8)
    assert not record.in_circles([1, 2, 3, 4, 9, *range(20, 60)] + [1, 2, 3, 4, 8] * 6)
    assert not record.in_circles([])


def test_conditions_name_what_a_figure_depends_on() -> None:
    found = record.conditions(2)
    assert {"command", "commit", "versions", "machine", "cores", "threads", "date"} <= set(found)


def test_the_bootstrap_interval_holds_the_figure() -> None:
    values = [1.0, 1.1, 0.9, 1.05, 0.95, 1.0]
    low, high = record.bootstrap(len(values), lambda pick: sum(values[i] for i in pick) / len(pick))
    assert 0.9 <= low < 1.0 < high <= 1.1


def test_committed_is_counted_over_passes_without_the_prefill(engine: Engine) -> None:
    texts = acceptance.generate(engine, sets.load("gsm8k", 2), tokens=40, block_size=8)
    got = acceptance.summarise(texts)
    committed = sum(len(t.ids) - 1 for t in texts)
    passes = sum(t.stats.rounds for t in texts)
    assert (got.committed, got.passes) == (committed, passes)
    assert got.micro == pytest.approx(committed / passes)
    assert 1 + sum(got.by_position) == pytest.approx(got.micro, abs=0.15), "last blocks are cut"


def test_texts_in_circles_are_left_out_and_reported_apart(engine: Engine) -> None:
    (text,) = acceptance.generate(engine, sets.load("gsm8k", 1), tokens=40, block_size=8)
    looped = acceptance.Text("x", "gsm8k", (1, 2, 3, 4) * 8, text.stats)
    got = acceptance.summarise([text, looped])
    assert (got.texts, got.circles) == (1, 1)
    assert got.micro == pytest.approx(text.stats.mean_committed)
    assert got.circles_micro == pytest.approx(text.stats.mean_committed)


def test_acceptance_runs_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "acceptance.json"
    pair = ["--target", "toy", "--draft", "toy:script:1,3,0"]
    acceptance.main([*pair, "--prompts-per-set", "2", "--tokens", "24", "--out", str(out)])
    written = json.loads(out.read_text())
    assert set(written["sets"]) == set(sets.HELD_OUT)
    assert written["conditions"]["threads"] == 2
    assert "average" in capsys.readouterr().out


def run(seconds: float, ids: tuple[int, ...] = (5, 6, 7)) -> Run:
    return Run(ids, first=1, prefill=0.1, decode=seconds)


def test_a_ratio_is_the_sum_of_median_times() -> None:
    texts = [
        {"transformers": [run(4.0)] * 3, "plain": [run(2.0)] * 3, "block 4": [run(1.0), run(9.0)]},
        {"transformers": [run(2.0)] * 3, "plain": [run(2.0)] * 3, "block 4": [run(1.0)] * 2},
    ]
    rows = {row.arm: row for row in demo.summarise(texts)}
    assert rows["block 4"].over_transformers == pytest.approx(6.0 / 6.0)
    assert rows["plain"].over_transformers == pytest.approx(6.0 / 4.0)
    assert rows["plain"].rate == pytest.approx(4 / 4.0)
    assert rows["block 4"].over_plain == pytest.approx(4.0 / 6.0)


def test_a_text_that_differs_is_counted_and_left_out() -> None:
    texts = [
        {"transformers": [run(2.0)], "plain": [run(2.0)], "block 4": [run(0.1, (5, 6, 8))]},
        {"transformers": [run(2.0)], "plain": [run(2.0)], "block 4": [run(1.0)]},
    ]
    rows = {row.arm: row for row in demo.summarise(texts)}
    assert (rows["block 4"].differ, rows["block 4"].texts) == (1, 1)
    assert rows["block 4"].over_transformers == pytest.approx(2.0)
    assert rows["plain"].differ == 0


def test_arms_run_in_turn_and_the_order_rotates() -> None:
    order = []

    def arm(name: str) -> Arm:
        def go(prompt: object, tokens: int) -> Run:
            order.append(name)
            return run(1.0)

        return go

    demo.run_set([[1], [2]], {"a": arm("a"), "b": arm("b"), "c": arm("c")}, 4, repeats=2)
    assert "".join(order) == "abcbca" * 2


def test_the_report_of_a_run_has_a_row_per_arm(tmp_path: Path, engine: Engine) -> None:
    arms = {"transformers": engine_arm(engine, 1), "plain": engine_arm(engine, 1)}
    arms["block 4"] = engine_arm(engine, 4)
    prompts = [engine.encode(p.text) for p in sets.load("gsm8k", 2)]
    results = {"gsm8k": demo.run_set(prompts, arms, tokens=16, repeats=2)}
    demo.report(results, record.conditions(1), tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    rows = {row["arm"]: row for row in written["sets"]["gsm8k"]["rows"]}
    assert set(rows) == set(arms)
    assert rows["block 4"]["differ"] == 0
    assert rows["block 4"]["micro"] > 1 and rows["plain"]["micro"] is None
    assert written["average"][2]["arm"] == "block 4"


def test_identity_is_judged_over_the_sets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "identical.json"
    pair = ["--target", "toy", "--draft", "toy:script:1,3,0"]
    grid = ["--way", "greedy,seeded", "--block-size", "4,auto"]
    with pytest.raises(SystemExit) as ended:
        identical.main([*pair, *grid, "--prompts", "6", "--tokens", "24", "--out", str(out)])
    assert ended.value.code == 0
    rows = json.loads(out.read_text())["results"]
    assert [(row["way"], row["block_size"]) for row in rows] == [
        ("greedy", 4), ("greedy", "auto"), ("seeded", 4), ("seeded", "auto")
    ]  # fmt: skip
    assert all((row["prompts"], row["real"], row["differences"]) == (6, 0, []) for row in rows)
    assert rows[0]["committed"] > 1
    assert capsys.readouterr().out.count("0 real differences") == 4


def test_growth_is_the_slope_of_the_peaks() -> None:
    assert memory.slope([(512, 1000), (1024, 2024), (2048, 4072)]) == pytest.approx(2.0)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux's /proc")
def test_memory_runs_a_process_per_context(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "memory.json"
    memory.main(
        ["--target", "toy", "--draft", "toy:oracle", "--contexts", "256,512", "--out", str(out)]
    )
    rows = json.loads(out.read_text())["rows"]
    assert [row["context"] for row in rows] == [256, 512]
    assert all(row["peak"] > 1e7 for row in rows)


# --- auto against fixed blocks, and the look-up --------------------------------------------------


def texts(*times: dict[str, list[float]]) -> list[paired.Runs]:
    return [{arm: [run(t) for t in runs] for arm, runs in text.items()} for text in times]


def test_a_paired_ratio_is_of_medians_and_its_interval_of_repeats() -> None:
    steady = texts({"plain": [2.0] * 3, "auto": [1.0, 1.0, 9.0]}, {"plain": [4.0], "auto": [2.0]})
    assert paired.ratio(steady, "auto", "plain").value == pytest.approx(2.0)
    steady = texts({"plain": [2.0] * 4, "auto": [1.0] * 4}, {"plain": [9.0] * 4, "auto": [6.0] * 4})
    found = paired.ratio(steady, "auto", "plain")
    assert (found.low, found.value, found.high) == pytest.approx((11 / 7,) * 3), "no noise"


def test_texts_that_two_arms_wrote_differently_are_left_out_of_their_ratio() -> None:
    both = texts({"plain": [2.0], "auto": [1.0]}, {"plain": [2.0], "auto": [1.0]})
    both[1]["auto"] = [run(0.01, (5, 6, 8))]
    found = paired.ratio(both, "auto", "plain")
    assert (found.texts, found.value) == (1, pytest.approx(2.0))
    both[0]["auto"] = both[1]["auto"]
    assert paired.ratio(both, "auto", "plain").verdict(0.1) == "no texts"


@pytest.mark.parametrize(
    ("low", "value", "high", "verdict"),
    [
        (0.96, 0.97, 0.98, "yes"),
        (0.94, 0.96, 0.98, "yes"),
        (0.90, 0.97, 1.10, "unsure"),
        (0.96, 1.20, 1.50, "yes"),
        (0.80, 0.90, 0.949, "no"),
    ],
)
def test_a_bound_is_reached_by_a_narrow_interval(
    low: float, value: float, high: float, verdict: str
) -> None:
    assert paired.Ratio(value, low, high, 3).verdict(0.95) == verdict


def test_a_contrary_draft_is_never_right_and_as_deep_as_the_real_one() -> None:
    with dflash.load("toy", "toy:oracle") as engine:
        plain = engine.generate("hello", max_tokens=40, block_size=1)
        contrary = Engine(policy.Contrary(engine.pair))  # type: ignore[arg-type]
        found = contrary.generate("hello", max_tokens=40, block_size=8)
        contrary.close()
        assert engine.generate("hello", max_tokens=3).token_ids == plain.token_ids[:3]
    assert found.token_ids == plain.token_ids
    assert (found.stats.accepted, found.stats.rounds) == (0, 39)
    assert found.stats.drafted > 200


def test_the_policys_table_has_a_line_per_kind_of_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "policy.json"
    flags = ["--target", "toy", "--draft", "toy:script:1,3,0", "--blocks", "2,8,99"]
    short = ["--prompts-per-set", "1", "--tokens", "12", "--repeats", "2"]
    policy.main([*flags, *short, "--out", str(out)])
    written = json.loads(out.read_text())
    groups = [*sets.HELD_OUT, policy.REPETITIVE, policy.RANDOM, policy.CONTRARY]
    assert [line["group"] for line in written["lines"]] == groups
    assert set(written["lines"][0]["fixed"]) == {"block 2", "block 8"}, "99 is past the native size"
    assert set(written["decode_seconds"]) == set(groups)
    printed = capsys.readouterr().out
    assert all(f"| {group} | 1 |" in printed for group in groups)


def test_the_look_up_is_measured_on_texts_that_do_not_repeat_themselves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ngram.json"
    short = ["--tokens", "12", "--repeats", "2", "--prompts-per-set", "3", "--blocks", "auto,8"]
    ngram.main(["--target", "toy", *short, "--out", str(out)])
    written = json.loads(out.read_text())
    assert set(written["ratios"]) == {"auto", "8"}
    assert len(written["counted"]) == len(written["compression"]) == 3
    assert "1.6 reached" in capsys.readouterr().out
    assert ngram.compression("the same again and " * 40) > ngram.MOST_COMPRESSION
    assert ngram.compression(" ".join(p.text for p in sets.load("gsm8k", 2))) < 3


def test_a_match_is_judged_up_to_its_first_wrong_draft() -> None:
    judged, right = lookups.Counts(), lookups.Counts()
    prompt, text = [5, 6, 7, 8], [5, 6, 7, 1, 2]
    assert list(lookups.rounds(prompt, text)) == [(1, 2, 1), (2, 1, 0)]
    lookups.count(prompt, text, judged, right)
    assert judged == {(1, 0): 1, (1, 1): 1, (2, 0): 1}
    assert right == {(1, 0): 1}


def test_what_a_match_is_worth_is_counted_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--target", "toy", "--backend", "toy", "--sets", "copying", "--prompts-per-set", "1"]
    lookups.main([*flags, "--tokens", "12", "--out", str(tmp_path / "found.json")])
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]["all"]
    assert [row[0] for row in rows] == [
        *("0 to 0", "1 to 2", "3 to 4", "5 to 8", "9 to 16", "17 and more")
    ]
    assert "17 and more" in capsys.readouterr().out


def test_the_copying_prompts_are_edits_and_quotes() -> None:
    for name in ("copying", "copying_again"):
        prompts = sets.load(name)
        assert len({p.text for p in prompts}) == len(prompts) == 12
        assert {p.id.partition("/")[0] for p in prompts} == {"edit", "quote"}


def test_a_mistake_on_the_command_line_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        acceptance.main(["--target", "/nowhere", "--draft", "none"])
    assert "no such file or folder" in capsys.readouterr().err
