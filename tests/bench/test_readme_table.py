"""The README's table of peers, from records of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import peers
from tests.bench.made import WORDS, drafted, outcome, record

ARMS = ["plain", "block 3", "transformers", "llama.cpp"]


def run_folder(folder: Path) -> Path:
    folder.mkdir()
    records = []
    for prompt in ("p", "q"):
        other = (*WORDS[:-1], 99) if prompt == "q" else WORDS
        fast = drafted(1.0, (8, 8, 5))
        assert fast.ids == tuple(range(40)) == WORDS
        answers = [outcome(2.0), fast, outcome(3.0), outcome(0.5, other)]
        for arm, answer in zip(ARMS, answers, strict=True):
            records += [record(arm, answer, prompt, repeat) for repeat in range(2)]
    lines = ['{"settings": {"tokens": 40}}', *(json.dumps(one.to_json()) for one in records)]
    (folder / "records.jsonl").write_text("\n".join(lines) + "\n")
    sheet = {"machine": "a machine", "threads": 2, "cores": 2, "commit": "abc"}
    sheet["date"] = "2026-11-30T05:00:00"
    (folder / "conditions.json").write_text(json.dumps(sheet))
    return folder


def test_the_table_is_written_between_its_marks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{peers.START} (how) -->\nold\n{peers.END}\nafter\n")
    flags = ["--table-only", "--out", str(run_folder(tmp_path / "run")), "--readme", str(readme)]
    peers.main(flags)
    text = readme.read_text()
    assert text.startswith(f"before\n{peers.START} (how) -->\n\n| on the demo pair |")
    assert text.endswith(f"{peers.END}\nafter\n") and "old" not in text
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert rows == [
        "| this package, plain | 19.5 | 1.50 (1.50 to 1.50) |  | 2 of 2 |",
        "| this package, DFlash, block 3 | 39.0 | 3.00 (3.00 to 3.00) | 1.86 | 2 of 2 |",
        "| transformers `generate` | 13.0 | 1.00 (1.00 to 1.00) |  | 2 of 2 |",
        "| llama.cpp, Q4_1 kernels | 78.0 | 6.00 (6.00 to 6.00) |  | 1 of 2 |",
    ]
    peers.main(flags)
    assert readme.read_text() == text, "once more changes nothing"
    assert "a machine, 2 of 2 cores, 2026-11-30, commit abc" in capsys.readouterr().out


def test_a_page_without_marks_is_left_alone() -> None:
    with pytest.raises(ValueError, match="peers: start"):
        peers.into("nothing here", "a table")


def test_the_readme_has_the_marks() -> None:
    page = (peers.ROOT / "README.md").read_text(encoding="utf-8")
    assert peers.into(page, "x") != page


def test_a_text_that_some_arm_has_once_less_is_left_out() -> None:
    records = [
        record(arm, outcome(2.0), prompt, repeat)
        for arm in ("plain", "transformers")
        for prompt in ("p", "q")
        for repeat in range(2)
        if (arm, prompt, repeat) != ("plain", "q", 1)
    ]
    rows, texts = peers.rows_of(records, ["plain", "transformers"])
    assert texts == 1 and all(row.totals.requests == 2 for row in rows)
