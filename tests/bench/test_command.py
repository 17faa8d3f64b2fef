"""``dflash bench`` and ``dflash sweep`` as a person runs them, on the toy pair."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from dflash.bench import guards, roofline, session
from dflash.bench.budget import Budget
from dflash.bench.lock import lock
from dflash.bench.totals import add_up
from dflash.bench.trial import Record
from dflash.errors import ConfigError
from tests.cli.running import Result, run
from tests.drafts.configs import config as tiny

PAIR = ("--model", "toy", "--draft", "toy:script:1,3,0")
SHORT = ("--max-tokens", 24, "--repeats", 2, "--max-samples", 3)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy is too fast for the guard against short times, and noise is not what is tested."""
    monkeypatch.setattr(guards, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(guards, "NOISY", 1e9)
    monkeypatch.setattr(guards, "UNSURE", 1e9)
    monkeypatch.setattr(roofline, "COPIED", 1 << 20)
    monkeypatch.setattr(roofline, "SIZE", 64)


def bench(*words: object) -> Result:
    return run("bench", *PAIR, *SHORT, *words)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    done = bench("--block-sizes", "2,4,auto", "--out", tmp_path / "run")
    assert done.code == 0, done.err
    return tmp_path / "run"


def report_of(folder: Path) -> Any:
    return json.loads((folder / "report.json").read_text())


def records_of(folder: Path) -> list[Record]:
    lines = (folder / "records.jsonl").read_text().splitlines()[1:]
    return [Record.from_json(json.loads(line)) for line in lines]


def test_totals_of_the_report_are_the_sums_of_its_records(out: Path) -> None:
    records, report = records_of(out), report_of(out)
    assert len(records) == 4 * 3 * 2
    for row in report["rows"]:
        mine = [r.outcome for r in records if r.key.arm == row["arm"]]
        want = json.loads(json.dumps(add_up(mine).to_json()))
        for name, value in row["totals"].items():  # sums of times depend on the order a little
            assert value == (value if value is None else pytest.approx(want[name])), name
        assert row["totals"]["tokens"] == sum(len(one.ids) for one in mine)
    for arm in range(4):
        parts = [group[arm]["totals"]["rounds"] for group in report["categories"].values()]
        assert sum(parts) == report["rows"][arm]["totals"]["rounds"]


def test_the_report_has_what_a_figure_depends_on(out: Path) -> None:
    report = report_of(out)
    assert [row["arm"] for row in report["rows"]] == ["plain", "block 2", "block 4", "auto"]
    assert report["verdict"]["lossless"] and report["verdict"]["compared"] == 3 * 3 * 2
    assert set(report["protocols"]) == {"block 2", "block 4"}
    assert [block["block_size"] for block in report["cost"]][:3] == [1, 2, 4]
    assert report["roofline"]["bytes_per_second"] > 0
    assert {"command", "commit", "machine", "versions"} <= set(report["sheet"])
    assert report["settings"]["tokens"] == 24 and report["pair"]["native_block_size"] == 16


def test_the_page_needs_nothing_from_elsewhere(out: Path) -> None:
    page = (out / "report.html").read_text()
    assert "<script" not in page and "@import" not in page and "url(http" not in page
    assert not re.search(r"""(src|href)=["'](?!#)""", page)
    assert page.count("<svg") >= 4
    assert "prefers-color-scheme: dark" in page and "@media print" in page
    assert "#0505" not in page, "every stand-in became a variable of the page"
    assert report_of(out)["advice"]["sentence"] in page.replace("&#39;", "'")
    assert report_of(out)["verdict"]["sentence"] in page


def test_a_run_goes_on_and_takes_more_arms(out: Path) -> None:
    before = records_of(out)
    done = bench("--block-sizes", "2,4,8", "--resume", "--no-costs", "--out", out)
    assert done.code == 0, done.err
    after = records_of(out)
    assert after[: len(before)] == before
    assert {r.key.arm for r in after[len(before) :]} == {"block 8"}
    arms = [row["arm"] for row in report_of(out)["rows"]]
    assert arms == ["plain", "block 2", "block 4", "block 8"], "auto was not asked for this time"


def test_a_run_of_other_settings_is_not_continued(out: Path) -> None:
    done = bench("--resume", "--max-tokens", 25, "--out", out)
    assert done.code == 2 and "other settings" in done.err


def test_the_terminal_shows_arms_verdict_and_advice() -> None:
    done = bench("--block-sizes", "1,4", "--no-costs")
    assert done.code == 0
    assert "block 4" in done.out and "identical: 6 texts" in done.out
    assert re.search(r"use (block 4|plain decoding)", done.out)


def test_sets_come_from_a_folder_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "mt_bench.jsonl").write_text('{"turns": ["a?", "b?"], "category": "chat"}\n')
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"prompt": "c?"}\n')
    words = ("--data-dir", tmp_path, "--dataset", "mt-bench", "--prompts", mine, "--json")
    done = bench(*words, "--no-costs", "--block-sizes", 4)
    found = json.loads(done.out)
    assert set(found["sets"]) == {"mt-bench", "mine"}
    assert found["rows"][0]["totals"]["requests"] == (2 + 1) * 2
    missing = bench("--data-dir", tmp_path, "--dataset", "gsm8k")
    assert missing.code == 2 and "which has mine, mt_bench" in missing.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--block-sizes", "4,17"), "more than the draft's native 16"),
        (("--block-sizes", "4,x"), "must be a number or 'auto'"),
        (("--resume",), "needs the --out"),
        (("--against", "vllm"), "--against vllm is not known"),
        (("--against", "ngram", "--temperature", 1), "at temperature 0"),
        (("--against", "llama.cpp"), "needs a .gguf file"),
        (("--against", "reference-wheel"), "needs a DFlash draft in a local folder"),
        (("--draft", "none"), "no draft to measure"),
        (("--draft-tree", "auto"), "or --block-sizes auto"),
        (("--draft-tree", 8, "--base-url", "http://127.0.0.1:1"), "is for local pairs"),
        (("--write-config", "--no-costs"), "draft in a local folder"),
    ],
)
def test_what_cannot_be_measured_is_one_error(words: tuple[object, ...], message: str) -> None:
    done = bench(*words)
    assert done.code == 2 and message in done.err


