"""Tables of measurements."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.table import Table

from dflash.bench.table import markdown

if TYPE_CHECKING:
    from bench.demo import Row

__all__ = ["markdown", "speed_table"]

COLUMNS = ("arm", "tok/s", "x transformers", "95 %", "x plain", "committed", "macro", "prefill ms")


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
