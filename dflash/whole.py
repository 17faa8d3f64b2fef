"""Files that are whole or not there: written beside their place, then moved into it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from secrets import token_hex


def write_whole(place: Path, text: str) -> None:
    """Let ``place`` hold ``text``; nobody ever reads half of it, and a former file's mode stays.

    Raises OSError, and leaves what was there, and no scrap beside it.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_name(f".part-{token_hex(8)}")
    try:
        part.write_text(text, encoding="utf-8")
        with suppress(FileNotFoundError):
            part.chmod(place.stat().st_mode & 0o777)
        part.replace(place)
    finally:
        part.unlink(missing_ok=True)
