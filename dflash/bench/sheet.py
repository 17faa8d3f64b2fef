"""Hardware and versions: what a figure depends on, as far as the machine tells."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

from dflash.bench import record
from dflash.core.protocols import Pair

GIB = 2**30


def machine(threads: int | None) -> dict[str, Any]:
    """The conditions of the run with memory, governor and operating system."""
    return {
        **record.conditions(threads),
        "memory_gib": _memory(),
        "governor": _line(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        "os": platform.platform(),
    }


def pair_sheet(pair: Pair) -> dict[str, Any]:
    """Names, formats, sizes and the template of a pair."""
    template = str(getattr(pair.tokenizer, "chat_template", None) or "")
    return {
        "target": pair.target_name,
        "draft": pair.draft_name,
        "backend": pair.backend,
        "native_block_size": pair.draft_block_size,
        "default_block_size": pair.default_block_size,
        "context_length": pair.context_length,
        "chat_template_sha256": hashlib.sha256(template.encode()).hexdigest()[:16],
        "memory_mib": {name: round(size / 2**20, 1) for name, size in pair.memory().items()},
        **{f"runs_on_{name}": value for name, value in pair.runs_on().items()},
    }


def _memory() -> float | None:
    names = ("SC_PAGE_SIZE", "SC_PHYS_PAGES")
    if not hasattr(os, "sysconf") or any(name not in os.sysconf_names for name in names):
        return None
    size = os.sysconf(names[0]) * os.sysconf(names[1])
    return round(size / GIB, 1)


def _line(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None
