"""The header of a GGUF file: what is read of it, and that a vocabulary stays in one piece."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import pytest

from dflash.errors import CheckpointError
from dflash.gguf_file import Strings, read_header

TEXTS = ["a", "", "Ġthe", "日本", "x" * 40, "<|end|>"]


def write(file: Path, texts: list[str]) -> Path:
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_token_list(texts)
    writer.add_array("llama.some.numbers", [3, 1, 2])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def tokens(file: Path) -> Strings:
    found = read_header(file).metadata["tokenizer.ggml.tokens"]
    assert isinstance(found, Strings)
    return found


def test_texts_are_a_sequence_like_any_other(tmp_path: Path) -> None:
    found = tokens(write(tmp_path / "a.gguf", TEXTS))
    assert list(found) == TEXTS and len(found) == len(TEXTS)
    assert found[2] == found[-4] == "Ġthe"
    assert found[1:4] == TEXTS[1:4]
    assert found.index("日本") == 3 and "b" not in found
    for place in (6, -7):
        with pytest.raises(IndexError):
            found[place]
    assert read_header(tmp_path / "a.gguf").metadata["llama.some.numbers"] == [3, 1, 2]


def test_texts_are_equal_where_all_of_them_are(tmp_path: Path) -> None:
    found = tokens(write(tmp_path / "a.gguf", TEXTS))
    assert found == TEXTS == found == tokens(write(tmp_path / "b.gguf", TEXTS))
    assert found != TEXTS[:-1] and found != 3
    assert found != tokens(write(tmp_path / "c.gguf", [*TEXTS[:-1], "<|eno|>"]))
    # the same bytes, cut elsewhere
    assert tokens(write(tmp_path / "d.gguf", ["ab", "c"])) != tokens(
        write(tmp_path / "e.gguf", ["a", "bc"])
    )


def test_a_vocabulary_is_not_one_object_a_token(tmp_path: Path) -> None:
    """Hundreds of thousands at each load would leave the interpreter's memory in pieces."""
    file = write(tmp_path / "large.gguf", [f"token {i}" for i in range(5000)])
    read_header(file)
    before = sys.getallocatedblocks()
    header = read_header(file)
    assert sys.getallocatedblocks() - before < 1000
    assert header.metadata["tokenizer.ggml.tokens"][4999] == "token 4999"


def test_texts_that_go_past_the_end_are_one_error(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.gguf", TEXTS).read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: whole.index(b"x" * 40) + 9])
    with pytest.raises(CheckpointError, match="damaged or incomplete"):
        read_header(tmp_path / "cut.gguf")


@pytest.mark.parametrize("alignment", [0, 3])
def test_an_alignment_that_is_no_power_of_two_is_damage(tmp_path: Path, alignment: int) -> None:
    whole = write(tmp_path / "a.gguf", TEXTS).read_bytes()
    key, kind, value = (
        b"general.alignment",
        (4).to_bytes(4, "little"),
        alignment.to_bytes(4, "little"),
    )
    more = len(key).to_bytes(8, "little") + key + kind + value
    keys = int.from_bytes(whole[16:24], "little") + 1
    changed = whole[:16] + keys.to_bytes(8, "little") + more + whole[24:]
    (tmp_path / "b.gguf").write_bytes(changed)
    with pytest.raises(
        CheckpointError, match=rf"incomplete \(general.alignment {alignment} is no power"
    ):
        read_header(tmp_path / "b.gguf")
