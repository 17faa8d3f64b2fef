"""What a config says and a sidecar has no key for: kept in one key of our own, as JSON.

llama.cpp passes over keys that it does not know. Nothing in here is about the draft's arithmetic,
so a file means the same without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dflash.convert.known import told
from dflash.errors import CheckpointError
from dflash.gguf_file import KEPT, Header, kept_config


def packed(config: Mapping[str, Any]) -> str | None:
    """The value of `KEPT`; None where there is nothing to keep."""
    kept = told(config)
    return json.dumps(kept, sort_keys=True) if kept else None


def with_extra(config: Mapping[str, Any], header: Header) -> dict[str, Any]:
    """``config`` with what the file keeps of ours; what its other keys say comes first.

    Raises CheckpointError for a value that is damaged.
    """
    kept = kept_config(header)
    try:
        nested = {**kept.pop("dflash_config", {}), **config.get("dflash_config", {})}
    except TypeError as error:
        raise CheckpointError(
            f"{header.path.name}: {KEPT} is damaged ({error}); convert the draft again"
        ) from error
    return {**kept, **config, **({"dflash_config": nested} if nested else {})}
