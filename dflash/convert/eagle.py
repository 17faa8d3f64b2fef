"""EAGLE-3 as EAGLE and SpecForge write it: one ``midlayer``, a Llama config, t2d beside d2t.

The layer ids have two conventions, by where they stand; they are left where they are.
"""

from __future__ import annotations

from pathlib import Path

from dflash.convert.draft import Draft, make_t2d, require_kind
from dflash.convert.folder import write_folder
from dflash.convert.tensor import Tensor


def write(draft: Draft, out: Path, made_by: str = "pt") -> None:
    """Write ``draft`` to the folder ``out``. Raises CheckpointError for other kinds."""
    require_kind(draft, ["eagle3"], "EAGLE")
    tensors: dict[str, Tensor] = {
        name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in draft.tensors.items()
    }
    shards = {name.replace("layers.0.", "midlayer.", 1): f for name, f in draft.shards.items()}
    if "d2t" in tensors:
        tensors["t2d"] = make_t2d(tensors["d2t"], draft.keys.count("vocab_size"))
    kept = Draft(draft.kind, draft.config, tensors, shards, draft.mask_embedding)
    write_folder(out, kept, draft.config, tensors, made_by)
