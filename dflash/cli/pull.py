"""``dflash pull``."""

from __future__ import annotations


def pull() -> None:
    """Not written yet."""
    raise NotImplementedError
