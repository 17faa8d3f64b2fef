"""The prompt sets under ``bench/prompts``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "prompts"
HELD_OUT = ("gsm8k", "humaneval", "mt_bench")
# Never seen by the demo draft, but for mt_bench/81: it is a question of vicuna_bench too.
ALL = (*HELD_OUT, "mbpp", "self_instruct", "vicuna_bench")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user turn."""

    id: str
    set: str
    text: str


def load(name: str, count: int | None = None) -> list[Prompt]:
    """``count`` prompts of a set, spread evenly over it (None = all)."""
    with (FOLDER / f"{name}.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    count = min(count or len(rows), len(rows))
    picked = [rows[i * len(rows) // count] for i in range(count)]
    return [Prompt(row["id"], name, row["turns"][0]) for row in picked]


def mixed(count: int) -> list[Prompt]:
    """``count`` prompts of all sets in turn."""
    columns = zip(*(load(name) for name in ALL), strict=True)
    return [prompt for row in columns for prompt in row][:count]
