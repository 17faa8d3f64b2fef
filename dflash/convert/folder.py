"""Draft folders: config.json, safetensors files and what lies beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dflash.convert.draft import Draft
from dflash.convert.tensor import FLOATS, Tensor, read_tensors, write_tensors
from dflash.errors import CheckpointError, MissingBackend, WeightsError

CONFIG, INDEX, ONE_FILE = "config.json", "model.safetensors.index.json", "model.safetensors"
MASK = "mask_embedding"


def read_files(folder: Path) -> dict[str, dict[str, Tensor]]:
    """File name to its tensors, in the order of the index. Raises CheckpointError."""
    return {name: dict(read_tensors(folder / name)) for name in _file_names(folder)}


def _file_names(folder: Path) -> list[str]:
    index = folder / INDEX
    if not index.is_file():
        if (folder / ONE_FILE).is_file():
            return [ONE_FILE]
        raise CheckpointError(
            f"{folder} has no {ONE_FILE}; only safetensors are read (pickles can run code). Have "
            "other files converted once by their author's tool"
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is not a shard index") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder} lacks {', '.join(missing)}. Download it again")
    return names


def read_mask_embedding(folder: Path) -> Tensor | None:
    """The row that stands for the mask token, from either form of the sidecar; None = none.

    A ``.pt`` is read by torch with ``weights_only=True``, which runs nothing. Raises
    MissingBackend without torch, WeightsError for anything but one row of numbers.
    """
    file = folder / f"{MASK}.safetensors"
    if file.is_file():
        return _row(dict(read_tensors(file)).get("embedding"), file)
    file = folder / f"{MASK}.pt"
    return _row(_from_pickle(file), file) if file.is_file() else None


def _from_pickle(file: Path) -> Tensor | None:
    try:
        import torch
    except ImportError as error:
        raise MissingBackend(
            f"{file} is a torch file: pip install 'dflash-engine[torch]' to convert it"
        ) from error
    from pickle import UnpicklingError

    try:
        stored: Any = torch.load(file, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise WeightsError(
            f"{file} holds more than tensors and numbers, or is damaged; it was not opened, for a "
            "pickle can run code. Ask its author for safetensors"
        ) from error
    row = stored.get("embedding") if isinstance(stored, Mapping) else stored
    if not isinstance(row, torch.Tensor) or not row.is_floating_point():
        return None
    if row.dtype == torch.bfloat16:
        return Tensor("BF16", row.view(torch.int16).numpy().view(np.uint16))
    kept = row.float() if row.dtype != torch.float16 else row
    return Tensor("F16" if row.dtype == torch.float16 else "F32", kept.numpy())


def _row(tensor: Tensor | None, file: Path) -> Tensor:
    if tensor is None or tensor.dtype not in FLOATS:
        raise WeightsError(f"{file} must hold 'embedding', one row of numbers")
    return Tensor(tensor.dtype, tensor.values.reshape(-1))


def write_folder(
    out: Path, draft: Draft, config: Mapping[str, Any], tensors: Mapping[str, Tensor], made_by: str
) -> None:
    """Write ``tensors`` under ``config``, in the shards that the draft came in.

    ``made_by`` is the safetensors metadata's ``format``. A tensor that was in no shard goes into
    the last one.
    """
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dict(config), indent=2) + "\n"
    (out / CONFIG).write_text(text, encoding="utf-8")
    last = max(draft.shards.values(), default=ONE_FILE)
    places = {name: draft.shards.get(name, last) for name in tensors}
    for file in sorted(set(places.values())):
        part = {name: tensors[name] for name, place in places.items() if place == file}
        write_tensors(out / file, part, {"format": made_by})
    if set(places.values()) != {ONE_FILE}:
        size = sum(tensor.values.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    if draft.mask_embedding is not None:
        row = {"embedding": draft.mask_embedding}
        write_tensors(out / f"{MASK}.safetensors", row, {"format": made_by})
