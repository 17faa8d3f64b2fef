"""Tables of a report: for the terminal, and for a page in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

COLUMNS = ("arm", "tok/s", "x plain", "95 %", "committed", "macro", "accepted", "texts")


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table that can go into a page as it stands; the first column is text."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def arms_table(report: Mapping[str, Any]) -> Table:
    """A row an arm; what an arm does not have is left blank."""
    table = Table(title=None)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "arm" else "right")
    for row in report["rows"]:
        table.add_row(*cells(row))
    return table


def cells(row: Mapping[str, Any]) -> list[str]:
    """One arm's figures as text."""
    totals, speedup = row["totals"], row["speedup"]
    drafted = bool(totals["drafted"])
    return [
        row["arm"],
        f"{row['rate']:.1f}",
        f"{speedup['value']:.3f}" if speedup else "refused",
        f"{speedup['low']:.3f} to {speedup['high']:.3f}" if speedup else "",
        f"{totals['micro']:.2f}" if drafted else "",
        f"{totals['macro']:.2f}" if drafted else "",
        f"{100 * totals['acceptance_rate']:.0f} %" if drafted else "",
        str(row["texts"]),
    ]
