"""What every measurement shares: its conditions, its file, its arithmetic."""

from __future__ import annotations

import json
import os
import platform
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("dflash-engine", "torch", "transformers", "xllamacpp", "mlx")


def conditions(threads: int | None) -> dict[str, Any]:
    """Command, commit, versions, machine: without them a figure means nothing."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.orig_argv[1:]),
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "machine": f"{platform.system()} {platform.machine()}, {_processor()}",
        "cores": os.cpu_count(),
        "threads": threads,
        "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def write(path: Path, result: dict[str, Any]) -> None:
    """The result as JSON, folders made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def bootstrap(
    count: int,
    statistic: Callable[[Sequence[int]], float],
    *,
    draws: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """95 % interval of ``statistic`` over resampled indices of ``count`` paired runs."""
    rng = random.Random(seed)
    values = sorted(statistic(rng.choices(range(count), k=count)) for _ in range(draws))
    return values[int(0.025 * draws)], values[int(0.975 * draws) - 1]


def _commit() -> str:
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:  # no git here
        return "unknown"
    return run.stdout.strip() or "unknown"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"
