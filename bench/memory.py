"""Resident memory of the demo pair, and how it grows with the context.

    python -m bench.memory --contexts 512,1024,2048,4096

Each context length gets a process of its own: a prompt that leaves 64 tokens, then 64 tokens with
the draft. The peak is the kernel's high-water mark; the one of loading is listed apart, because a
peak of the run that stays below it cannot be seen.
"""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import record, sets

LAST = 64  # tokens generated
MIB = 2**20


def peak_rss() -> int:
    """Bytes: this process's high-water mark."""
    return _status("VmHWM")


def rss() -> int:
    """Bytes resident now."""
    return _status("VmRSS")


def reset_peak() -> None:
    """Let the high-water mark start again from what is resident now (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this measurement needs Linux's /proc")


def slope(points: Sequence[tuple[int, int]]) -> float:
    """Bytes a token: least squares through (tokens, bytes)."""
    n = len(points)
    mean_x, mean_y = (sum(column) / n for column in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def one(flags: Namespace) -> dict[str, Any]:
    """Load, fill ``flags.context`` tokens, report bytes."""
    import dflash

    with dflash.load(flags.target, flags.draft, threads=flags.threads) as engine:
        loading, loaded = peak_rss(), rss()
        text = "\n".join(prompt.text for prompt in sets.mixed(240))
        ids = engine.encode(text, chat_template=False)
        ids = (ids * (flags.context // len(ids) + 1))[: flags.context - LAST]
        reset_peak()
        out = engine.generate(ids, max_tokens=LAST, ignore_eos=True, block_size=flags.block_size)
        return {
            "context": len(ids) + len(out.token_ids),
            "loading_peak": loading,
            "loaded": loaded,
            "peak": peak_rss(),
            "after": rss(),
            "components": dict(engine.pair.memory()),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """One process a context length; print and write JSON."""
    parser = record.parser(__doc__, tokens=LAST, prompts=0)
    parser.add_argument("--contexts", default="512,1024,2048,4096")
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--context", type=int, default=None, help="only this one, JSON to stdout")
    given = list(sys.argv[1:] if arguments is None else arguments)
    flags = parser.parse_args(given)
    if flags.context:
        print(json.dumps(one(flags)))
        return
    before = record.conditions(flags.threads)
    rows = [_spawn(given, int(context)) for context in flags.contexts.split(",")]
    growth = slope([(row["context"], row["peak"]) for row in rows])
    _print(rows, growth)
    out = flags.out or Path("runs/memory.json")
    record.write(out, {"conditions": before, "bytes_per_token": growth, "rows": rows})


def _spawn(given: list[str], context: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.memory", *given, "--context", str(context)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return row


def _print(rows: Sequence[dict[str, Any]], growth: float) -> None:
    table = Table(title=f"resident MiB; {growth / 1024:.1f} KiB a token of context")
    columns = ("context", "loading_peak", "loaded", "peak", "after")
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        cells = (f"{row[c] / MIB:.0f}" for c in columns[1:])
        table.add_row(str(row["context"]), *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
