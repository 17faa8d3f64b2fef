"""Tiny drafts and targets as GGUF files, and files with one thing wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from dflash.backends.torch.kinds import KINDS
from dflash.convert.gguf import write_sidecar
from dflash.drafts.spec import read_spec
from dflash.gguf_file import read_header
from tests.facades.drafts import config

DFLASH2: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": {
        "mask_token_id": 300,
        "target_layer_ids": [0, 2],
        "block_size": 6,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 8,
        "selector_top_k": 5,
    },
}


def tiny_weights(keys: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Seeded random weights of the draft that ``keys`` describe, under published names."""
    spec = read_spec(dict(keys))
    model = KINDS.load(spec.kind).module(spec)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = 1.0 / weight.shape[-1] ** 0.5 if weight.dim() > 1 else 0.1
            weight.normal_(1.0 if "norm" in name else 0.0, scale, generator=generator)
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items()}


def save_folder(folder: Path, **changes: Any) -> Path:
    """A draft as a Hugging Face folder."""
    keys = config(**changes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    save_file(tiny_weights(keys), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def save_sidecar(
    file: Path,
    target: Path,
    *,
    stored: str = "F32",
    edit: Callable[[dict[str, Any]], None] | None = None,
    **changes: Any,
) -> Path:
    """The same draft as a sidecar; ``edit`` changes its tensors."""
    keys = config(**changes)
    tensors: dict[str, Any] = {k: v.numpy() for k, v in tiny_weights(keys).items()}
    if edit is not None:
        edit(tensors)
    return write_sidecar(read_spec(keys), tensors, target, file, stored)


def edited(
    source: Path,
    out: Path,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
) -> Path:
    """A float32 file with metadata and tensors replaced; None leaves one out."""
    header, reader = read_header(source), gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, header.architecture)
    for key, value in {**header.metadata, **(keys or {})}.items():
        if value is None or key == "general.architecture":
            continue
        known = header.kinds.get(key)
        kind, inner = known or (gguf.GGUFValueType.get_type(value), -1)
        sub = None if inner < 0 else gguf.GGUFValueType(inner)
        writer.add_key_value(key, value, gguf.GGUFValueType(kind), sub)
    stored = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    for name, values in {**stored, **(tensors or {})}.items():
        if values is not None:
            writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out
