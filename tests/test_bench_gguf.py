"""The measurements of the gguf backend, on a tiny target and its sidecar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")  # makes the tiny files
pytest.importorskip("xllamacpp")

from bench import (
    gguf_acceptance,
    gguf_files,
    gguf_identical,
    gguf_overhead,
    gguf_soak,
    gguf_speed,
    sets,
)
from bench.sets import Prompt
from dflash.bench.arms import Run
from tests.backends.gguf_files import save_folder, save_sidecar
from tests.backends.tiny import tiny_target, tiny_tokenizer
from tests.backends.tiny_gguf import write_gguf


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, a draft for it as a sidecar and as a folder."""
    folder = tmp_path_factory.mktemp("gguf")
    target = write_gguf(folder / "target.gguf", tiny_target("llama"), tiny_tokenizer())
    sidecar = save_sidecar(folder / "draft.gguf", target)
    return {"target": target, "sidecar": sidecar, "folder": save_folder(folder / "draft")}


@pytest.fixture(autouse=True)
def small(files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the demo pair and its prompts."""
    prompts = [Prompt(f"p/{place}", "p", f"One, {place} and") for place in range(6)]
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf_files, "target", lambda _: files["target"])
    monkeypatch.setattr(gguf_files, "sidecar", lambda **_: files["sidecar"])
    monkeypatch.setattr(gguf_acceptance, "demo_draft", lambda: files["folder"])
    monkeypatch.setattr(sets, "load", lambda _, count=None: prompts[:count])
    monkeypatch.setattr(sets, "mixed", lambda count: prompts[:count])


def result(module: Any, out: Path, *flags: object, leaves: object = None) -> Any:
    """What ``module`` writes, run with ``flags``; ``leaves`` is its exit status."""
    words = [*map(str, flags), "--threads", "1", "--out", str(out / "found.json")]
    if leaves is None:
        module.main(words)
    else:
        with pytest.raises(SystemExit) as left:
            module.main(words)
        assert left.value.code == leaves
    return json.loads((out / "found.json").read_text(encoding="utf-8"))


def test_ids_are_held_against_single_calls(tmp_path: Path) -> None:
    found = result(gguf_identical, tmp_path, "--prompts", 2, "--tokens", 8, leaves=False)["found"]
    for kind in ("q4_1", "q8_0"):
        assert found[kind]["prompts"] == 2
        assert found[kind]["same"] == {"plain": 2, "block 4": 2, "auto": 2}


def test_acceptance_is_that_of_torch_place_by_place(tmp_path: Path) -> None:
    found = result(gguf_acceptance, tmp_path, "--rounds", 8, "--tokens", 16, leaves=False)
    assert found["rounds"] >= 8
    ours, theirs = found["found"]["gguf"], found["found"]["torch"]
    assert len(ours) == len(theirs) == len(found["apart"])
    assert found["apart"] == [abs(a - b) for a, b in zip(ours, theirs, strict=True)]


def test_another_draft_would_be_beyond_the_bound(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With text that a draft of the folder's says, and a sidecar that says something else."""
    walked = iter([[2, 2, 2], [0, 0, 0]])
    monkeypatch.setattr(gguf_acceptance, "walk", lambda *_: next(walked))
    found = result(gguf_acceptance, tmp_path, "--rounds", 3, "--tokens", 16, leaves=True)
    assert found["apart"][:3] == [1, 1, 0]


def test_memory_is_watched_over_requests_and_loads(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_soak, "BOUND", 1.0)  # a few requests: the pools still fill
    few = ("--requests", 12, "--cycles", 4, "--target", files["target"])
    flags = (*few, "--draft", files["sidecar"], "--tokens", 8)
    found = result(gguf_soak, tmp_path, *flags, leaves=False)
    assert (len(found["bytes"]["requests"]), len(found["bytes"]["cycles"])) == (12, 4)
    assert found["descriptors"] <= 0
    monkeypatch.setattr(gguf_soak, "BOUND", -1.0)
    result(gguf_soak, tmp_path, *flags, leaves=True)


def test_speed_is_against_plain_steps_of_the_same_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("--tokens", 8, "--prompts-per-set", 1, "--repeats", 1, "--sets", "p")
    mixed = ("--method", "dflash+ngram", "--blocks", "auto,4", "--copied", 1e-9)
    found = result(gguf_speed, tmp_path, *few, *mixed)
    assert {"p plain", "p auto", "p 4"} <= found["found"].keys()
    assert all(0 < share < 1 for share in found["overhead"].values())
    assert "share of the time outside llama.cpp" in capsys.readouterr().out


def test_texts_that_copy_are_a_group_of_their_own() -> None:
    texts = [{"plain": [Run(ids, 1, 0.1, 1.0)]} for ids in ((1, 2, 3, 4), (9, 8, 7, 6))]
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]
    assert gguf_speed.groups("p", prompts, texts, 0.3) == {"p": texts, "p, 0.3 copied": texts[:1]}
    assert gguf_speed.groups("p", prompts, texts, 0.9) == {"p": texts}
    assert gguf_speed.groups("p", prompts, texts, 0.0) == {"p": texts}


@pytest.mark.parametrize("taps", [(), ("--taps",)])
def test_our_share_of_a_round_is_told(taps: tuple[str, ...], tmp_path: Path) -> None:
    few = ("--kinds", "q4_1", "--tokens", 9, "--prompts-per-set", 1, "--blocks", "auto,4")
    found = result(gguf_overhead, tmp_path, *few, *taps)["found"]
    assert list(found) == [
        *("q4_1 plain", "q4_1 plain, dflash loaded", "q4_1 dflash auto", "q4_1 dflash 4")
    ]
    for one in found.values():
        assert one["rounds"] and 0 < one["host_share"][0] < 1
