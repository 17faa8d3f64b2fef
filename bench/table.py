"""Tables of measurements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from bench.demo import Row

COLUMNS = ("arm", "tok/s", "x transformers", "95 %", "x plain", "committed", "macro", "prefill ms")


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table that can go into a page as it stands; the first column is text."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def speed_table(title: str, rows: Iterable[Row]) -> Table:
    """One row an arm; what an arm does not have is left blank."""
    table = Table(title=title)
    for column in (*COLUMNS, "differ"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for row in rows:
        table.add_row(
            row.arm,
            f"{row.rate:.1f}",
            f"{row.over_transformers:.3f}",
            f"{row.low:.3f} to {row.high:.3f}" if row.high else "",
            f"{row.over_plain:.3f}",
            "" if row.micro is None else f"{row.micro:.3f}",
            "" if row.macro is None else f"{row.macro:.3f}",
            f"{row.prefill_ms:.0f}",
            str(row.differ) if row.differ else "",
        )
    return table
