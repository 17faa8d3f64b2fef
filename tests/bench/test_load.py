"""Several requests at a time on one engine: the server's queue, the same texts, the wall clock."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash.bench import guards
from dflash.bench.load import Line, Wall, loads
from dflash.bench.rows import make_rows
from dflash.errors import EngineClosed
from dflash.results import Chunk
from dflash.serve.worker import Worker
from tests.bench.made import outcome
from tests.cli.running import run

PAIR = ("--model", "toy", "--draft", "toy:script:1,3,0")
SHORT = ("--max-tokens", 24, "--repeats", 2, "--max-samples", 6, "--no-costs")


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy is too fast for the guard against short times, and noise is not what is tested."""
    monkeypatch.setattr(guards, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(guards, "NOISY", 1e9)
    monkeypatch.setattr(guards, "UNSURE", 1e9)


def bench(*words: object) -> Any:
    done = run("bench", *PAIR, *SHORT, "--block-sizes", "4,auto", "--json", *words)
    assert done.code == 0, done.err
    return json.loads(done.out)


def texts_of(folder: Path) -> dict[tuple[Any, ...], Any]:
    rows = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()[1:]]
    return {(r["arm"], r["set"], r["prompt"], r["turn"], r["repeat"]): r["ids"] for r in rows}


def test_a_local_engine_is_asked_by_several_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    turn = Worker._turn

    def watched(self: Worker, job: Any) -> None:
        seen.append(self.running)
        turn(self, job)

    monkeypatch.setattr(Worker, "_turn", watched)
    found = bench("--concurrency", 3, "--out", tmp_path / "three")
    bench("--out", tmp_path / "one")
    assert 1 < max(seen) <= 3, "some beside each other, and never more than were asked for"
    assert texts_of(tmp_path / "three") == texts_of(tmp_path / "one")
    assert found["verdict"]["sentence"].startswith("identical: ")
    rows = {row["arm"]: row for row in found["rows"]}
    for arm, load in found["loads"].items():
        mine = rows[arm]["totals"]
        assert (load["requests"], load["tokens"]) == (mine["requests"], mine["tokens"])
        assert load["throughput"] == pytest.approx(load["tokens"] / load["seconds"])
        assert rows[arm]["rate"] == pytest.approx(load["throughput"])
    plain, fast = (found["loads"][arm]["throughput"] for arm in ("plain", "block 4"))
    assert rows["block 4"]["speedup"]["value"] == pytest.approx(fast / plain, rel=0.2)
    assert any(note.startswith("block 4: ") and "concurrency 3" in note for note in found["notes"])


def test_one_at_a_time_has_no_loads() -> None:
    assert bench("--concurrency", 1)["loads"] == {}


def test_other_programs_answer_one_at_a_time() -> None:
    done = run("bench", *PAIR, *SHORT, "--against", "ngram", "--concurrency", 2)
    assert done.code == 2 and "one request at a time" in done.err


def test_a_fault_in_a_stream_is_raised_as_it_is() -> None:
    def faulty() -> Iterator[Chunk]:
        yield Chunk("x", (1,), ("target",))
        raise EngineClosed("closed")

    with Line(2) as line:
        chunks = line(faulty())
        assert next(chunks).text == "x"
        with pytest.raises(EngineClosed, match="closed"):
            next(chunks)


def walls(plain: tuple[float, float], fast: tuple[float, float]) -> dict[str, list[Wall]]:
    return {
        "plain": [Wall(3, 300, seconds) for seconds in plain],
        "fast": [Wall(3, 300, seconds) for seconds in fast],
    }


def test_a_speed_up_is_of_the_wall_clock() -> None:
    times = walls((4.0, 4.0), (2.0, 2.0))
    assert loads(times)["fast"].rate == 150.0
    texts = [{"plain": [outcome(9.0)] * 2, "fast": [outcome(9.0)] * 2}]
    (_, row) = make_rows(texts, list(times), "plain", greedy=True, proven={}, walls=times)
    assert (row.speedup.value, row.rate, row.refused) == (2.0, 150.0, None)


def test_a_speed_up_by_the_wall_clock_is_refused_like_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guards, "NOISY", 0.1)
    texts = [{"plain": [outcome(9.0)] * 2, "fast": [outcome(9.0)] * 2}]

    def row(times: Any, texts: Any = texts, **more: Any) -> Any:
        given = {"greedy": True, "proven": {}, "walls": times, **more}
        return make_rows(texts, list(times), "plain", **given)[1]

    assert "noisy" in row(walls((4.0, 4.0), (2.0, 3.0))).refused
    steady = walls((4.0, 4.0), (2.0, 2.0))
    assert row(steady, proven={"fast": "differs"}).refused == "differs"
    other = [{"plain": [outcome(9.0)] * 2, "fast": [outcome(9.0, tuple(range(7, 47)))] * 2}]
    assert "no text counts" in row(steady, other).refused