def test_samples_are_measured_without_a_verdict() -> None:
    words = ("--temperature", 1, "--ignore-eos")  # or chance would end a sample early now and then
    done = bench(*words, "--json", "--no-costs", "--block-sizes", 4)
    found = json.loads(done.out)
    assert found["verdict"] is None
    assert found["rows"][1]["speedup"]["texts"] == 3


def test_the_look_up_can_join_as_an_arm() -> None:
    done = bench("--against", "ngram", "--json", "--no-costs", "--block-sizes", 4)
    found = json.loads(done.out)
    assert [row["arm"] for row in found["rows"]] == ["plain", "block 4", "ngram"]
    assert found["rows"][2]["left_out"].get("texts differ") is None


def test_trees_are_measured_beside_plain_decoding(tmp_path: Path) -> None:
    words = ("--draft-tree", 20, "--against", "ngram", "--block-sizes", "4,auto", "--no-costs")
    done = bench(*words, "--json", "--out", tmp_path / "run")
    found = json.loads(done.out)
    assert found["settings"]["draft_tree"] == 20
    assert [row["arm"] for row in found["rows"]] == ["plain", "block 4", "auto", "ngram"]
    fixed = [r.outcome for r in records_of(tmp_path / "run") if r.key.arm == "block 4"]
    assert all(one.drafted > 3 * one.rounds for one in fixed)
    assert found["verdict"]["sentence"].startswith("identical")
    chains = ("--against", "ngram", "--block-sizes", "4,auto", "--no-costs", "--resume")
    assert bench(*chains, "--out", tmp_path / "run").code == 2
    words = ("--draft-tree", "auto", "--block-sizes", "auto", "--no-costs", "--json")
    auto = json.loads(bench(*words).out)
    assert [row["arm"] for row in auto["rows"]] == ["plain", "auto"]


