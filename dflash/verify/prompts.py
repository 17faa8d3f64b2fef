"""A small mixed set to generate from: prose, code, JSON, mathematics, lists, other languages.

Short on purpose, so that an audit takes a minute, and varied, because a draft that fails on one
kind of text may shine on another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dflash.datasets import load_and_process_dataset


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user turn and what to call it."""

    id: str
    text: str


MIXED = (
    Prompt("prose-rain", "Explain in a few sentences why it rains more often near mountains."),
    Prompt("code-sort", "Write a Python function that sorts a list of words by length."),
    Prompt(
        "json-person",
        'Answer with JSON only: an object with the keys "name", "age" and "languages" for an '
        "invented person.",
    ),
    Prompt(
        "maths-apples",
        "A farmer has 12 baskets with 15 apples each and sells 47 apples. How many are left? "
        "Think step by step.",
    ),
    Prompt("chat-tired", "I am tired and cannot sleep. What could I try tonight?"),
    Prompt("list-planets", "List the planets of the solar system in order, one on each line."),
    Prompt("code-sql", "Write an SQL query for the three customers with the most orders."),
    Prompt("prose-story", "Tell a very short story about a lighthouse keeper and a lost letter."),
    Prompt("maths-equation", "Solve for x and show each step: 3x + 7 = 2(x - 4) + 20."),
    Prompt("edit-quote", "Repeat with the spelling corrected: 'Teh cat sat onn the mat.'"),
    Prompt("german-bread", "Erkläre in drei Sätzen, wie man Brot backt."),
    Prompt(
        "table-fruit", "Make a Markdown table of four fruits with their colour and a typical price."
    ),
)


def read(place: Path | None) -> tuple[Prompt, ...]:
    """The first turns of a JSONL file, or the mixed set.

    Raises DataError for a malformed line, ConfigError when there is no such file.
    """
    return MIXED if place is None else tuple(_from_file(place))


def _from_file(place: Path) -> Iterator[Prompt]:
    for number, row in enumerate(load_and_process_dataset(place), 1):
        yield Prompt(str(row.get("id", f"{place.stem}:{number}")), row["turns"][0])
