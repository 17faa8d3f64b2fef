"""``dflash train``."""

from __future__ import annotations


def train() -> None:
    """Not written yet."""
    raise NotImplementedError
