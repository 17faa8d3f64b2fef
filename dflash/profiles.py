"""What earlier processes measured of a pair, kept in the cache folder.

A file is only ever a starting point, and never a reason to fail: one that cannot be read, or is of
other weights or another version, counts as none and is written anew; one that cannot be written is
left out. Read when an engine starts, written when it closes, never in between.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dflash import env
from dflash.config import NO_DRAFT, join_draft, split_draft
from dflash.core.profile import Profile
from dflash.core.protocols import Pair
from dflash.whole import write_whole

FORMAT = 3  # 2 had costs that were measured once
_MOST = 4096  # drafts of a pair, rows of a block
_WEIGHTS = ("*.safetensors", "*.json", "*.gguf", "*.bin")


@dataclass(frozen=True, slots=True)
class ProfileFile:
    """One pair's file. ``pair`` names it; ``stamp`` says what must be equal for it to count."""

    path: Path
    pair: Mapping[str, str]
    stamp: Mapping[str, str]

    def read(self) -> Profile:
        """What the file says; an empty profile where there is none that counts."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if found["pair"] == self.pair and found["stamp"] == self.stamp:
                _check(found["profile"])
                return Profile.from_json(found["profile"])
        except RecursionError:
            pass  # brackets without end
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
            pass  # none, damaged, or written by a version that put other things into it
        return Profile()

    def write(self, profile: Profile) -> None:
        """Replace the file in one move, so that a reader never sees half of one."""
        learnt = profile.to_json()
        if not learnt["costs"]:
            return
        text = json.dumps({"pair": self.pair, "stamp": self.stamp, "profile": learnt})
        with suppress(OSError):  # a full or read-only disk: the next run starts from nothing
            write_whole(self.path, text)


def folder() -> Path:
    """Where profiles lie."""
    return env.cache_dir() / "profiles"


def file_of(pair: Pair) -> ProfileFile | None:
    """The file for ``pair``; None for a pair whose speed is not worth remembering."""
    runs_on = pair.runs_on()
    if not runs_on or pair.draft_name is None:
        return None
    model, look_up = split_draft(pair.draft_name)
    draft = join_draft(model if model == NO_DRAFT else _absolute(model), look_up) or NO_DRAFT
    known = {"target": _absolute(pair.target_name), "draft": draft, "backend": pair.backend}
    known |= runs_on
    digest = sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
    stamp = {"format": str(FORMAT), "version": _version()}
    stamp["weights"] = f"{_weights(pair.target_name)} {_weights(model)}"
    return ProfileFile(folder() / f"{digest[:20]}.json", known, stamp)


def _absolute(name: str) -> str:
    """A path by its place, so that two checkouts do not share; a hub id as it stands."""
    place = Path(name).expanduser()
    return str(place.resolve()) if place.exists() else name


def _weights(name: str) -> str:
    """Size and age of what lies there: a draft trained anew has other habits."""
    place = Path(name).expanduser()
    files = [place] if place.is_file() else []
    with suppress(OSError):
        if place.is_dir():
            files = [file for kind in _WEIGHTS for file in sorted(place.glob(kind))]
        seen = [file.stat() for file in files]
        return f"{sum(s.st_size for s in seen)}@{max((s.st_mtime_ns for s in seen), default=0)}"
    return "?"


def _version() -> str:
    try:
        return version("dflash-engine")
    except PackageNotFoundError:  # run from a folder that was never installed
        return "unknown"


def _check(profile: Mapping[str, Any]) -> None:
    """Raise ValueError for numbers that no measurement gives."""
    costs = [float(ns) for _, _, ns in profile["costs"]]
    whole = [n for draft, rows, _ in profile["costs"] for n in (draft + 1, rows)]
    if not all(isinstance(n, int | float) and 0 <= n <= _MOST for n in whole):
        raise ValueError(f"drafts and rows are numbers up to {_MOST}")
    rests = [float(n) for pair in profile.get("rests", {}).values() for n in pair]
    if not all(math.isfinite(n) and n >= 0 for n in rests):
        raise ValueError("a rest is a number of rounds")
    chances = [float(chance) for row in profile["survival"].values() for chance in row]
    if not all(math.isfinite(ns) and ns > 0 for ns in costs):
        raise ValueError("a cost is a positive number of nanoseconds")
    if not all(0 <= chance <= 1 for chance in chances):
        raise ValueError("a chance lies between 0 and 1")
