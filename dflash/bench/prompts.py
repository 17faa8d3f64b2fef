"""The prompts of a run: named sets, files, or the small mixed set that ships with the package."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dflash.datasets import load_and_process_dataset
from dflash.errors import ConfigError
from dflash.verify.prompts import MIXED

ORDER = 42  # seed of the order in which upstream's benchmark takes a set
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Conversation:
    """User turns, asked one after the other."""

    id: str
    set: str
    category: str
    turns: tuple[str, ...]


def load(
    names: Sequence[str] = (),
    data_dir: Path | None = None,
    files: Sequence[Path] = (),
    most: int | None = None,
) -> list[Conversation]:
    """Up to ``most`` conversations of each named set and file; neither given: the mixed set.

    Raises whatever ``load_and_process_dataset`` raises, and ConfigError for a set without a row.
    """
    found = [_set(name, load_and_process_dataset(name, data_dir), most) for name in names]
    found += [_set(file.stem, load_and_process_dataset(file), most) for file in files]
    if not found:
        mixed = [Conversation(p.id, "mixed", p.id.partition("-")[0], (p.text,)) for p in MIXED]
        return mixed[:most]
    return [conversation for group in found for conversation in group]


def in_order(rows: Sequence[T], most: int | None) -> list[T]:
    """The first ``most`` of ``rows`` in upstream's order: a longer run contains a shorter one."""
    order = list(range(len(rows)))
    random.Random(ORDER).shuffle(order)
    return [rows[place] for place in order[:most]]


def _set(name: str, rows: Sequence[dict[str, Any]], most: int | None) -> list[Conversation]:
    if not rows:
        raise ConfigError(f"prompt set {name} has not one row")
    short = Path(name).stem
    everything = [
        Conversation(
            str(row.get("id", f"{short}/{number}")),
            short,
            str(row.get("category", short)),
            tuple(row["turns"]),
        )
        for number, row in enumerate(rows)
    ]
    return in_order(everything, most)
