"""The folder of a run: there once anything is in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from dflash.errors import ConfigError


@contextmanager
def made(folder: Path, *, trial: bool = False) -> Iterator[None]:
    """Make ``folder``; where the body fails, and after a ``trial``, it goes again if it is empty.

    Raises ConfigError where it cannot be made.
    """
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    with ExitStack() as stack:
        stack.callback(_remove, new)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {folder} cannot be made a folder: {error}") from error
        yield
        if not trial:
            stack.pop_all()


def _remove(folders: Sequence[Path]) -> None:
    """Remove empty folders, inner ones first."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()
