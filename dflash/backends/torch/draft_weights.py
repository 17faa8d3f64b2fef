"""Tensors of a draft's safetensors files into its module: all of them, and nothing else.

Names are those of published DFlash files, with or without a ``model.`` prefix. Nothing is
executed: pickles are refused with the command that converts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from dflash.backends.torch.dflash import DFlashDraftModel, make_rotary
from dflash.backends.torch.kinds import KINDS
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


def load_weights(
    folder: Path, spec: DraftSpec, *, device: torch.device, dtype: torch.dtype
) -> tuple[DFlashDraftModel, dict[str, Tensor]]:
    """The module with every weight from ``folder``, and the tables the draft brought itself.

    The tables are those of ``names.TABLES`` that exist, and ``mask_embedding`` of a sidecar. Raises
    CheckpointError for files of another kind, WeightsError for tensors that are missing, left
    over, misshapen or not finite; one error lists them all.
    """
    refuse_files(folder, spec)
    with torch.device("meta"):
        model: DFlashDraftModel = KINDS.load(spec.kind).module(spec)
    tensors = dict(_tensors(folder, spec))
    tables = {name: tensors.pop(name) for name in list(tensors) if own_table(name)}
    check_shapes(folder, spec, _shapes(model.state_dict()), _shapes(tensors))
    whole = {n: str(t.dtype) for n, t in {**tensors, **tables}.items() if not t.is_floating_point()}
    check_floats(folder, {name: kind for name, kind in whole.items() if name != "d2t"})
    state = {name: tensor.to(device, dtype, copy=True) for name, tensor in tensors.items()}
    model.load_state_dict(state, assign=True)
    model.rotary = make_rotary(spec).to(device)
    _check_finite(folder, {**state, **tables})
    return model.eval().requires_grad_(False), {**tables, **_mask_embedding(folder, spec)}


def _tensors(folder: Path, spec: DraftSpec) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under the name the module gives it."""
    count_weights(folder)  # complete files, before anything is read
    sizes = [n * spec.head_dim for n in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                for stored in tensors.keys():  # noqa: SIM118  # the handle is no mapping
                    name = published_name(stored)
                    if name is not None:
                        yield from _unfused(name, tensors.get_tensor(stored), sizes)
        except SafetensorError as error:
            raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from error


def _unfused(name: str, tensor: Tensor, sizes: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """A fused query, key and value projection as three; anything else as it is."""
    parts = unfuse(name, tensor.shape[0] if tensor.ndim else 0, sizes)
    if not parts:
        yield name, tensor
    for part, start, stop in parts:
        yield part, tensor[start:stop]


def _check_finite(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    floats = [(name, tensor) for name, tensor in tensors.items() if tensor.is_floating_point()]
    check_finite(folder, [name for name, tensor in floats if not bool(tensor.isfinite().all())])


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _mask_embedding(folder: Path, spec: DraftSpec) -> dict[str, Tensor]:
    """The row that stands for the mask token's embedding, if there is one."""
    file = mask_sidecar(folder)
    if file is None:
        return {}
    row = load_file(file).get("embedding")
    check_mask_row(file, None if row is None else row.numel(), spec)
    assert row is not None, "checked"
    return {MASK: row.flatten()}
