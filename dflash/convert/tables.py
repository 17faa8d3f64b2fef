"""Embedding and head: a draft borrows its target's, or carries copies of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dflash.convert.draft import Draft, target_ids
from dflash.convert.folder import read_files
from dflash.convert.tensor import Tensor
from dflash.errors import CheckpointError

EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"


def tables_of(target: Path, draft: Draft) -> dict[str, Tensor]:
    """The target's embedding [V, H] and head [Vd, H], as ``draft`` would borrow them.

    Raises CheckpointError if ``target`` is no folder with tables of the draft's width.
    """
    if not target.is_dir():
        raise CheckpointError(f"{target} is no target folder with safetensors")
    stored = {name: t for part in read_files(target).values() for name, t in part.items()}
    embed = stored.get(f"model.{EMBED}", stored.get(EMBED))
    head = stored.get(HEAD, embed)
    width = draft.keys.count("hidden_size")
    if embed is None or head is None or embed.shape[1] != width:
        raise CheckpointError(
            f"{target} has no embedding of width {width}; is it the target of this draft?"
        )
    if "d2t" in draft.tensors:
        head = Tensor(head.dtype, head.values[target_ids(draft.tensors["d2t"])])
    return {EMBED: embed, HEAD: head}


def without_tables(draft: Draft, tables: Mapping[str, Tensor]) -> Draft:
    """``draft`` without those of its tables that are the target's bit for bit."""
    copies = {n for n, table in tables.items() if n in draft.tensors and _same(draft, n, table)}
    kept = {name: tensor for name, tensor in draft.tensors.items() if name not in copies}
    return replace(draft, tensors=kept)


def _same(draft: Draft, name: str, table: Tensor) -> bool:
    return draft.tensors[name].equals(table)
