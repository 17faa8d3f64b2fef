"""Open a target with mlx-lm: a folder, a hub id, or a model the user already has.

Quantised MLX folders (4 and 8 bit) load as they are; a GGUF file becomes a folder in the cache,
once. Nothing in a checkpoint is executed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from dflash.backends.mlx import lm
from dflash.backends.mlx.cache import Caches
from dflash.checkpoint import read_config, require_target
from dflash.errors import CheckpointError, WeightsError
from dflash.model_folders import target_folder
from dflash.target_facts import joined_ids

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


@dataclass(frozen=True)
class LoadedTarget:
    """A model of mlx-lm ready to run, and what the rest of the package needs to know of it."""

    model: Any
    tokenizer: Any  # transformers' tokenizer; None if the user gave none
    name: str  # what the user asked for
    config: Mapping[str, Any] = field(default_factory=dict)  # config.json, its text part
    eos_ids: frozenset[int] = frozenset()
    folder: Path | None = None  # its files; None for a model that the user holds

    @property
    def embed(self) -> Any:
        """Callable ids [n] -> raw embedding rows [n, Ht], no family's scale applied."""
        return lm.stack_of(self.model).embed_tokens

    @property
    def head(self) -> Any:
        """Callable [.., Ht] -> [.., V], without soft cap or multiplier."""
        return lm.head_of(self.model)

    @property
    def hidden_size(self) -> int:
        """Ht, width of a tapped state."""
        return int(self.embed(mx.array([0])).shape[-1])

    @property
    def num_layers(self) -> int:
        """Decoder layers: taps are 0 .. num_layers - 1."""
        return len(lm.stack_of(self.model).layers)

    @property
    def vocab_size(self) -> int:
        """V, rows of the head (may be more than the tokenizer has tokens)."""
        return int(self.embed.weight.shape[0])

    @property
    def dtype(self) -> Any:
        """Number format of its states."""
        return self.embed(mx.array([0])).dtype

    @property
    def context_length(self) -> int:
        """Most tokens, prompt and output together."""
        return int(self.config.get("max_position_embeddings") or 1 << 15)

    def bytes(self) -> int:
        """Bytes of the weights."""
        return sum(int(array.nbytes) for _, array in tree_flatten(self.model.parameters()))


def load_target(
    path: str, dtype: str | None = None, *, trust_remote_code: bool = False
) -> LoadedTarget:
    """Open the target at ``path``: a folder, a hub id, or a ``.gguf`` file.

    ``dtype`` None keeps the stored one on a GPU (a GGUF file's: bfloat16) and takes float32
    without. Raises CheckpointError, WeightsError, DownloadError, ConfigError, MissingBackend.
    """
    folder = resolve(path, dtype or ("bfloat16" if mx.metal.is_available() else "float32"))
    config = read_config(folder)
    require_target(config, path)
    model, tokenizer = lm.load(folder, trust_remote_code=trust_remote_code)
    if dtype is not None or not mx.metal.is_available():
        model.set_dtype(DTYPES[dtype or "float32"])
    _check_finite(model, path)
    inner = getattr(tokenizer, "_tokenizer", tokenizer)
    target = wrap_target(model, inner, path, config, _eos_ids(folder, config, inner))
    return replace(target, folder=folder)


def wrap_target(
    model: Any,
    tokenizer: Any = None,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    eos: frozenset[int] = frozenset(),
) -> LoadedTarget:
    """The same description for a model that the user holds; it is not changed in any way.

    Raises CheckpointError for what is no model of mlx-lm that can be rolled back.
    """
    if not hasattr(model, "parameters") or not callable(model):
        raise CheckpointError(f"a target must be a model of mlx-lm, got {type(model).__name__}")
    Caches(model)  # refuses state that cannot go back
    whole = dict(
        config or vars(getattr(model, "args", None) or object) if config is None else config
    )
    text = whole.get("text_config") or whole
    return LoadedTarget(model, tokenizer, name or str(whole.get("model_type", "target")), text, eos)


def resolve(path: str, dtype: str = "float32") -> Path:
    """The folder behind ``path``. Raises CheckpointError, DownloadError, MissingBackend."""

    def convert(file: Path) -> Path:
        from dflash.backends.mlx import gguf  # only GGUF users pay for the import

        return gguf.convert(file, dtype)

    return target_folder(path, convert)


def _eos_ids(folder: Path, config: Mapping[str, Any], tokenizer: Any) -> frozenset[int]:
    """Every id that ends a text, from all of the folder's configs and the tokenizer."""
    sources = [config, config.get("text_config") or {}]
    file = folder / "generation_config.json"
    if file.is_file():
        try:
            sources.append(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
    said = [source.get("eos_token_id") for source in sources]
    return joined_ids([*said, getattr(tokenizer, "eos_token_id", None)])


def _check_finite(model: Any, name: str) -> None:
    weights = [
        w for _, w in tree_flatten(model.parameters()) if mx.issubdtype(w.dtype, mx.floating)
    ]
    sums = mx.stack([weight.astype(mx.float32).sum() for weight in weights])
    if not mx.isfinite(sums).all().item():
        raise WeightsError(
            f"{name} has weights that are NaN or infinite. The file is damaged or was converted to "
            "too narrow a dtype; get it again"
        )
