"""Files are replaced whole, or stay as they were."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

import pytest

from dflash.whole import write_whole


def test_a_file_is_made_with_its_folders_and_replaced_with_its_mode(tmp_path: Path) -> None:
    place = tmp_path / "a folder" / "ü" / "file.json"
    write_whole(place, "ä")
    assert place.read_text(encoding="utf-8") == "ä"
    place.chmod(0o640)
    write_whole(place, "b")
    assert (place.read_text(), stat.S_IMODE(place.stat().st_mode)) == ("b", 0o640)
    assert list(place.parent.iterdir()) == [place]


def test_a_disk_that_is_full_leaves_what_was_there_and_no_scrap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "file.json"
    place.write_text("before")

    def full(self: Path, text: str, encoding: str) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(place, "after")
    assert [file.name for file in tmp_path.iterdir()] == ["file.json"]
    assert place.read_text() == "before"
