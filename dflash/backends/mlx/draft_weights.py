"""Tensors of a draft's safetensors files into its MLX module: all of them, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from dflash.backends.mlx.kinds import KINDS
from dflash.checkpoint import count_weights, weight_files
from dflash.drafts.names import own_table, published_name, unfuse
from dflash.drafts.spec import DraftSpec
from dflash.errors import CheckpointError, WeightsError


def load_weights(folder: Path, spec: DraftSpec, dtype: Any) -> tuple[Any, dict[str, Any]]:
    """The module with every weight from ``folder`` in ``dtype``, and the draft's own tables.

    Raises CheckpointError for files of another kind, WeightsError for tensors that are missing,
    left over, misshapen or not finite; one error lists them all.
    """
    if spec.raw.get("quantization_config") or spec.raw.get("quantization"):
        raise CheckpointError(
            f"{folder} is a quantised draft, which is not supported yet; use the draft's bfloat16 "
            "weights"
        )
    if spec.kind not in KINDS.names():
        raise CheckpointError(
            f"{folder} is a draft of kind {spec.kind!r}; the mlx backend runs "
            f"{', '.join(KINDS.names())}. Try --backend torch"
        )
    tensors = _tensors(folder, spec)
    tables = {name: tensors.pop(name) for name in list(tensors) if own_table(name)}
    _check_floats(folder, {n: t for n, t in {**tensors, **tables}.items() if n != "d2t"})
    model = KINDS.load(spec.kind).module(spec)
    _check(folder, dict(tree_flatten(model.parameters())), tensors)
    model.load_weights([(name, tensor.astype(dtype)) for name, tensor in tensors.items()])
    mx.eval(model.parameters())
    row = _mask_row(folder, spec)
    return model, tables if row is None else {**tables, "mask_embedding": row}


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


def _check_floats(folder: Path, tensors: Mapping[str, Any]) -> None:
    whole = sorted(n for n, t in tensors.items() if not mx.issubdtype(t.dtype, mx.floating))
    if whole:
        raise WeightsError(
            f"{folder} has weights stored as {tensors[whole[0]].dtype}: {', '.join(whole)}. "
            "Quantised drafts are not supported yet; use the draft's bfloat16 weights"
        )


def _check(folder: Path, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise WeightsError with everything that does not fit."""
    problems = [f"missing: {name}" for name in sorted(wanted.keys() - found.keys())]
    problems += [f"unknown: {name}" for name in sorted(found.keys() - wanted.keys())]
    both = sorted(wanted.keys() & found.keys())
    problems += [
        f"{name} is {list(found[name].shape)}, the config makes it {list(wanted[name].shape)}"
        for name in both
        if found[name].shape != wanted[name].shape
    ]
    problems += [
        f"{name} has numbers that are NaN or infinite"
        for name in both
        if not mx.isfinite(found[name].astype(mx.float32).sum()).item()
    ]
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise WeightsError(
            f"the tensors in {folder} are not those of the draft its config.json describes; "
            f"nothing was loaded:\n{listed}"
        )


def _mask_row(folder: Path, spec: DraftSpec) -> Any:
    """The sidecar that stands for the mask token's embedding row; None = there is none."""
    file = folder / "mask_embedding.safetensors"
    if file.is_file():
        sidecar: Any = mx.load(str(file))
        row = sidecar.get("embedding")
        if row is None or row.size != spec.target_hidden_size:
            raise WeightsError(f"{file} must hold 'embedding' of {spec.target_hidden_size} numbers")
        return row.flatten()
    if (folder / "mask_embedding.pt").exists():
        raise CheckpointError(
            f"{folder} brings its mask token's embedding in mask_embedding.pt, a pickle, which can "
            f"run code and is not opened. Make a folder without it: dflash convert {folder} --to "
            "mlx --out NEW"
        )
    return None
