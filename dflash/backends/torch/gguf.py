"""GGUF files as targets, converted with torch; `dflash.gguf_target` has the rest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dflash import gguf_target
from dflash.gguf_target.weights import Floats, Library


def convert(file: Path, dtype: str = "float32", cache: Path | None = None) -> Path:
    """The Hugging Face folder of ``file`` in ``dtype``, converted now or found in ``cache``.

    Raises CheckpointError for files that are damaged or of an unsupported architecture,
    MissingBackend without the gguf package.
    """
    return gguf_target.convert(file, dtype, lambda: Library(_shapes, _stored, _save), cache)


def _shapes(config: Any) -> dict[str, tuple[int, ...]]:
    from transformers import AutoModelForCausalLM

    build: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = build(config)
    return {name: tuple(weight.shape) for name, weight in model.state_dict().items()}


def _stored(values: Floats, dtype: str) -> torch.Tensor:
    return torch.from_numpy(values).to(getattr(torch, dtype))


def _save(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    save_file(dict(tensors), file, metadata={"format": "pt"})
