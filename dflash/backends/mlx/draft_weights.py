"""Tensors of a draft's safetensors files into its MLX module: all of them, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from dflash.backends.mlx.kinds import KINDS
from dflash.checkpoint import count_weights, weight_files
from dflash.draft_parts import (
    MASK,
    check_finite,
    check_floats,
    check_mask_row,
    check_shapes,
    mask_sidecar,
    refuse_files,
)
from dflash.drafts.names import own_table, published_name, unfuse
from dflash.drafts.spec import DraftSpec
from dflash.errors import CheckpointError


def load_weights(folder: Path, spec: DraftSpec, dtype: Any) -> tuple[Any, dict[str, Any]]:
    """The module with every weight from ``folder`` in ``dtype``, and the draft's own tables.

    Raises CheckpointError for files of another kind, WeightsError for tensors that are missing,
    left over, misshapen or not finite; one error lists them all.
    """
    refuse_files(folder, spec)
    if spec.kind not in KINDS.names():
        raise CheckpointError(
            f"{folder} is a draft of kind {spec.kind!r}; the mlx backend runs "
            f"{', '.join(KINDS.names())}. Try --backend torch"
        )
    tensors = _tensors(folder, spec)
    tables = {name: tensors.pop(name) for name in list(tensors) if own_table(name)}
    model = KINDS.load(spec.kind).module(spec)
    check_shapes(folder, spec, _shapes(dict(tree_flatten(model.parameters()))), _shapes(tensors))
    weights = {name: tensor for name, tensor in {**tensors, **tables}.items() if name != "d2t"}
    check_floats(folder, {n: str(t.dtype) for n, t in weights.items() if not _is_float(t)})
    check_finite(folder, [name for name, tensor in weights.items() if not _is_finite(tensor)])
    model.load_weights([(name, tensor.astype(dtype)) for name, tensor in tensors.items()])
    mx.eval(model.parameters())
    return model, {**tables, **_mask_row(folder, spec)}


def _tensors(folder: Path, spec: DraftSpec) -> dict[str, Any]:
    count_weights(folder)  # complete files, before anything is read
    sizes = [n * spec.head_dim for n in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
    found: dict[str, Any] = {}
    for file in weight_files(folder):
        try:
            stored: Any = mx.load(str(file))
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from error
        for theirs, tensor in stored.items():
            name = published_name(theirs)
            if name is not None:
                parts = unfuse(name, tensor.shape[0] if tensor.ndim else 0, sizes)
                found |= {part: tensor[start:stop] for part, start, stop in parts} or {name: tensor}
    return found


def _shapes(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _is_float(tensor: Any) -> bool:
    return bool(mx.issubdtype(tensor.dtype, mx.floating))


def _is_finite(tensor: Any) -> bool:
    """NaN and infinity show in a sum, which is cheap."""
    return bool(mx.isfinite(tensor.astype(mx.float32).sum()).item())


def _mask_row(folder: Path, spec: DraftSpec) -> dict[str, Any]:
    """The row that stands for the mask token's embedding, if there is one."""
    file = mask_sidecar(folder)
    if file is None:
        return {}
    stored: Any = mx.load(str(file))
    row = stored.get("embedding")
    check_mask_row(file, None if row is None else row.size, spec)
    return {MASK: row.flatten()}
