"""What an engine remembers of a pair: where, when it counts, and that it never gets in the way."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dflash import profiles
from dflash.backends.toy import ToyModel, ToyPair
from dflash.core.profile import Profile
from dflash.engine import Engine, load
from dflash.ngram_pair import NgramPair
from dflash.profiles import ProfileFile, file_of
from tests.cli.running import run


@dataclass(frozen=True)
class Remembered(ToyPair):
    """A toy pair that says on what its speed depends."""

    threads: str = "2"
    target_name: str = "toy"

    def runs_on(self) -> dict[str, str]:
        return {"device": "cpu", "dtype": "float32", "threads": self.threads}


def pair(**changes: Any) -> Any:
    model = ToyModel(eos_ids=frozenset())
    return Remembered(model, **{"draft_name": "toy:oracle", "default_block_size": None, **changes})


def learn(**changes: Any) -> ProfileFile:
    found = file_of(pair(**changes))
    assert found is not None
    with Engine(pair(**changes), found) as engine:
        engine.generate("hello", max_tokens=60)
    return found


def costs_of(file: ProfileFile) -> list[Any]:
    return file.read().to_json()["costs"]


def test_an_engine_starts_with_what_the_last_one_measured() -> None:
    file = learn()
    assert file.path.parent == profiles.folder()
    assert costs_of(file)
    second = Engine(pair(), file)
    assert second._profile.costs.knows(0, 0)
    first_round = next(iter(second._profile.to_json()["survival"].values()))
    assert first_round[0] > 0.6, "the oracle is known to be right"


def test_the_file_is_written_at_close_and_not_before() -> None:
    file = file_of(pair())
    assert file is not None
    engine = Engine(pair(), file)
    engine.generate("hello", max_tokens=60)
    assert not file.path.exists()
    engine.close()
    assert file.path.exists()
    assert [p.name for p in file.path.parent.iterdir()] == [file.path.name], "no scraps"
    written = file.path.stat().st_mtime_ns
    engine.close()
    assert file.path.stat().st_mtime_ns == written


def test_what_the_speed_depends_on_has_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    kinds = [
        pair(),
        pair(threads="1"),
        pair(draft_name="toy:random"),
        pair(draft_name=str(tmp_path / "draft")),
        pair(target_name="other"),
        NgramPair(pair()),
    ]
    files = [file_of(kind) for kind in kinds]
    assert len({file.path for file in files if file}) == len(kinds)


def test_a_folder_is_one_draft_however_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "draft").mkdir()
    monkeypatch.chdir(tmp_path)
    for suffix in ("", "+ngram"):
        names = (f"draft{suffix}", f"{tmp_path}/draft{suffix}", f"./draft{suffix}")
        files = [file_of(pair(draft_name=name)) for name in names]
        assert len({file.path for file in files if file}) == 1


def test_weights_trained_anew_make_the_file_old(tmp_path: Path) -> None:
    weights = tmp_path / "draft" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"1")
    name = str(weights.parent)
    learn(draft_name=name)
    file = file_of(pair(draft_name=name))
    assert file and costs_of(file)
    weights.write_bytes(b"2")
    os.utime(weights, ns=(5, 5))
    again = file_of(pair(draft_name=name))
    assert again and again.path == file.path
    assert not costs_of(again)
    learn(draft_name=name)
    assert costs_of(again), "written anew"


def _with(path: Path, **changes: Any) -> str:
    return json.dumps({**json.loads(path.read_text()), **changes})


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: "",
        lambda path: "not json",
        lambda path: "[]",
        lambda path: "{}",
        lambda path: path.read_text()[:-20],
        lambda path: _with(path, stamp={"format": "0"}),
        lambda path: _with(path, pair={}),
        lambda path: _with(path, profile=None),
        lambda path: _with(path, profile={"costs": [[0, 0, -1]], "survival": {}}),
        lambda path: _with(path, profile={"costs": [[0, 0, float("nan")]], "survival": {}}),
        lambda path: _with(path, profile={"costs": [[0, 0]], "survival": {}}),
        lambda path: _with(path, profile={"costs": [[0, -3, 5]], "survival": {}}),
        lambda path: _with(path, profile={"costs": [[0, 10**7, 5]], "survival": {}}),
        lambda path: _with(path, profile={"costs": [["-1", "0", "5"]], "survival": {}}),
        lambda path: _with(path, profile={"costs": [[0, 1, 10**400]], "survival": {}}),
        lambda path: _with(path, profile={"costs": [[0, float("inf"), 5]], "survival": {}}),
        lambda path: "[" * 100_000,
        lambda path: _with(path, profile={"costs": [], "survival": {"0": [0.5]}}),
        lambda path: _with(path, profile={"costs": [], "survival": {"0.0": [2]}}),
        lambda path: _with(path, profile={"costs": [], "survival": {"0.0": 1}}),
    ],
)
def test_a_damaged_or_old_file_counts_as_none_and_is_written_anew(damage: Any) -> None:
    file = learn()
    file.path.write_text(damage(file.path))
    assert not costs_of(file)
    assert not file.read().to_json()["survival"]
    learn()
    assert costs_of(file)


def test_bytes_that_are_no_text_count_as_none() -> None:
    file = learn()
    file.path.write_bytes(b"\xff\xfe\x00")
    assert not costs_of(file)


def test_a_place_that_cannot_be_written_is_nobodys_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(profiles, "folder", lambda: tmp_path / "file" / "profiles")
    file = learn()
    assert not file.path.exists()


def test_nothing_measured_is_nothing_written() -> None:
    file = file_of(pair())
    assert file is not None
    with Engine(pair(), file) as engine:
        engine.generate("hello", max_tokens=20, block_size=1)
    assert not file.path.exists()
    file.write(Profile())
    assert not file.path.exists()


def test_the_toy_is_not_remembered_and_neither_is_a_target_alone() -> None:
    assert file_of(ToyPair(draft_name="toy:oracle")) is None
    assert file_of(pair(draft_name=None)) is None
    with load("toy", "toy:oracle") as engine:
        engine.generate("hello", max_tokens=60, block_size="auto")
    assert not list(profiles.folder().iterdir())


def test_profile_false_neither_reads_nor_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    file = learn()
    before = file.path.read_bytes()
    monkeypatch.setattr("dflash.engine.open_pair", lambda config: pair())
    with load("toy", "toy:oracle", profile=False) as engine:
        assert not engine._profile.costs.knows(0, 0)
        engine.generate("hello", max_tokens=60)
    assert file.path.read_bytes() == before
    with load("toy", "toy:oracle") as engine:
        assert engine._profile.costs.knows(0, 0)


def test_a_real_pair_says_what_its_speed_depends_on(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tests.backends.tiny import save_target, tiny_target, tiny_tokenizer

    target = save_target(tiny_target(), tiny_tokenizer(), tmp_path / "target")
    with load(str(target), "ngram", device="cpu") as engine:
        assert {"device", "dtype", "threads"} <= set(engine.pair.runs_on())
        assert engine._file is not None
        assert str(target) in engine._file.pair["target"]
        engine.generate([5, 6, 7] * 5, max_tokens=40, ignore_eos=True)
    assert engine._file.path.exists()


def test_the_command_line_can_leave_profiles_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash.engine.open_pair", lambda config: pair())
    words = ("hello", "--model", "toy", "--draft", "toy:oracle", "--max-tokens", "40")
    assert run("generate", *words, "--no-profile").code == 0
    assert not list(profiles.folder().iterdir())
    assert run("generate", *words).code == 0
    assert len(list(profiles.folder().iterdir())) == 1
