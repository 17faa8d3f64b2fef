"""Writes the block size that a run recommends into the draft's own config."""

from __future__ import annotations

import json
from pathlib import Path

from dflash.drafts.spec import read_spec
from dflash.errors import ConfigError
from dflash.whole import write_whole


def config_of(draft: str | None) -> Path:
    """The draft's config.json. Raises ConfigError when the draft is no local folder."""
    place = None if draft is None else Path(draft).expanduser() / "config.json"
    if place is None or not place.is_file():
        raise ConfigError(
            f"--write-config needs a draft in a local folder, and {draft} is none: download it "
            "first, or pass --block-size where you use it"
        )
    return place


def lock(draft: str | None, block_size: int) -> Path:
    """Set ``default_block_size`` in the draft's config.json; its native ``block_size`` stays.

    Raises ConfigError when the draft is no local folder, cannot be written, or is smaller.
    """
    place = config_of(draft)
    native = read_spec(place.parent).block_size
    if block_size > native:
        raise ConfigError(f"block size {block_size} is more than the draft's native {native}")
    config = json.loads(place.read_text(encoding="utf-8"))
    inner = config.get("dflash_config")
    (inner if isinstance(inner, dict) else config)["default_block_size"] = block_size
    try:
        write_whole(place, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    except OSError as problem:
        raise ConfigError(f"cannot write {place}: {problem.strerror}") from problem
    return place
