"""GGUF tensors as safetensors shards under transformers' names.

Names come from the ``gguf`` package's own table, applied to a model built without memory, so every
parameter of the model is looked for and every tensor of the file must be used. Two families are
stored changed and are changed back: llama's query and key rows are interleaved for another rope
layout, Gemma's norms have one added.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash.errors import CheckpointError

SHARD = 64 << 20  # small, so that a loaded shard's file can be let go before the next is touched
DERIVED = frozenset({"rope_freqs.weight"})  # already in the config
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

Advance = Callable[[int, int], None]
Floats = NDArray[np.float32]
Names = Mapping[str, tuple[str, tuple[int, ...]]]
"""transformers' parameter name -> (GGUF tensor name, shape), in the model's order."""


@dataclass(frozen=True, slots=True)
class Library:
    """What a backend's array library does for a conversion."""

    shapes: Callable[[Any], Mapping[str, tuple[int, ...]]]
    """Parameters of the model of a transformers config, by transformers' names."""
    stored: Callable[[Floats, str], Any]
    """Numbers in a dtype (`BYTES`), rounded to nearest; with ``nbytes``."""
    save: Callable[[Mapping[str, Any], Path], None]
    """Such arrays into a safetensors file."""


@dataclass(frozen=True, slots=True)
class Source:
    """A GGUF file whose names were checked."""

    config: Any  # transformers'
    tensors: Mapping[str, Any]  # of a gguf.GGUFReader
    names: Names


def check_names(config: Any, tensors: Mapping[str, Any], file: str, library: Library) -> Names:
    """Raises CheckpointError unless file and model fit one to one."""
    names = tensor_names(config, library)
    missing = sorted(name for name, (theirs, _) in names.items() if theirs not in tensors)
    unused = sorted(set(tensors) - {theirs for theirs, _ in names.values()} - DERIVED)
    if missing or unused:
        parts = [f"lacks the tensors for {_some(missing)}"] if missing else []
        parts += [f"holds tensors we have no use for: {_some(unused)}"] if unused else []
        raise CheckpointError(
            f"{file} {' and '.join(parts)}. It is incomplete (one part of a split file?) or of a "
            "variant we cannot read; use the model's safetensors folder"
        )
    for ours, (theirs, shape) in names.items():
        found = tuple(reversed(tensors[theirs].shape.tolist()))
        if found != shape:
            raise CheckpointError(f"{file}: {theirs} is {found}, {ours} must be {shape}")
    return names


def count_of(names: Names) -> int:
    """Numbers in all parameters."""
    return sum(prod(shape) for _, shape in names.values())


def tensor_names(config: Any, library: Library) -> Names:
    """Which tensor is which parameter, as the ``gguf`` package knows it."""
    import gguf

    family = config.model_type.removesuffix("_text")
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    table = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    found = {}
    for name, shape in library.shapes(config).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        theirs = table.get_name(name, try_suffixes=(".weight", ".bias"))
        found[name] = (theirs or name, tuple(shape))
    return found


def write_weights(
    folder: Path, source: Source, dtype: str, library: Library, advance: Advance
) -> None:
    """Dequantise into shards of about 64 MiB and their index."""
    import gguf

    total, done = count_of(source.names), 0
    index: dict[str, str] = {}
    shard: dict[str, Any] = {}

    def flush() -> None:
        if shard:
            name = f"model-{len(set(index.values())) + 1:05d}.safetensors"
            library.save(shard, folder / name)
            index.update(dict.fromkeys(shard, name))
            shard.clear()

    for ours, (theirs, shape) in source.names.items():
        tensor = source.tensors[theirs]
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        shard[ours] = library.stored(restore(ours, values, source.config), dtype)
        done += prod(shape)
        advance(done, total)
        if sum(int(weight.nbytes) for weight in shard.values()) >= SHARD:
            flush()
    flush()
    size = total * BYTES[dtype]
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=1)
    (folder / "model.safetensors.index.json").write_text(text)


def restore(name: str, values: Floats, config: Any) -> Floats:
    """``values`` of the parameter ``name`` as transformers keeps them, contiguous float32."""
    if config.model_type == "llama" and ".q_proj." in name:
        values = unpermute(values, config.num_attention_heads)
    elif config.model_type == "llama" and ".k_proj." in name:
        values = unpermute(values, config.num_key_value_heads)
    elif config.model_type.startswith("gemma") and name.endswith("norm.weight"):
        values = values - 1.0
    return np.array(values, dtype=np.float32)  # a copy: the file's map is read-only


def unpermute(values: Floats, heads: int) -> Floats:
    """Rows of each head from interleaved pairs (i, i + 1) to halves (i, i + D/2).

    ``values`` is ``[heads * D, ...]``; the rope of llama.cpp's llama files rotates neighbours,
    transformers' rotates halves.
    """
    split = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return split.swapaxes(1, 2).reshape(values.shape)


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
