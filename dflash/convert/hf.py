"""Hugging Face folders as z-lab publishes them: DFlash v1 and DFlash2, and EAGLE-3 as it comes.

The config goes through as it stands. Tensor names lose prefixes and other spellings, fused
projections are taken apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash.convert import eagle
from dflash.convert.draft import KINDS, Draft, collect
from dflash.convert.folder import read_files, read_mask_embedding, write_folder
from dflash.drafts.keys import read_config
from dflash.drafts.kinds import kind_of
from dflash.drafts.names import published_name
from dflash.errors import CheckpointError


def read(folder: Path) -> Draft:
    """The draft in ``folder``. Raises CheckpointError, WeightsError, MissingBackend."""
    return read_as(folder, read_config(folder))


def read_as(folder: Path, config: Mapping[str, Any]) -> Draft:
    """The same under a ``config`` that was translated from another layout."""
    kind = kind_of(config)
    if kind not in KINDS:
        raise CheckpointError(
            f"{folder} is {'a target' if kind == 'target' else f'a draft of kind {kind}'}; drafts "
            f"of kind {', '.join(KINDS)} can be converted"
        )
    if config.get("quantization_config") or config.get("quantization"):
        raise CheckpointError(
            f"{folder} is a quantised draft, which is not converted; use its bfloat16 weights"
        )
    files = read_files(folder)
    tensors = collect((pair for part in files.values() for pair in part.items()), config)
    shards = {}
    if len(files) > 1:
        homes = {published_name(n): file for file, part in files.items() for n in part}
        shards = {name: homes.get(name, max(files)) for name in tensors}
    return Draft(kind, dict(config), tensors, shards, read_mask_embedding(folder))


def write(draft: Draft, out: Path) -> None:
    """Write ``draft`` to the folder ``out``."""
    if draft.kind == "eagle3":
        eagle.write(draft, out)
    else:
        write_folder(out, draft, draft.config, draft.tensors, "pt")
