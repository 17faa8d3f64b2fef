"""The picture in the README: a real run of the demo, as an SVG.

    python -m bench.screenshot "How do rainbows form?" --max-tokens 96

Runs the command itself with colours on and draws what it printed; nothing is retouched.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

OUT = Path(__file__).parents[1] / "docs" / "img" / "show-drafts.svg"
WIDTH = 112  # columns
FLAGS = ["--show-drafts", "--compare"]
THEME = TerminalTheme(
    background=(22, 27, 34),
    foreground=(230, 237, 243),
    normal=[  # black, red, green, yellow, blue, magenta, cyan, white
        (72, 79, 88),
        (255, 123, 114),
        (63, 185, 80),
        (210, 153, 34),
        (88, 166, 255),
        (188, 140, 255),
        (57, 197, 207),
        (177, 186, 196),
    ],
)


def record(words: Sequence[str]) -> str:
    """What ``dflash generate WORDS`` prints to a colour terminal. Raises CalledProcessError."""
    colours = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    colours.pop("NO_COLOR", None)
    run = subprocess.run(
        [sys.executable, "-m", "dflash", "generate", *words],
        env=colours,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    return run.stdout


def draw(words: Sequence[str], printed: str, out: Path) -> None:
    """Write the SVG."""
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True)
        shown = " ".join(f'"{word}"' if " " in word else word for word in words)
        console.print(Text(f"$ dflash generate {shown}", style="bold"), end="\n\n")
        console.print(Text.from_ansi(printed))
        svg = console.export_svg(title="dflash", theme=THEME)
    out.parent.mkdir(parents=True, exist_ok=True)
    # no trailing blanks in a file that is committed
    lines = (line.rstrip() for line in svg.splitlines())
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, draw, say where."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    prompt = given or ["How do rainbows form?", "--max-tokens", "96"]
    words = [*prompt, *(flag for flag in FLAGS if flag not in prompt)]
    draw(words, record(words), OUT)
    print(OUT)


if __name__ == "__main__":
    main()