def test_quick_is_short(tmp_path: Path) -> None:
    done = run("bench", *PAIR, "--quick", "--json", "--no-costs", "--block-sizes", 4)
    found = json.loads(done.out)
    assert (found["settings"]["tokens"], found["settings"]["repeats"]) == (48, 2)
    assert found["rows"][0]["totals"]["requests"] == 3 * 2


class Ticking(Budget):
    """A budget whose clock goes on by a second a look."""

    def __init__(self, seconds: float | None) -> None:
        super().__init__(seconds, itertools.count().__next__)


@pytest.mark.parametrize(("seconds", "whole"), [(7, 1), (11, 2), (3, 0)])
def test_a_run_ends_in_time_and_only_what_is_complete_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int, whole: int
) -> None:
    monkeypatch.setattr(session, "Budget", Ticking)
    words = ("--block-sizes", 4, "--warmup", 0, "--seconds", seconds, "--out", tmp_path / "run")
    done = bench(*words)
    assert done.code == 0, done.err
    assert len(records_of(tmp_path / "run")) == seconds - 1
    found = report_of(tmp_path / "run")
    assert [row["totals"]["requests"] for row in found["rows"]] == [2 * whole] * 2
    assert f"time was up after {seconds} s: {whole} of 3 prompts complete" in done.out
    assert not found["cost"], "there was no time for it"
    if not whole:
        assert found["verdict"] is None, "nothing was compared"
        assert "no recommendation" in done.out
        assert len(done.out.splitlines()) <= 3, "no table of nothing, no line for each of its rows"


def test_a_place_that_cannot_be_written_is_said_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("here first")
    for place in (tmp_path / "file", tmp_path / "file" / "below", "/dev/null"):
        done = bench("--out", place)
        assert done.code == 2
        assert done.err.startswith(f"error: --out {place} cannot be written")


def test_time_is_for_one_request_after_the_other() -> None:
    refused = bench("--seconds", 5, "--concurrency", 2)
    assert refused.code == 2 and "--concurrency" in refused.err
    assert bench("--seconds", 0).code == 2
    both = ("--quick", "--concurrency", 2, "--no-costs", "--block-sizes", 4, "--json")
    assert run("bench", *PAIR, *both).code == 0


def test_a_sweep_says_what_it_found() -> None:
    done = run("sweep", *PAIR, "--max-tokens", 24, "--json")
    found = json.loads(done.out)
    assert done.code == 0 and found["stopped"] in ("decided", "out of prompts")
    assert found["block_size"] in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
    assert set(found["heats"][0]["speedup"]) == {
        f"block {size}" for size in (2, 3, 4, 5, 6, 8, 10, 12, 16)
    }
    said = run("sweep", *PAIR, "--max-tokens", 24, "--block-sizes", "2,4")
    assert re.search(r"^block (1|2|4)\b", said.out, re.M)


@pytest.mark.parametrize("nested", [True, False])
def test_the_block_is_written_beside_the_native_one(tmp_path: Path, nested: bool) -> None:
    config = tiny()
    if not nested:
        config |= config.pop("dflash_config")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert lock(str(tmp_path), 4) == file
    after = json.loads(file.read_text())
    place = after["dflash_config"] if "dflash_config" in config else after
    assert place.pop("default_block_size") == 4
    assert after == config, "nothing else changed"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json"]


def test_a_block_larger_than_the_native_one_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny()))
    with pytest.raises(ConfigError, match="more than the draft's native"):
        lock(str(tmp_path), 99)
    with pytest.raises(ConfigError, match="local folder"):
        lock("owner/draft", 4)
