"""What a start found equal, so that the next one need not find out again.

Whether fused layers give the logits of transformers' own depends on the model's config and on code,
never on its weights: so the comparison is made once for each config and each version of the
packages and files that take part, and a file in the cache folder says that it went well. The file
holds what only transformers' class of the model knew (`dense.Facts`), for starts without it. One
that cannot be read or written costs the comparison, nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers

from dflash import env
from dflash.whole import write_whole

FILES = (
    *("attention", "cache", "decoder", "dense", "forward", "fused", "gated", "grouped"),
    *("interpreted", "narrow", "packed", "places", "products", "slots", "tuning"),
)
"""Modules beside this one whose code decides what a fused pass computes."""


def place(config: Mapping[str, Any], how: Iterable[str]) -> Path:
    """The file that stands for ``config`` (what config.json holds) run as ``how`` says."""
    digest = sha256("\n".join((*how, torch.__version__, transformers.__version__)).encode())
    shape = {key: value for key, value in config.items() if key != "_name_or_path"}
    digest.update(json.dumps(shape, sort_keys=True, default=str).encode())
    for name in FILES:
        digest.update((Path(__file__).parent / f"{name}.py").read_bytes())
    return env.cache_dir() / "checked" / digest.hexdigest()[:32]


def known(file: Path) -> dict[str, Any] | None:
    """What was noted where the comparison went well before; None where it was not made."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(found, dict) and found.get("sum") == _sum(found.get("facts")):
            return found
    return None


def remember(file: Path, facts: Any) -> None:
    """It went well; ``facts`` are what `dense.facts_of` found."""
    with suppress(OSError):  # a full or read-only disk: the next start compares again
        write_whole(file, json.dumps({"facts": facts, "sum": _sum(facts)}))


def _sum(facts: Any) -> str:
    """What tells facts from a damaged file of them: weights are run by what it says."""
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
