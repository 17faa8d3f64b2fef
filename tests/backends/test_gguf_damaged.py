"""Damaged GGUF files, and files that are none: one error with what to do, whoever opens them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("xllamacpp")

from dflash.backends.gguf import open_pair  # noqa: E402 - after the checks
from dflash.backends.torch.checkpoint import resolve  # noqa: E402
from dflash.config import LoadConfig  # noqa: E402
from dflash.convert import convert  # noqa: E402
from dflash.errors import CheckpointError  # noqa: E402
from dflash.gguf_file import read_header  # noqa: E402
from dflash.inspection import inspect  # noqa: E402
from dflash.opening import backend_of  # noqa: E402

from .gguf_files import save_folder  # noqa: E402
from .tiny import tiny_target, tiny_tokenizer  # noqa: E402
from .tiny_gguf import write_gguf  # noqa: E402


def as_convert_source(file: Path) -> object:
    return convert(file, "hf", file.parent / "made")


def as_convert_target(file: Path) -> object:
    draft = save_folder(file.parent / "draft")
    return convert(draft, "gguf", file.parent / "made.gguf", target=file)


def by_the_gguf_backend(file: Path) -> object:
    load = LoadConfig(str(file), backend="gguf")
    assert backend_of(load) == "gguf"
    return open_pair(load)


ENTRIES: dict[str, Callable[[Path], object]] = {
    "torch": lambda file: resolve(str(file)),
    "gguf": by_the_gguf_backend,
    "inspect": lambda file: inspect(str(file)),
    "convert": as_convert_source,
    "convert's target": as_convert_target,
}
every_entry = pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file in order."""
    file = tmp_path_factory.mktemp("whole") / "w.gguf"
    return write_gguf(file, tiny_target("llama"), tiny_tokenizer()).read_bytes()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions of torch's go where the test's files are."""
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))


@every_entry
@pytest.mark.parametrize("keep", [4, 20, 300, 30_000, -2_000])
def test_a_truncated_file_is_to_be_fetched_again(
    tmp_path: Path, whole: bytes, entry: Callable[[Path], object], keep: int
) -> None:
    file = tmp_path / "cut.gguf"
    file.write_bytes(whole[:keep])
    with pytest.raises(CheckpointError) as found:
        entry(file)
    said = str(found.value)
    assert f"{file} is damaged or incomplete (" in said and said.endswith("): get it again")
    assert "the file ends before the tensor" in said or "in the middle of its header" in said


@every_entry
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty: get it again"),
        (b"GG", "is not a GGUF file, whatever its name says: get it again"),
        (b"<!DOCTYPE html>", "is not a GGUF file, whatever its name says: get it again"),
    ],
)
def test_a_file_that_only_has_the_name_is_to_be_fetched_again(
    tmp_path: Path, entry: Callable[[Path], object], content: bytes, says: str
) -> None:
    file = tmp_path / "named.gguf"
    file.write_bytes(content)
    with pytest.raises(CheckpointError) as found:
        entry(file)
    assert str(found.value) == f"{file} {says}"


@pytest.mark.parametrize("name", ["torch", "gguf", "inspect"])
def test_a_file_of_another_kind_is_not_the_one_to_give(tmp_path: Path, name: str) -> None:
    file = tmp_path / "README.md"
    file.write_text("# A model\n", encoding="utf-8")
    with pytest.raises(CheckpointError) as found:
        ENTRIES[name](file)
    said = str(found.value)
    assert said == f"{file} is not a GGUF file: give a model's folder, or a .gguf file"


def test_numbers_that_make_no_sense_are_damage(tmp_path: Path, whole: bytes) -> None:
    """Each byte of the header's beginning turned over: an error of ours, or a header."""
    file = tmp_path / "odd.gguf"
    read = 0
    for place in range(4, 400):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            read_header(file)
            read += 1
        except CheckpointError as problem:
            assert "is damaged or incomplete (" in str(problem)
    assert 0 < read < 396
