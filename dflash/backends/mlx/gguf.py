"""GGUF files as targets, converted with MLX; `dflash.gguf_target` has the rest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash import gguf_target
from dflash.backends.mlx import lm
from dflash.gguf_target.weights import Floats, Library


def convert(file: Path, dtype: str = "float32", cache: Path | None = None) -> Path:
    """The Hugging Face folder of ``file`` in ``dtype``, converted now or found in ``cache``.

    Raises CheckpointError for files that are damaged or of an unsupported architecture,
    MissingBackend without the gguf package.
    """
    return gguf_target.convert(file, dtype, lambda: Library(_shapes, _stored, _save), cache)


def _shapes(config: Any) -> dict[str, tuple[int, ...]]:
    return lm.shapes(config.to_dict())


def _stored(values: Floats, dtype: str) -> Any:
    return mx.array(values).astype(getattr(mx, dtype))


def _save(tensors: Mapping[str, Any], file: Path) -> None:
    mx.save_safetensors(str(file), dict(tensors), metadata={"format": "pt"})
