"""The header of a safetensors file: names, dtypes, shapes, places. No array library."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Header:
    """``entries``: name to dtype, shape and data_offsets (bytes from ``start``)."""

    entries: Mapping[str, Mapping[str, Any]]
    metadata: Mapping[str, str]
    start: int  # first byte of the data


def read_header(file: Path) -> Header:
    """The header of ``file``. Raises CheckpointError if it is cut short or no safetensors."""
    broken = f"{file} is damaged or incomplete. Download it again"
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            first = stream.read(8)
            if len(first) < 8 or (length := struct.unpack("<Q", first)[0]) > size - 8:
                raise CheckpointError(broken)
            entries = json.loads(stream.read(length))
        metadata = entries.pop("__metadata__", None) or {}
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(broken) from error
    if 8 + length + end != size:
        raise CheckpointError(f"{broken} ({8 + length + end} bytes expected, {size} found)")
    return Header(entries, metadata, 8 + length)
