"""``dflash train`` as a person runs it, on a tiny target."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import dflash
from dflash.demo import HUB_ID
from dflash.doctor.measured.promise import KEY
from tests.backends.tiny import save_target, tiny_target, tiny_tokenizer
from tests.cli.running import Result, apart, run
from tests.train.rig import MASK
from tests.train.test_data import GOOD, write

SMALL = (
    *("--layers", 1, "--block-size", 4, "--mask-token-id", MASK, "--steps", 2, "--batch", 1),
    *("--anchors", 2, "--max-length", 64, "--threads", 1, "--seed", 3),
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("target")
    return save_target(tiny_target("llama"), tiny_tokenizer(), place)


@pytest.fixture(scope="module")
def made(target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A run over six conversations, and what it said."""
    place = tmp_path_factory.mktemp("run")
    data = write(place / "answers.jsonl", [GOOD] * 6)
    out = place / "draft"
    return out, run("train", "--model", target, "--data", data, "--out", out, *SMALL)


def test_few_conversations_are_enough_for_a_figure(made: tuple[Path, Result]) -> None:
    out, said = made
    assert said.code == 0, said.err
    assert "committed per verify pass on held-out prompts, and 1 comes without a draft" in said.err
    assert "to ship: README.md, config.json, model.safetensors" in said.err
    card = (out / "README.md").read_text()
    assert "committed per verify pass" in card
    assert str(out.parent) not in card, "where things lay is nobody else's business"
    assert "answers.jsonl" in card


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--seed", "9" * 30, "--seed must be at most"),
        ("--seed", "-5", "--seed must be at least 0"),
        ("--threads", "0", "--threads must be at least 1"),
        ("--threads", "99999999999", "--threads must be at most 512"),
        ("--learning-rate", "nan", "--learning-rate must be a number above 0"),
        ("--start-rate", "-1", "--start-rate must be a number from 0"),
        ("--start-rate", "0.1", "name a draft with --start"),
        ("--selector-first", "-1", "--selector-first must be at least 0"),
        ("--selector-first", "5", "make it one with --selector-rank"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(
    tmp_path: Path, option: str, value: str, words: str
) -> None:
    found = run("train", "--model", "t", "--data", "d", "--out", tmp_path / "o", option, value)
    assert found.code == 2 and words in " ".join(found.err.split())


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "draft"
    found = run("train", "--model", "t", "--data", "d", "--out", place)
    assert found.code == 2 and "cannot be made a folder" in " ".join(found.err.split())


def test_a_finished_run_is_not_resumed_and_leaves_nothing(made: tuple[Path, Result]) -> None:
    out, _ = made
    found = run("train", "--resume", "--out", out)
    assert found.code == 2
    assert "already finished, 2 steps" in found.err
    assert not list(out.glob("features.*"))


def test_only_what_a_flag_says_can_differ_from_the_run_that_is_resumed(
    made: tuple[Path, Result],
) -> None:
    out, _ = made
    found = run("train", "--resume", "--out", out, "--layers", 2, "--steps", 3)
    assert found.code == 2
    assert "--layers was 1 and is 2. Leave" in found.err


def test_a_run_may_be_made_longer_with_its_own_settings(made: tuple[Path, Result]) -> None:
    out, _ = made
    found = run("train", "--resume", "--out", out, "--steps", 3, "--json")
    assert found.code == 0, found.err
    assert json.loads(found.out)["steps"] == 3
    last = json.loads((out / "log.jsonl").read_text().splitlines()[-2])
    assert last["step"] == 3


def test_a_draft_that_was_not_judged_promises_nothing(target: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "answers.jsonl", [GOOD] * 2)
    out = tmp_path / "draft"
    found = run("train", "--model", target, "--data", data, "--out", out, *SMALL, "--json")
    assert found.code == 0, found.err
    assert json.loads(found.out)["mean_committed"] is None
    assert "was not measured" in found.err
    assert KEY not in json.loads((out / "config.json").read_text())["dflash_config"]
    card = (out / "README.md").read_text()
    assert "not measured" in card and "0.000" not in card


def test_data_that_is_not_there_is_said_before_the_target_is_read(tmp_path: Path) -> None:
    words = ("--model", tmp_path / "nowhere", "--out", tmp_path / "draft")
    found = run("train", *words, "--data", tmp_path / "nothing.jsonl")
    assert (found.code, "nothing.jsonl is not a file" in found.err) == (2, True)
    assert "no training data" in run("train", *words).err
    assert "nothing to resume" in run("train", *words, "--resume").err


@pytest.mark.parametrize("rows", [None, "{}\n"], ids=["no file", "a malformed line"])
def test_what_never_began_leaves_no_folder(target: Path, tmp_path: Path, rows: str | None) -> None:
    data = tmp_path / "answers.jsonl"
    if rows is not None:
        data.write_text(rows)
    out = tmp_path / "deep" / "draft"
    assert run("train", "--model", target, "--data", data, "--out", out, *SMALL).code == 2
    assert not (tmp_path / "deep").exists()
    out.mkdir(parents=True)
    assert run("train", "--model", target, "--data", data, "--out", out, *SMALL).code == 2
    assert out.is_dir(), "it was there before"


def test_a_target_that_is_nowhere_is_said_before_torch_is_imported(tmp_path: Path) -> None:
    data = write(tmp_path / "answers.jsonl", [GOOD])
    words = ("--model", "nobody/nothing", "--data", data, "--out", tmp_path / "out")
    code, said, modules = apart("train", *words, HF_HUB_OFFLINE="1")
    assert code == 1 and "HF_HUB_OFFLINE" in said
    assert "torch" not in modules and not (tmp_path / "out").exists()


def test_training_without_torch_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path / "answers.jsonl", [GOOD])
    monkeypatch.delitem(sys.modules, "dflash.train.run", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    found = run("train", "--model", "x", "--data", data, "--out", tmp_path / "draft")
    assert found.code == 2
    assert "pip install 'dflash-engine[train]'" in found.err
    assert "fault of ours" not in found.err


def test_a_draft_of_few_tokens_is_trained_loaded_and_lossless(target: Path, tmp_path: Path) -> None:
    data, out = write(tmp_path / "answers.jsonl", [GOOD] * 6), tmp_path / "draft"
    said = run(
        *("train", "--model", target, "--data", data, "--out", out, "--draft-vocab", 24, *SMALL)
    )
    assert said.code == 0, said.err
    config = json.loads((out / "config.json").read_text())
    assert config["draft_vocab_size"] == 24
    assert 0 < config["dflash_config"]["draft_vocab_coverage"] <= 1
    texts = []
    for name in (out, "none"):
        with dflash.load(target, name, device="cpu", dtype="float32", profile=False) as engine:
            answer = engine.generate("Why is the sky blue?", max_tokens=24, block_size=4)
            texts.append(answer.token_ids)
            if name == out:
                tables = engine.pair.draft.tables  # type: ignore[attr-defined]
                assert len(tables.target_ids) == 24
                assert answer.stats.drafted > 24
    assert texts[0] == texts[1]


@pytest.mark.parametrize("asked", [None, "demo"])
def test_the_demo_target_is_known_by_its_hub_name(
    asked: str | None, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash.demo.demo_target", lambda: target)
    data = write(tmp_path / "answers.jsonl", [GOOD] * 6)
    model = () if asked is None else ("--model", asked)
    said = run("train", *model, "--data", data, "--out", tmp_path / "draft", *SMALL)
    assert said.code == 0, said.err
    written = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert HUB_ID in json.dumps(written)
