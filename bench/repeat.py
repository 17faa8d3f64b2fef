"""Whether two runs of ``dflash bench`` agree, and what a choice of ``dflash sweep`` is worth.

    python -m bench.repeat twice one/report.json two/report.json
    python -m bench.repeat sweep long/report.json sweep-1.json sweep-2.json

Two runs agree on an arm when the intervals of its speed-up have a common part. A sweep has chosen
well when its block takes at most 5 % more time than the best of the long run. Exits 1 otherwise.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.table import markdown

ALLOWED = 0.05


def twice(one: Mapping[str, Any], two: Mapping[str, Any]) -> tuple[str, bool]:
    """A table of both runs by arm, and whether they agree on every arm that both show."""
    lines, good = [], True
    pairs = zip(one["rows"], two["rows"], strict=True)
    for first, second in [(a, b) for a, b in pairs if a["arm"] != one["baseline"]]:
        spans = [row["speedup"] for row in (first, second)]
        if None in spans:
            lines.append([first["arm"], *(_span(s) for s in spans), "refused"])
            continue
        common = min(s["high"] for s in spans) >= max(s["low"] for s in spans)
        good = good and common
        lines.append([first["arm"], *(_span(s) for s in spans), "yes" if common else "no"])
    return markdown(("arm", "first run", "second run", "agree"), lines), good


def _span(found: Mapping[str, float] | None) -> str:
    return (
        "-"
        if found is None
        else f"{found['value']:.3f} ({found['low']:.3f} to {found['high']:.3f})"
    )


def chosen(long: Mapping[str, Any], sweeps: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
    """What each sweep chose, and how much more time that takes than the best of the long run."""
    speed = {1: 1.0}
    for row in long["rows"]:
        size = long["blocks"].get(row["arm"])
        if isinstance(size, int) and row["speedup"] is not None:
            speed[size] = row["speedup"]["value"]
    best = max(speed, key=speed.__getitem__)
    lines, good = [["long run", f"{best}", f"{speed[best]:.3f}", "", ""]], True
    for number, found in enumerate(sweeps, 1):
        size = found["block_size"]
        more = speed[best] / speed[size] - 1
        good = good and more <= ALLOWED
        seconds = f"{found['seconds']:.0f}"
        lines.append([f"sweep {number}", f"{size}", f"{speed[size]:.3f}", f"{more:.1%}", seconds])
    head = ("", "block", "x plain in the long run", "more time than the best", "seconds")
    return markdown(head, lines), good


def main() -> None:
    """Print the table; exit 1 where it is not good."""
    flags = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("what", choices=("twice", "sweep"))
    flags.add_argument("files", type=Path, nargs="+")
    given = flags.parse_args()
    first, *rest = (json.loads(file.read_text(encoding="utf-8")) for file in given.files)
    text, good = twice(first, *rest) if given.what == "twice" else chosen(first, rest)
    print(text)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
