"""Pages of the documentation and the code blocks in them.

A comment on the line before a block says when it runs:

    <!-- run: demo -->   only where the demo pair may be fetched (marker ``demo``)
    <!-- run: never -->  needs something of the reader's; it must still compile

Everything else runs in the ordinary suite, on the toy pair.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").rglob("*.md")]
)
_FENCE = re.compile(
    r"(?:<!-- run: (?P<when>\w+) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced code block."""

    page: Path
    line: int
    language: str
    when: str  # always, demo, never
    code: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path, language: str) -> list[Block]:
    """The page's blocks in ``language``, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page,
            text.count("\n", 0, found.start("code")) + 1,
            found["language"],
            found["when"] or "always",
            found["code"],
        )
        for found in _FENCE.finditer(text)
        if found["language"] == language
    ]


def commands(block: Block) -> Iterator[list[str]]:
    """The commands of a shell block as words; pipes and comments cut off."""
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words.pop(0)
        if "|" in words:  # the last command of a pipe is ours: echo ... | dflash ...
            words = words[len(words) - words[::-1].index("|") :]
        if words:
            yield words


def ids(pages: list[Path]) -> list[str]:
    """Names for parametrised tests."""
    return [str(page.relative_to(ROOT)) for page in pages]
