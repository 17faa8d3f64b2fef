"""``dflash inspect``."""

from __future__ import annotations


def inspect() -> None:
    """Not written yet."""
    raise NotImplementedError
